"""Flatten a rank's examples into one row, without padding and with labels that are already shifted.

    [{input_ids: 3 tokens, ...}, {input_ids: 2 tokens, ...}]
 -> input_ids, labels, shift_labels, position_ids  [1, 5]   and   lengths [3, 2]

Labels are shifted here, inside each sequence, because a sequence may later be cut anywhere: `shift_labels[i]` is the
target of token i, and the last token of every sequence has none. `labels` holds the same, for those who count it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

IGNORE = -100
LENGTHS = "lengths"


class DataCollatorForFlexSeq:
    """Collates examples with `input_ids` and `labels` (and any other per-token columns) for the FlexSeq trainer.

    Args:
        example_collator (`Callable`, *optional*):
            Another collator that turns one example into a batch of one, for tasks whose labels are made while
            collating (a completion mask, say). It is called once per example; what it pads is cut off again.
    """

    def __init__(self, example_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None) -> None:
        self.example_collator = example_collator

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A dict of [1, tokens] tensors and `lengths`, a list of int.

        Raises ValueError for an example without labels, without tokens, or with a column that is not per token.
        """
        columns = [self._columns(example, place) for place, example in enumerate(examples)]
        names = list(columns[0])
        for place, column in enumerate(columns):
            if set(column) != set(names):
                raise ValueError(f"example {place} has the columns {sorted(column)}, the first one {sorted(names)}")
        batch: dict[str, Any] = {name: torch.cat([c[name] for c in columns]).unsqueeze(0) for name in names}
        return batch | {LENGTHS: [len(c["input_ids"]) for c in columns]}

    def _columns(self, example: Mapping[str, Any], place: int) -> dict[str, torch.Tensor]:
        """The per-token columns of one example, each [tokens], with the labels shifted."""
        if self.example_collator is not None:
            example = _unpadded(self.example_collator([example]))
        if example.get("labels") is None:
            raise ValueError(f"example {place} has no labels: give `labels` (for plain language modelling, input_ids)")
        found = {name: torch.as_tensor(value) for name, value in example.items() if value is not None}
        found.pop("attention_mask", None)
        tokens = found["input_ids"].numel()
        if tokens == 0:
            raise ValueError(f"example {place} has no tokens: filter empty examples out of the dataset")
        for name, value in found.items():
            if value.shape != (tokens,):
                raise ValueError(
                    f"column {name!r} of example {place} has shape {tuple(value.shape)}, not one value for each of its "
                    f"{tokens} tokens; drop the column, or set remove_unused_columns=True"
                )
        found["labels"] = found["shift_labels"] = shifted(found["labels"])
        found.setdefault("position_ids", torch.arange(tokens))
        return found


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The target of each token of one sequence: the label of the next one, none for the last."""
    return torch.cat((labels[1:], labels.new_full((1,), IGNORE)))


def _unpadded(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A batch of one example as columns of its real tokens; `seq_lengths` and the like, made for other attention
    implementations, are dropped together with the mask."""
    mask = batch.get("attention_mask")
    tokens = batch["input_ids"].shape[-1]
    rows = {
        name: value[0]
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.shape == (1, tokens)
    }
    if mask is not None:
        rows = {name: value[mask[0].bool()] for name, value in rows.items()}
    return rows
