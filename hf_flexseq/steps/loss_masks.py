"""Columns of TRL's datasets that mask tokens out of the loss, in examples without labels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hf_flexseq.config import IGNORE_INDEX

# Columns of TRL, 1 for each token that is a target.
MASKS = ("completion_mask", "assistant_masks")


def masks_without_labels(example: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """Return the masks [tokens] of an example without labels that exclude tokens of the loss."""
    if not isinstance(example, Mapping) or example.get("input_ids") is None:
        return {}
    if example.get("labels") is not None:
        return {}
    masks = {}
    for name in MASKS:
        if example.get(name) is None:
            continue
        mask = column_tensor(name, example[name], index).flatten()  # [tokens]
        if (mask == 0).any():
            masks[name] = mask
    return masks


def check_masks(
    masks: Mapping[str, torch.Tensor],
    given_ids: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    index: int,
) -> None:
    """Raise ValueError when labels that a collator made follow none of the masks, each [tokens].

    One mask is enough: TRL leaves completion masks alone under completion_only_loss=False.
    given_ids: [tokens], before the collator.
    columns: of the collator's output, each [tokens made].
    """
    labels = columns["labels"]
    ids = columns["input_ids"]
    if any(_follows(labels, ids, mask, given_ids) for mask in masks.values()):
        return
    raise ValueError(
        f"example {index} has {' and '.join(masks)} but no labels, and the collator made labels "
        f"for tokens that are masked out: give `labels` ({IGNORE_INDEX} where a mask is 0), or a "
        "data_collator that reads the masks"
    )


def _follows(
    labels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, given_ids: torch.Tensor
) -> bool:
    """Tell if labels [tokens made] exclude the tokens that a mask [tokens] excludes, at an end
    where ids agree: a collator may have cut or added tokens."""
    common = min(labels.numel(), mask.numel())
    ends = (slice(None, common), slice(-common, None))
    agreeing = [end for end in ends if torch.equal(ids[end], given_ids[end])]
    # other tokens than those of the mask: labels that leave some out were made with care
    if not agreeing:
        return bool((labels == IGNORE_INDEX).any())
    for end in agreeing:
        masked_out = labels[end][mask[end] == 0]  # [tokens that the mask leaves out]
        if (masked_out == IGNORE_INDEX).all():
            return True
    return False


def column_tensor(name: str, value: Any, index: int) -> torch.Tensor:
    """Return a column as a tensor. Raises ValueError for one that cannot be."""
    try:
        if isinstance(value, list) and value and type(value[0]) is int:
            numbers = np.asarray(value)  # a fifth of the time that torch takes for a list
            if numbers.dtype == np.int64:
                return torch.from_numpy(numbers)
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()  # datasets give such ones, and torch warns of them
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"column {name!r} of example {index} cannot be a tensor ({error}); drop the column, "
            "or set remove_unused_columns=True"
        ) from error
