"""Documents to sequences: tokenize, then split or drop what is longer than the context.

Every row of the result has `input_ids`, `labels` (not shifted; -100 where nothing is to be
predicted) and `length`. Nothing is padded or packed here: which sequences share a rank is decided
per step.
"""

from collections.abc import Callable

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from arguments import DataArguments
from corpus import document_columns
from hf_flexseq.config import IGNORE_INDEX
from rows import check_longer

Rows = dict[str, list]
# A document's text in order, each part with whether it is to be learned.
Parts = list[tuple[str, bool]]


def to_sequences(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
) -> tuple[Dataset, str]:
    """Return the sequences, and one line that says what became of the long documents."""
    columns = document_columns(documents, args)
    tokens = _map(documents, tokenize, args, tokenizer=tokenizer, columns=columns)
    longer = sum(length > args.max_length for length in tokens["length"])
    limit, advice = f"max_length={args.max_length:,}", "long_sequences to split or drop"
    check_longer(longer, len(tokens), "documents", limit, args.long_sequences, advice)
    sequences = _map(tokens, fit, args, max_length=args.max_length, how=args.long_sequences)
    if not len(sequences):
        raise ValueError(f"no sequence is left of {len(documents):,} documents of {args.dataset}")
    became = ""
    if longer:
        done = {"split": "split", "drop": "dropped"}[args.long_sequences]
        became = f" ({longer:,} longer ones {done})"
    return sequences, (
        f"{len(sequences):,} sequences of at most {args.max_length:,} tokens from "
        f"{len(documents):,} documents{became}, {sum(sequences['length']):,} tokens"
    )


def tokenize(rows: Rows, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]) -> Rows:
    """Return `input_ids`, `labels` and `length` of each document."""
    if columns == ("messages",):
        documents = [conversation_parts(messages, tokenizer) for messages in rows["messages"]]
    elif columns == ("prompt", "completion"):
        documents = []
        for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True):
            documents.append([(prompt, False), (completion, True)])
    else:
        documents = [[(text, True)] for text in rows[columns[0]]]
    encoded = [encode(parts, tokenizer, templated=columns == ("messages",)) for parts in documents]
    return {
        "input_ids": [ids for ids, _ in encoded],
        "labels": [labels for _, labels in encoded],
        "length": [len(ids) for ids, _ in encoded],
    }


def encode(
    parts: Parts, tokenizer: PreTrainedTokenizerBase, templated: bool
) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a document.

    Each part is tokenized for itself: as in generation, where a prompt's tokens do not depend on
    what follows. A chat template has already written the tokens that open and close a document.
    """
    ids: list[int] = []
    labels: list[int] = []
    for index, (text, learned) in enumerate(parts):
        new = tokenizer(text, add_special_tokens=index == 0 and not templated).input_ids
        ids += new
        labels += new if learned else [IGNORE_INDEX] * len(new)
    end = tokenizer.eos_token_id
    is_closed = templated or end is None or ids[-1:] == [end]
    if is_closed:
        return ids, labels
    return [*ids, end], [*labels, end]


def conversation_parts(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Cut a conversation, as its template writes it, into what the assistant says and the rest."""
    parts: Parts = []
    done = ""  # what the parts hold so far
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise ValueError(
                "the chat template writes earlier turns differently once later ones follow, so "
                "the assistant's cannot be told apart: write the conversations out yourself, as "
                "text or as prompt and completion"
            )
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return parts or [("", False)]


def fit(rows: Rows, max_length: int, how: str | None) -> Rows:
    """Return sequences of at most `max_length` tokens, without those that predict nothing.

    how: split or drop, what happens to longer documents; None where there are none.
    """
    fitting: Rows = {"input_ids": [], "labels": [], "length": []}
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        if how == "drop" and len(ids) > max_length:
            continue
        for start in range(0, len(ids), max_length):
            part = slice(start, start + max_length)
            # a sequence's first token is never predicted
            if all(label == IGNORE_INDEX for label in labels[part][1:]):
                continue
            fitting["input_ids"].append(ids[part])
            fitting["labels"].append(labels[part])
            fitting["length"].append(len(ids[part]))
    return fitting


def _map(
    documents: Dataset, function: Callable[..., Rows], args: DataArguments, **options: object
) -> Dataset:
    return documents.map(
        function,
        batched=True,
        fn_kwargs=options,
        remove_columns=documents.column_names,
        num_proc=args.preprocessing_workers,
    )
