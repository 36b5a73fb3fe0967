"""Flatten a rank's examples into one row, without padding and with labels that are already
shifted.

    [{input_ids: 3 tokens, ...}, {input_ids: 2 tokens, ...}]
 -> input_ids, labels, shift_labels, position_ids  [1, 5]   and   lengths [3, 2]

Labels are shifted here, inside each sequence, because a sequence may later be cut anywhere:
`shift_labels[i]` is the target of token i, and the last token of every sequence has none, unless
the example has `shift_labels` itself. `labels` holds the same, for callers that count it.
`first_labels` holds the label of each sequence's first token, which only a virtual token in front
of it predicts.

A packed example is taken apart into its sequences where its `position_ids` begin again at 0, or
where another column divides it (`known_columns.py`).

Tensors of an example's images or videos, which are not per token, stay as the processor made them,
in `images`: a dict of tensors for each sequence.

A padded batch may have targets next to its padding: labels of padding, and, after padding on the
left, a label of a sequence's first token, which in a packed row the sequence before it predicts.
They are left out, and `padding_targets` counts them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.known_columns import (
    DIVIDING,
    FOLLOWING,
    SHIFT_LABELS,
    agree,
    next_tokens,
    sequence_numbers,
    shifted,
    starts_of,
)
from hf_flexseq.steps.loss_masks import MASKS, check_masks, column_tensor, masks_without_labels
from hf_flexseq.steps.users_code import is_known
from hf_flexseq.steps.whole_batches import other_rows

LENGTHS = "lengths"
PADDING_TARGETS = "padding_targets"
OTHER_ROWS = "other_rows"
IMAGES = "images"
FIRST_LABELS = "first_labels"

# Batches of which the user's collator makes rows one by one and together: training and evaluation
# may share it.
COMPARED = 8

# Labels in a row that are the next token, and not their own, before they count as shifted.
_BY_CHANCE = 2

# Beginnings of the names that processors of transformers give to what belongs to images, and
# names of other kinds.
_OF_IMAGES = ("pixel_", "image_", "images_", "video_", "num_", "patches_")
_NAMES_OF_IMAGES = (
    "high_res_pixel_values",
    "second_per_grid_ts",
    "spatial_shapes",
    "target_sizes",
    "target_sizes_videos",
    "tile_fine_mask",
    "batch_num_images",
)


class _Example(NamedTuple):
    """One example without its padding."""

    columns: dict[str, torch.Tensor]
    """Each [tokens], with labels of the tokens themselves."""
    images: dict[str, torch.Tensor]
    """Tensors of its images and videos, of any shapes."""
    padding_targets: int
    """Targets next to its padding."""
    first_label: bool
    """True if its first token has a label, and no padding was before it."""


class DataCollatorForFlexSeq:
    """Collates examples with `input_ids` and `labels` (and any other per-token columns) for the
    FlexSeq trainer.

    Args:
        example_collator: Another collator that turns one example into a batch of one, for tasks
            whose labels are made while collating (a completion mask, say). It is called once per
            example.

    Padding, on either side, is cut off where an `attention_mask` marks it. An example whose
    `position_ids` begin again at 0, or which has `cu_seq_lens_q`, `cu_seqlens` or `seq_lengths`,
    is packed: each of its sequences becomes a separate one, as the plain Trainer's attention
    treats them. Where an example has `shift_labels`, these are the targets.

    Attributes that this collator lacks, such as the `tokenizer` that a Trainer saves, are read
    from the other one.
    """

    tokenizer: Any  # there only if another collator has it

    def __init__(
        self, example_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None
    ) -> None:
        self.example_collator = example_collator
        self._to_compare = COMPARED  # batches, with what it makes of each as a whole
        self._next_tokens = 0  # labels so far that are known to be shifted already

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other collator; called for those that this one lacks."""
        # A copy or an unpickled collator is asked before it has any attribute.
        other = self.__dict__.get("example_collator")
        if other is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(other, name)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a dict of [1, tokens] tensors and `lengths`, a list of int; and, where there are
        some, `first_labels` of each sequence, a list of int, and the numbers of `padding_targets`
        and `other_rows` (`whole_batches.py`).

        Raises ValueError for an example without labels or tokens, labels that are shifted already,
        positions that fall without beginning at 0, a column that is not per token, or masks of
        targets that the labels do not follow.
        """
        differing = self._other_rows(examples)
        own = []
        for index, example in enumerate(examples):
            own.append(self.of_tokens(example, index, needs_labels=True))
        columns = []
        images = []  # of each sequence
        first_labels = []
        padding_targets = sum(example.padding_targets for example in own)
        for index, one in enumerate(own):
            for number, sequence in enumerate(_sequences(one, index)):
                has_targets = SHIFT_LABELS in sequence  # and labels that may be shifted
                first_labels.append(IGNORE_INDEX if has_targets else int(sequence["labels"][0]))
                padding_targets += number > 0 and first_labels[-1] != IGNORE_INDEX
                sequence.setdefault("position_ids", torch.arange(len(sequence["labels"])))
                targets = self.targets_of(sequence, index)
                columns.append({**sequence, "labels": targets, SHIFT_LABELS: targets})
                images.append(one.images)  # none if the example has several sequences
        _check_same_columns(columns)
        batch: dict[str, Any] = {}
        for name in columns[0]:
            row = torch.cat([column[name] for column in columns])  # each [tokens] -> [all tokens]
            batch[name] = row.unsqueeze(0)  # -> [1, all tokens]
        batch[LENGTHS] = [len(column["input_ids"]) for column in columns]
        if any(label != IGNORE_INDEX for label in first_labels):
            batch[FIRST_LABELS] = first_labels
        if any(images):
            batch[IMAGES] = images
        if _pads_left(self.example_collator):
            padding_targets += _shorter_with_first_label(own)
        if padding_targets:
            batch[PADDING_TARGETS] = padding_targets
        if differing:
            batch[OTHER_ROWS] = differing
        return batch

    def targets_of(self, columns: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the targets of a sequence's columns, each [tokens]: `shift_labels`, or shifted
        labels. Raises ValueError for labels that are shifted already, or contradict the others."""
        labels, given = columns["labels"], columns.get(SHIFT_LABELS)
        if given is not None:
            if agree(given, labels) or agree(given, shifted(labels)):
                return given
            raise ValueError(
                f"shift_labels of example {index} contradict its labels: shift_labels[i], the "
                "target of token i, is neither labels[i + 1] nor, where labels are shifted "
                "already, labels[i]; drop one of both columns"
            )
        found = next_tokens(columns["input_ids"], labels)
        self._next_tokens = 0 if found is None else self._next_tokens + found
        if self._next_tokens > _BY_CHANCE:
            raise ValueError(
                f"labels of example {index} are shifted already: each is the next token of "
                "input_ids, so the model would learn the token after the next; give labels of the "
                "tokens themselves, such as a copy of input_ids, or say that they are targets: "
                "example['shift_labels'] = example['labels'], with remove_unused_columns=False"
            )
        return shifted(labels)

    def _other_rows(self, examples: Sequence[Mapping[str, Any]]) -> int:
        """Return how many rows the user's collator makes otherwise of a whole batch; 0 after the
        first few batches, and after the first one with such rows."""
        own = self.example_collator
        if own is None or not self._to_compare or len(examples) < 2:
            return 0
        if is_known(own):
            if not getattr(own, "mlm", False):  # which masks tokens at random
                return 0
            own = copy.copy(own)
            vars(own)["generator"] = None  # a new one, of its seed: the run's stays as it is
        differing = other_rows(own, examples)
        self._to_compare = 0 if differing else self._to_compare - 1
        return differing

    def of_tokens(self, example: Mapping[str, Any], index: int, *, needs_labels: bool) -> _Example:
        """Return one example without its padding. index: its number in the batch, for messages."""
        # 1. the user's own collator, if there is one
        masks: dict[str, torch.Tensor] = {}
        given_ids = torch.empty(0)
        if self.example_collator is not None:
            # Read before the collator runs, because a collator may take columns out of the
            # example.
            masks = masks_without_labels(example, index)
            if masks:
                given_ids = column_tensor(
                    "input_ids", example["input_ids"], index
                ).flatten()  # [tokens]
            example = _only_row(self.example_collator([example]), index)

        # 2. one value for each token except padding
        given, images = _tensors(example, index, needs_labels=needs_labels)
        columns, padding_targets = _without_padding(given, index)
        if masks:
            check_masks(masks, given_ids, columns, index)
        tokens = columns["input_ids"].numel()
        if tokens == 0:
            raise ValueError(
                f"example {index} has no tokens: filter empty examples out of the dataset"
            )
        labels = columns.get("labels")
        has_first_label = labels is not None and bool(labels[0] != IGNORE_INDEX)
        return _Example(columns, images, padding_targets, has_first_label and not padding_targets)


class PaddedCollator:
    """Collates the same examples into a padded batch, for losses and metrics of whole samples:
    columns [examples, tokens of the longest], padded on the right, an `attention_mask`, and the
    images of all examples. Either all examples have labels, or none. Where an example is packed,
    all have position_ids, which begin again with every sequence."""

    def __init__(self, collator: DataCollatorForFlexSeq) -> None:
        self._collator = collator

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other collator; called for those that this one lacks."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._collator, name)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a dict of [examples, tokens] tensors, and tensors of images by name. Raises
        ValueError as DataCollatorForFlexSeq does, except for missing labels, and for images that
        do not go into one tensor."""
        rows = []
        images = []
        is_packed = False
        for index, example in enumerate(examples):
            made = self._collator.of_tokens(example, index, needs_labels=False)
            images.append(made.images)
            row = made.columns
            starts = starts_of(row, index)
            if "labels" in row:
                self._collator.targets_of(row, index)  # checks them
            if len(starts) > 1:
                _keep_sequences(row, starts)
                is_packed = True
            row["attention_mask"] = torch.ones_like(row["input_ids"])
            rows.append(row)
        if is_packed:
            for row in rows:
                row.setdefault("position_ids", torch.arange(len(row["input_ids"])))
        _check_same_columns(rows)
        fillers = {"labels": IGNORE_INDEX, SHIFT_LABELS: IGNORE_INDEX}
        fillers["input_ids"] = self._padding_id()
        batch = {}
        for name in rows[0]:
            values = [row[name] for row in rows]  # each [tokens]
            batch[name] = pad_sequence(
                values, batch_first=True, padding_value=fillers.get(name, 0)
            )
        return batch | _joined_images(images)

    def _padding_id(self) -> int:
        padding_id = getattr(getattr(self._collator, "tokenizer", None), "pad_token_id", None)
        return 0 if padding_id is None else padding_id


def _keep_sequences(row: dict[str, torch.Tensor], starts: Sequence[int]) -> None:
    """Number the tokens of each sequence of a packed example, whose columns are each [tokens], and
    let none be predicted from the sequence before. starts: of its sequences."""
    lengths = torch.tensor([*starts[1:], len(row["input_ids"])]) - torch.tensor(starts)
    row["position_ids"] = torch.cat([torch.arange(length) for length in lengths.tolist()])
    if "labels" in row:
        row["labels"] = row["labels"].index_fill(0, torch.tensor(starts), IGNORE_INDEX)
    if SHIFT_LABELS in row:
        ends = torch.tensor(starts[1:]) - 1
        row[SHIFT_LABELS] = row[SHIFT_LABELS].index_fill(0, ends, IGNORE_INDEX)


def _joined_images(images: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the images of several examples by name, one example's after the other's."""
    joined = {}
    for name in sorted({name for own in images for name in own}):
        tensors = [own[name] for own in images if name in own]
        shapes = sorted({tuple(one.shape[1:]) for one in tensors})
        if len(shapes) > 1:
            raise ValueError(
                f"{name} of the examples of a batch are of different shapes, {shapes[0]} and "
                f"{shapes[1]}: for predictions and losses on whole samples give a collator of "
                "your own, which pads them, or a batch size of 1"
            )
        joined[name] = torch.cat(tensors)
    return joined


def _sequences(example: _Example, index: int) -> list[dict[str, torch.Tensor]]:
    """Return the columns of each sequence of an example, which has several if it is packed.

    Padding behind a packed row has no mask. Each token of it has position 0 and no label, and is a
    sequence of its own, as under the plain Trainer.
    """
    columns = example.columns
    starts = starts_of(columns, index)
    if len(starts) == 1:
        return [columns]
    if example.images:
        raise ValueError(
            f"position_ids of example {index} begin again: it is packed, and it has "
            f"{', '.join(example.images)}, of which nobody knows the sequence; give every "
            "sequence as an example of its own"
        )
    stops = [*starts[1:], len(columns["input_ids"])]
    sequences = []
    for start, stop in zip(starts, stops, strict=True):
        sequences.append({name: value[start:stop] for name, value in columns.items()})
    return sequences


def _check_same_columns(columns: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raise ValueError unless all examples have the same columns."""
    for index, column in enumerate(columns):
        if set(column) != set(columns[0]):
            raise ValueError(
                f"example {index} has the columns {sorted(column)}, the first one "
                f"{sorted(columns[0])}"
            )


# ---- columns of one example


def _only_row(batch: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a batch's only row, each [1, tokens] -> [tokens]."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"the collator made a {type(batch).__name__} of example {index}, not a batch of "
            "columns; hf_flexseq does not support trainers that make their samples in "
            "training_step, as for reinforcement learning"
        )
    as_made = {name for name in batch if is_of_images(name) or name in (*DIVIDING, *FOLLOWING)}
    tokens = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    for name, value in batch.items():
        shape = getattr(value, "shape", None)
        if shape != (1, tokens) and name not in as_made:
            raise ValueError(
                f"the collator made column {name!r} of example {index}, given alone, with shape "
                f"{shape and tuple(shape)} instead of {(1, tokens)}; hf_flexseq moves one value "
                "per token and column"
            )
    return {name: value if name in as_made else value[0] for name, value in batch.items()}


def is_of_images(name: str) -> bool:
    """Tell if a processor of images makes columns of this name."""
    return name.startswith(_OF_IMAGES) or name in _NAMES_OF_IMAGES


def _tensors(
    example: Mapping[str, Any], index: int, *, needs_labels: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the columns of an example, each [tokens], without text, as the Trainer's collator,
    and the tensors of its images."""
    _check_required(example, index, needs_labels=needs_labels)
    columns = {}
    images = {}
    for name, value in example.items():
        if value is None or isinstance(value, str) or name in FOLLOWING:
            continue
        tensor = column_tensor(name, value, index)
        if not is_of_images(name):
            columns[name] = tensor
        elif tensor.numel():  # else the example has none
            images[name] = tensor
    tokens = columns["input_ids"].numel()
    for name in columns.keys() & set(DIVIDING):
        columns[name] = sequence_numbers(name, columns[name], tokens, index)
    for name, value in columns.items():
        if value.shape != (tokens,):
            advice = "drop the column, or set remove_unused_columns=True"
            if name == "attention_mask":  # as of LongAlign's packed rows
                advice = "name the limits of the sequences in a packed row cu_seqlens"
            raise ValueError(
                f"column {name!r} of example {index} has shape {tuple(value.shape)}, not one "
                f"value for each of its {tokens} tokens; {advice}"
            )
    # A dataset may store integers of any width: embeddings and losses take int64.
    for name in {"input_ids", "labels", SHIFT_LABELS} & set(columns):
        columns[name] = columns[name].long()
    return columns, images


def _check_required(example: Mapping[str, Any], index: int, *, needs_labels: bool) -> None:
    """Raise ValueError for an example without tokens or labels, and say what to give."""
    if example.get("input_ids") is None:
        raise ValueError(f"example {index} has no input_ids: tokenize it")
    if example.get("labels") is not None or not needs_labels:
        return
    masks = [name for name in MASKS if example.get(name) is not None]
    if masks:
        raise ValueError(
            f"example {index} has no labels: it has {' and '.join(masks)}, so give a copy of "
            f"input_ids with {IGNORE_INDEX} where a mask is 0"
        )
    raise ValueError(
        f"example {index} has no labels: for plain language modelling, give a copy of input_ids"
    )


def _without_padding(
    columns: dict[str, torch.Tensor], index: int
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the columns without `attention_mask` and without the padding that it marks, on either
    side, each [padded tokens] -> [tokens], and the number of targets next to it."""
    mask = columns.pop("attention_mask", None)
    if mask is None:
        return columns, 0
    marked = mask.nonzero().flatten()  # indices of tokens
    start = stop = 0
    if marked.numel():
        start = int(marked[0])
        stop = int(marked[-1]) + 1
    if stop - start != marked.numel() or (mask > 1).any():
        raise ValueError(
            f"attention_mask of example {index} does more than to mark padding (1 for tokens, 0 "
            "around them): give every sequence as an example of its own, without other masks, or "
            "position_ids that begin at 0 again in each"
        )
    kept = {name: value[start:stop] for name, value in columns.items()}
    if "labels" not in columns or marked.numel() == mask.numel():
        return kept, 0
    # A batch has no target for its first token; a sequence has none for its own.
    first, name = (0, SHIFT_LABELS) if SHIFT_LABELS in columns else (1, "labels")
    targets = (columns[name][first:] != IGNORE_INDEX).sum()
    return kept, int(targets - (kept[name][first:] != IGNORE_INDEX).sum())


# ---- padding that the plain Trainer's batches have


def _pads_left(collator: Any) -> bool:
    """Tell if a collator of transformers pads on the left, which one example does not show."""
    side = getattr(getattr(collator, "tokenizer", None), "padding_side", None)
    is_of_library = any(is_known(cls) for cls in type(collator).__mro__[:-1])
    return is_of_library and side == "left"


def _shorter_with_first_label(examples: Sequence[_Example]) -> int:
    """Return the number of examples with a first label that are shorter than the longest."""
    longest = max(len(example.columns["input_ids"]) for example in examples)
    return sum(
        len(example.columns["input_ids"]) < longest and example.first_label for example in examples
    )
