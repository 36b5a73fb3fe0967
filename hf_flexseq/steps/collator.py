"""Flatten a rank's examples into one row, without padding and with labels that are already
shifted.

    [{input_ids: 3 tokens, ...}, {input_ids: 2 tokens, ...}]
 -> input_ids, labels, shift_labels, position_ids  [1, 5]   and   lengths [3, 2]

Labels are shifted here, inside each sequence, because a sequence may later be cut anywhere:
`shift_labels[i]` is the target of token i, and the last token of every sequence has none. `labels`
holds the same, for those who count it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX

LENGTHS = "lengths"
# columns of TRL, 1 for each token that is a target
_MASKS = ("completion_mask", "assistant_masks")
# What collators add for attention implementations that read the limits of sequences from their
# batch.
_MADE_FOR_OTHERS = (
    "seq_lengths",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


class DataCollatorForFlexSeq:
    """Collates examples with `input_ids` and `labels` (and any other per-token columns) for the
    FlexSeq trainer.

    Args: example_collator (`Callable`, *optional*): Another collator that turns one example into a
    batch of one, for tasks whose labels are made while collating (a completion mask, say). It is
    called once per example.

    Padding, on either side, is cut off where an `attention_mask` marks it.
    """

    def __init__(
        self, example_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
    ) -> None:
        self.example_collator = example_collator

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A dict of [1, tokens] tensors and `lengths`, a list of int.

        Raises ValueError for an example without labels or tokens, a packed one, a column that is
        not per token, or masks of targets that the labels do not follow.
        """
        columns = [self._columns(example, place) for place, example in enumerate(examples)]
        names = list(columns[0])
        for place, column in enumerate(columns):
            if set(column) != set(names):
                raise ValueError(
                    f"example {place} has the columns {sorted(column)}, the first "
                    f"one {sorted(names)}"
                )
        batch: dict[str, Any] = {
            name: torch.cat([c[name] for c in columns]).unsqueeze(0) for name in names
        }
        return batch | {LENGTHS: [len(c["input_ids"]) for c in columns]}

    def _columns(self, example: Mapping[str, Any], place: int) -> dict[str, torch.Tensor]:
        """The per-token columns of one example, each [tokens], with the labels shifted."""
        masks: dict[str, torch.Tensor] = {}
        given_ids = torch.empty(0)
        if self.example_collator is not None:
            # Read before the collator runs, because a collator may take columns out of the
            # example.
            masks = _masks_without_labels(example, place)
            if masks:
                given_ids = _tensor("input_ids", example["input_ids"], place).flatten()  # [tokens]
            example = _only_row(self.example_collator([example]), place)
        found = _without_padding(_tensors(example, place), place)
        if masks:
            _check_masks(masks, given_ids, found, place)
        tokens = found["input_ids"].numel()
        if tokens == 0:
            raise ValueError(
                f"example {place} has no tokens: filter empty examples out of the dataset"
            )
        positions = found.setdefault("position_ids", torch.arange(tokens))
        if (positions.diff() < 1).any():
            raise ValueError(
                f"position_ids of example {place} start over: it is packed, and its sequences "
                f"would attend to each "
                "other; give every sequence as an example of its own"
            )
        found["labels"] = found["shift_labels"] = shifted(found["labels"])
        return found


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The target of each token of one sequence: the label of the next one, none for the last."""
    return torch.cat((labels[1:], labels.new_full((1,), IGNORE_INDEX)))


def _masks_without_labels(example: Mapping[str, Any], place: int) -> dict[str, torch.Tensor]:
    """Return the masks, each [tokens], that leave tokens out of the loss; none of an example that
    has labels."""
    if not isinstance(example, Mapping) or example.get("input_ids") is None:
        return {}
    if example.get("labels") is not None:
        return {}
    masks = {}
    for name in _MASKS:
        if example.get(name) is None:
            continue
        mask = _tensor(name, example[name], place).flatten()  # [tokens]
        if (mask == 0).any():
            masks[name] = mask
    return masks


def _check_masks(
    masks: Mapping[str, torch.Tensor],
    given_ids: torch.Tensor,
    found: Mapping[str, torch.Tensor],
    place: int,
) -> None:
    """Raise ValueError when labels that a collator made follow none of the masks, each [tokens].

    One mask is enough: TRL leaves completion masks alone under completion_only_loss=False.
    given_ids: [tokens], before the collator; found: the columns that the collator made, each
    [tokens made].
    """
    if any(
        _follows(found["labels"], found["input_ids"], mask, given_ids) for mask in masks.values()
    ):
        return
    raise ValueError(
        f"example {place} has {' and '.join(masks)} but no labels, and the collator made labels "
        f"for tokens that are "
        f"masked out: give `labels` ({IGNORE_INDEX} where a mask is 0), or a data_collator that "
        f"reads the masks"
    )


def _follows(
    labels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, given_ids: torch.Tensor
) -> bool:
    """Tell if labels [tokens made] leave out what a mask [tokens] leaves out.

    A collator may have cut tokens off one end, or added some: the ids tell at which end both still
    agree.
    """
    common = min(labels.numel(), mask.numel())
    ends = (slice(None, common), slice(-common, None))
    agreeing = [end for end in ends if torch.equal(ids[end], given_ids[end])]
    # other tokens than those of the mask: labels that leave some out were made with care
    if not agreeing:
        return bool((labels == IGNORE_INDEX).any())
    return any(bool((labels[end][mask[end] == 0] == IGNORE_INDEX).all()) for end in agreeing)


def _only_row(batch: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The columns of a batch of one example, without those made for other attention
    implementations."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"the collator made a {type(batch).__name__} of example {place}, not a batch of "
            f"columns; hf_flexseq does "
            "not support trainers that make their samples in training_step, as for reinforcement "
            "learning"
        )
    columns = {name: value for name, value in batch.items() if name not in _MADE_FOR_OTHERS}
    tokens = columns["input_ids"].shape[-1] if "input_ids" in columns else 0
    for name, value in columns.items():
        shape = getattr(value, "shape", None)
        if shape != (1, tokens):
            raise ValueError(
                f"the collator made column {name!r} of example {place}, given alone, with shape "
                f"{shape and tuple(shape)} instead of {(1, tokens)}; hf_flexseq moves one value "
                f"per token and column"
            )
    return {name: value[0] for name, value in columns.items()}


def _tensors(example: Mapping[str, Any], place: int) -> dict[str, torch.Tensor]:
    """The columns of an example, each [tokens]; text is left out, as by the Trainer's own
    collator."""
    what_labels = "for plain language modelling, give input_ids"
    masks = [name for name in _MASKS if example.get(name) is not None]
    if masks:
        what_labels = (
            f"it has {' and '.join(masks)}, so give input_ids with {IGNORE_INDEX} "
            "where a mask is 0"
        )
    for name, what in (("input_ids", "tokenize it"), ("labels", what_labels)):
        if example.get(name) is None:
            raise ValueError(f"example {place} has no {name}: {what}")
    names = [
        name for name, value in example.items() if value is not None and not isinstance(value, str)
    ]
    columns = {name: _tensor(name, example[name], place) for name in names}
    tokens = columns["input_ids"].numel()
    for name, value in columns.items():
        if value.shape != (tokens,):
            raise ValueError(
                f"column {name!r} of example {place} has shape {tuple(value.shape)}, not one "
                f"value for each of its "
                f"{tokens} tokens; drop the column, or set remove_unused_columns=True"
            )
    # Whatever integers a dataset stores: embeddings and losses take int64.
    return columns | {name: columns[name].long() for name in ("input_ids", "labels")}


def _tensor(name: str, value: Any, place: int) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"column {name!r} of example {place} cannot be a tensor ({error}); drop the column, "
            f"or set "
            "remove_unused_columns=True"
        ) from error


def _without_padding(columns: dict[str, torch.Tensor], place: int) -> dict[str, torch.Tensor]:
    """The columns without `attention_mask` and without the padding that it marks, on either
    side."""
    mask = columns.pop("attention_mask", None)
    if mask is None:
        return columns
    real = mask.nonzero().flatten()
    start, stop = (int(real[0]), int(real[-1]) + 1) if real.numel() else (0, 0)
    if stop - start != real.numel() or (mask > 1).any():
        raise ValueError(
            f"attention_mask of example {place} does more than to mark padding (1 for tokens, 0 "
            f"around them): give "
            "every sequence as an example of its own, without other masks"
        )
    return {name: value[start:stop] for name, value in columns.items()}
