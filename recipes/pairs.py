"""Pairs of a better and a worse answer: loaded, or made of the standard library's source.

A pair is a row in one of two forms, each of text or of messages:

    prompt, chosen, rejected      three columns
    chosen, rejected              two columns, which begin with the same prompt

The made ones can be told apart by a small model after minutes. A file is cut into a prompt of some
lines and a chosen answer, the lines that follow; most answers are short and a few are long. The
rejected answer has the same lines, with their indentations shuffled.
"""

import math
import random
from collections.abc import Iterable, Iterator

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from arguments import PreferenceArguments
from corpus import STDLIB, stdlib, stdlib_files
from rows import check_longer

Rows = dict[str, list]

PROMPT_LINES = (2, 8)  # fewest and most
# of an answer: the logarithm is normal
MEDIAN_LINES = 8
SIGMA = 1.0
ANSWER_LINES = (4, 120)  # fewest and most


def load_stdlib_pairs() -> Dataset:
    """Return pairs made of the standard library's modules."""
    # another way to cut makes other pairs
    return Dataset.from_generator(stdlib_pairs, gen_kwargs=stdlib(__file__))


# Corpora that are made here, by their names.
MADE = {STDLIB: load_stdlib_pairs}


def stdlib_pairs(root: str, version: str) -> Iterator[dict[str, str]]:
    """Yield the pairs of all modules; a module's own depend on nothing but its name and text."""
    for module in stdlib_files(root, version):
        for pair in pairs_of(module["text"], random.Random(module["path"])):
            yield {"path": module["path"]} | pair


def pairs_of(text: str, draw: random.Random) -> Iterator[dict[str, str]]:
    """Cut a text into pairs, from its first line on; what no pair can be made of is left out."""
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        middle = start + draw.randint(*PROMPT_LINES)
        count = round(draw.lognormvariate(math.log(MEDIAN_LINES), SIGMA))
        stop = middle + min(max(count, ANSWER_LINES[0]), ANSWER_LINES[1])
        # An answer begins with the end of the prompt's last line: there is a border of tokens.
        prompt = "\n".join(lines[start:middle]).rstrip()
        chosen = "\n" + "\n".join(lines[middle:stop]).rstrip()
        rejected = misindented(chosen, draw)
        if prompt and rejected != chosen:
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        start = stop


def misindented(text: str, draw: random.Random) -> str:
    """Return a text with the indentations shuffled among its lines."""
    lines = text.split("\n")
    written = [index for index, line in enumerate(lines) if line.strip()]
    indents = []
    for index in written:
        bare = lines[index].lstrip()
        indents.append(lines[index][: len(lines[index]) - len(bare)])
    draw.shuffle(indents)
    for index, indent in zip(written, indents, strict=True):
        lines[index] = indent + lines[index].lstrip()
    return "\n".join(lines)


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
