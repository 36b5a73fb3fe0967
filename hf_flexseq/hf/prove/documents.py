"""The documents of one optimizer step, of the lengths at which mistakes show.

long          shared by all ranks under every plan, of a length that no degree divides
one token     has no target
prompt        most labels are ignored, so that documents count by their targets
no target     all labels are ignored
others        shorter than the number of ranks, equal to a window, packed beside each other
"""

import random
from typing import Any

from hf_flexseq.config import IGNORE_INDEX

LENGTHS = (41, 23, 14, 3, 1, 11, 9, 12, 2, 13, 7, 5)
LONGEST = max(LENGTHS)
PROMPT, NO_TARGET = 1, 6  # indices of the documents with these labels
PROMPT_TOKENS = 17

Rows = list[dict[str, list[int]]]


def documents(config: Any, world_size: int) -> Rows:
    """Return as many documents for each rank, the same on every rank and in every run.

    config: of the model's text; no document has its special tokens.
    """
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith("token_id"):
            special.update(value if isinstance(value, list) else [value])
    usual = [token for token in range(config.vocab_size) if token not in special]
    drawn = random.Random(0)
    rows = []
    count = -(-len(LENGTHS) // world_size) * world_size
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = [drawn.choice(usual) for _ in range(length)]
        labels = list(ids)
        if index == PROMPT:
            labels[:PROMPT_TOKENS] = [IGNORE_INDEX] * PROMPT_TOKENS
        if index == NO_TARGET:
            labels = [IGNORE_INDEX] * length
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def tokens_per_rank(rows: Rows, world_size: int) -> int:
    """Return a limit with which a step has several micro-batches, and the longest document is
    shared by all ranks."""
    total = sum(len(row["input_ids"]) for row in rows)
    return max(-(-LONGEST // world_size), -(-total // (3 * world_size))) + 1
