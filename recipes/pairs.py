"""Pairs of a better and a worse answer: loaded, or made of the topics of Python's help.

A pair is a row in one of two forms, each of text or of messages:

    prompt, chosen, rejected      three columns
    chosen, rejected              two columns, which begin with the same prompt
"""

from collections.abc import Iterable

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from arguments import PreferenceArguments
from rows import check_longer
from topics import TOPICS, load_topic_pairs

Rows = dict[str, list]

# Corpora that are made here, by their names.
MADE = {TOPICS: load_topic_pairs}


def texts_of(pairs: Dataset) -> Iterable[str] | None:
    """Return the prompts and the chosen answers; None where they are conversations."""
    columns = [name for name in ("prompt", "chosen") if name in pairs.column_names]
    if not len(pairs) or not all(isinstance(pairs[0][name], str) for name in columns):
        return None
    return [text for name in columns for text in pairs[name]]


def to_pairs(
    pairs: Dataset, tokenizer: PreTrainedTokenizerBase, args: PreferenceArguments
) -> tuple[Dataset, str]:
    """Return the pairs that are trained on, still as text, and one line about their lengths.

    TRL tokenizes them, and cuts those that are truncated.
    """
    measured = pairs.map(
        measure,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=args.preprocessing_workers,
    )
    longer = sum(length > args.max_length for length in measured["length"])
    limit, advice = f"max_length={args.max_length:,}", "long_pairs to truncate or drop"
    check_longer(longer, len(pairs), "pairs", limit, args.long_pairs, advice)
    # Of a pair whose prompt alone is as long as the context, nothing of an answer would be left.
    column = "length" if args.long_pairs == "drop" else "prompt_length"
    most = args.max_length if args.long_pairs == "drop" else args.max_length - 1
    fitting = measured.filter(_is_at_most, fn_kwargs={"column": column, "most": most})
    if not len(fitting):
        raise ValueError(f"no pair is left of {len(pairs):,} of {args.dataset}")
    became = ""
    if longer:
        left_out = len(pairs) - len(fitting)
        became = f" ({longer - left_out:,} longer ones truncated, {left_out:,} left out)"
    return fitting, (
        f"{len(fitting):,} pairs of at most {args.max_length:,} tokens an answer{became}"
    )


def measure(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Return for each pair the tokens of its prompt, and of prompt and answer for the longer
    answer, its end included."""
    count = len(rows["chosen"])
    prompts = rows.get("prompt", [None] * count)
    lengths: Rows = {"prompt_length": [], "length": []}
    for prompt, chosen, rejected in zip(prompts, rows["chosen"], rows["rejected"], strict=True):
        answered = [tokens_of(prompt, answer, tokenizer) for answer in (chosen, rejected)]
        lengths["length"].append(max(answered))
        lengths["prompt_length"].append(
            0 if prompt is None else tokens_of(prompt, None, tokenizer)
        )
    return lengths


def tokens_of(
    prompt: str | list | None, answer: str | list | None, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens a prompt and an answer are together, either of which may be None."""
    if isinstance(prompt if answer is None else answer, str):
        ids = tokenizer((prompt or "") + (answer or "")).input_ids
        return len(ids) + (answer is not None)  # TRL closes an answer with the EOS
    messages = (prompt or []) + (answer or [])
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=answer is None, tokenize=True, return_dict=True
    )
    return len(encoded["input_ids"])


def _is_at_most(row: dict, column: str, most: int) -> bool:
    return row[column] <= most
