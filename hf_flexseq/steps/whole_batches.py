"""Compare a user's collator on a whole batch with the same collator on each example.

Batches are planned by their sequences, so `DataCollatorForFlexSeq` calls another collator with one
example at a time. The plain Trainer calls it with a whole batch. Both agree unless the collator
looks at other rows, gives labels to padding, puts padding or another example in front of a token
that has a label, or is random.

A collator without padding joins its examples into one row.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.own_generators import restoring

Collate = Callable[[list[Any]], Mapping[str, Any]]


def other_rows(collate: Collate, examples: Sequence[Mapping[str, Any]]) -> int:
    """Return how many rows of a batch differ from the rows of its examples alone; 0 for a collator
    of single examples. The run keeps its random numbers, and the examples stay as they are."""
    differing = 0  # a collator of single examples fails on several
    with suppress(Exception), random_numbers_kept(collate):
        together = collate(copy.deepcopy(list(examples)))
        alone = [collate([copy.deepcopy(example)]) for example in examples]
        if len(together["input_ids"]) < len(alone):
            differing = _other_joined_rows(together, alone)
        else:
            differing = sum(
                not _is_same_row(together, index, row) for index, row in enumerate(alone)
            )
    return differing


def _other_joined_rows(together: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> int:
    """Return how many examples stand otherwise in the one row of a batch [1, tokens of all] than
    alone [1, tokens], or have a label of their first token, which the one before them predicts."""
    lengths = [row["input_ids"].shape[1] for row in alone]
    if together["input_ids"].shape != (1, sum(lengths)):
        return len(alone)
    differing = 0
    start = 0
    for row, length in zip(alone, lengths, strict=True):
        own = {}
        for name, value in together.items():
            if isinstance(value, torch.Tensor) and value.shape == together["input_ids"].shape:
                own[name] = value[:, start : start + length]  # [1, tokens]
        labels = own.get("labels")
        has_first_label = start > 0 and labels is not None and bool(labels[0, 0] != IGNORE_INDEX)
        differing += has_first_label or not _is_same_row(own, 0, row)
        start += length
    return differing


def _is_same_row(together: Mapping[str, Any], index: int, alone: Mapping[str, Any]) -> bool:
    """Tell if a row [rows, padded tokens] equals its example alone [1, tokens]."""
    ids = together["input_ids"][index]  # [padded tokens]
    mask = together.get("attention_mask")
    is_token = torch.arange(len(ids)) < alone["input_ids"].shape[1]
    if mask is not None:
        is_token = mask[index].bool()

    # 1. the same tokens, labels and other columns
    own_mask = alone.get("attention_mask")
    for name, value in alone.items():
        if not isinstance(value, torch.Tensor) or value.shape != alone["input_ids"].shape:
            continue
        own = value[0] if own_mask is None else value[0][own_mask[0].bool()]  # [tokens]
        if not torch.equal(together[name][index][is_token], own):
            return False

    # 2. no label of padding, nor of a first token that has padding before it
    labels = together.get("labels")
    if labels is None:
        return True
    is_labelled = labels[index] != IGNORE_INDEX
    after_padding = is_token[1:] & ~is_token[:-1]
    return not bool((is_labelled & ~is_token).any() or (is_labelled[1:] & after_padding).any())


@contextmanager
def random_numbers_kept(owner: Any = None) -> Iterator[None]:
    """Give the run the random numbers back that the block has drawn, on the CPU, also from the
    generators of `owner`, such as a dataset."""
    of_owner = restoring(owner)
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for restore in of_owner:
            restore()
