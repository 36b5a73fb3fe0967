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

Rows = dict[str, list]
# A document's text in order, each part with whether it is to be learned.
Parts = list[tuple[str, bool]]


def to_sequences(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
) -> tuple[Dataset, str]:
    """The sequences, and one line that says what became of the long documents."""
    columns = document_columns(documents, args)
    tokens = _map(documents, tokenize, args, tokenizer=tokenizer, columns=columns)
    longer = sum(length > args.max_length for length in tokens["length"])
    if longer and args.long_sequences is None:
        raise ValueError(
            f"{longer:,} of {len(tokens):,} documents are longer than "
            f"max_length={args.max_length:,} tokens: "
            "set long_sequences to split or drop, or raise max_length"
        )
    sequences = _map(tokens, fit, args, max_length=args.max_length, how=args.long_sequences)
    if not len(sequences):
        raise ValueError(f"no sequence is left of {len(documents):,} documents of {args.dataset}")
    done = {"split": "split", "drop": "dropped", None: ""}[args.long_sequences]
    became = f" ({longer:,} longer ones {done})" if longer else ""
    return sequences, (
        f"{len(sequences):,} sequences of at most {args.max_length:,} tokens from "
        f"{len(documents):,} documents"
        f"{became}, {sum(sequences['length']):,} tokens"
    )


def tokenize(rows: Rows, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]) -> Rows:
    """`input_ids`, `labels` and `length` of each document."""
    if columns == ("messages",):
        documents = [conversation_parts(messages, tokenizer) for messages in rows["messages"]]
    elif columns == ("prompt", "completion"):
        documents = [
            [(p, False), (c, True)]
            for p, c in zip(rows["prompt"], rows["completion"], strict=True)
        ]
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
    """Tokens and labels of a document. Each part is tokenized for itself: as in generation, where
    a prompt's tokens do not depend on what follows. A chat template has already written the tokens
    that open and close a document."""
    ids, labels = [], []
    for index, (text, learned) in enumerate(parts):
        new = tokenizer(text, add_special_tokens=index == 0 and not templated).input_ids
        ids += new
        labels += new if learned else [IGNORE_INDEX] * len(new)
    end = tokenizer.eos_token_id
    closed = templated or end is None or ids[-1:] == [end]
    return (ids, labels) if closed else ([*ids, end], [*labels, end])


def conversation_parts(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> Parts:
    """A conversation as its template writes it, cut into what is given and what the assistant
    says."""
    parts, done = [], ""
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
                "the assistant's cannot "
                "be told apart: write the conversations out yourself, as text or as prompt and "
                "completion"
            )
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return parts or [("", False)]


def fit(rows: Rows, max_length: int, how: str | None) -> Rows:
    """Sequences of at most `max_length` tokens; one in which nothing is to be predicted is left
    out."""
    pieces = []
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        if how != "drop" or len(ids) <= max_length:
            starts = range(0, len(ids), max_length)
            pieces += [(ids[s : s + max_length], labels[s : s + max_length]) for s in starts]
    # A sequence's first token is never predicted.
    pieces = [
        (ids, labels)
        for ids, labels in pieces
        if any(label != IGNORE_INDEX for label in labels[1:])
    ]
    return {
        "input_ids": [ids for ids, _ in pieces],
        "labels": [labels for _, labels in pieces],
        "length": [len(ids) for ids, _ in pieces],
    }


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
