"""The sequences that ranks have drawn for an optimizer step, before it runs.

    SourceRow      the sequences that this rank drew, in one row
    DrawnStep      the sequences of all ranks, as lengths, with this rank's row
    PlannedStep    these, with their plan
    RankStep       one rank's part of the step, with its tokens (`rank_step.py`)
    StepItem       one of the batches that the Trainer counts (`step_items.py`)

All ranks' rows have the same columns (`common_dtypes`), even the row of a rank that drew nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.plan.blocks import Blocks
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.plan.images import ImagePlan, ImageSize
from hf_flexseq.steps.collator import (
    FIRST_LABELS,
    IMAGES,
    LENGTHS,
    OTHER_ROWS,
    PADDING_TARGETS,
)
from hf_flexseq.steps.images import NO_IMAGES, RowImages

Columns = dict[str, torch.Tensor]


# ---- this rank's row


class RowCounts(NamedTuple):
    """Numbers that a row, or all ranks' rows, have besides lengths, for divisors and warnings."""

    uncounted_targets: int = 0
    """Targets of virtual tokens, which the plain Trainer trains on and does not count."""
    padding_targets: int = 0
    """Targets next to padding, which were left out."""
    other_rows: int = 0
    """Rows that the user's collator makes otherwise of a whole batch."""


NO_COUNTS = RowCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """The sequences that this rank drew for one step, one after the other."""

    columns: Columns
    """Tensors of [tokens] on the CPU by name; {} until a rank without data knows the others'."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    first_labels: tuple[int, ...] = ()
    """Label of the first token of each sequence, which nothing in it predicts."""
    virtual_tokens: int = 0
    """Virtual tokens in front of each sequence (`virtual_tokens.py`)."""
    counts: RowCounts = NO_COUNTS

    given_images: tuple[Mapping[str, torch.Tensor], ...] = ()
    """Tensors of each sequence's images as the collator gave them; () for a row without any."""
    images: RowImages = NO_IMAGES
    """The images as the model takes them, once it has read them."""

    @property
    def names_of_images(self) -> list[str]:
        """Names of the tensors in `given_images`."""
        return sorted({name for given in self.given_images for name in given})

    @property
    def targets(self) -> list[int]:
        """Tokens that have a label, of each sequence."""
        if not self.columns:
            return []
        has_label = self.columns["labels"] != IGNORE_INDEX  # [tokens]
        up_to = torch.cat([torch.zeros(1, dtype=torch.int64), has_label.cumsum(dim=0)])
        lengths = torch.tensor(self.lengths, dtype=torch.int64)  # [sequences]
        ends = lengths.cumsum(dim=0)
        counts: list[int] = (up_to[ends] - up_to[ends - lengths]).tolist()
        return counts

    @property
    def dtypes(self) -> dict[str, str]:
        """Names of dtypes, such as `int64`, by column."""
        dtypes = {}
        for name, value in self.columns.items():
            dtypes[name] = str(value.dtype).removeprefix("torch.")
        return dtypes

    def with_new(self, columns: Columns, reason: str) -> "SourceRow":
        """Return this row with further columns of [tokens]. Raises ValueError if the dataset has
        one of them. reason: their purpose, in words."""
        for name in columns:
            if name in self.columns:
                raise ValueError(f"the dataset has a column {name!r}, which {reason}: rename it")
        return replace(self, columns=self.columns | columns)

    def with_columns(self, dtypes: Mapping[str, str]) -> "SourceRow":
        """Return this row; instead of one that has no columns, one with columns of [0]."""
        if self.columns:
            return self
        columns = {name: torch.empty(0, dtype=getattr(torch, d)) for name, d in dtypes.items()}
        return replace(self, columns=columns)


def common_dtypes(of_ranks: Sequence[Mapping[str, str]], phase: str) -> Mapping[str, str]:
    """Return the dtype's name of each column of all ranks' rows. Raises ValueError for ranks that
    drew different columns. phase: when they did, in words."""
    known: Mapping[str, str] = {}
    known_of = 0  # the rank that has them
    for rank, dtypes in enumerate(of_ranks):
        if not dtypes:
            continue
        if not known:
            known, known_of = dtypes, rank
        if dtypes != known:
            raise ValueError(
                f"ranks drew different columns in {phase}: "
                f"rank {known_of} {_only_in(known, dtypes)}, rank {rank} {_only_in(dtypes, known)}"
            )
    return known


def _only_in(dtypes: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return a text of the entries of `dtypes` that the others lack."""
    own = [f"{name}: {dtype}" for name, dtype in dtypes.items() if others.get(name) != dtype]
    return ", ".join(own) or "without"


# Entries of a batch besides its columns.
_COUNTS = {FIRST_LABELS, IMAGES, LENGTHS, OTHER_ROWS, PADDING_TARGETS}


def source_row(batches: Sequence[Mapping[str, Any]]) -> SourceRow:
    """Join the batches of one step, columns [1, tokens], into one row. Raises ValueError for a
    batch of another collator than DataCollatorForFlexSeq."""
    if not batches:
        return SourceRow(columns={}, lengths=())
    for batch in batches:
        _check_batch(batch)
        if set(batch) - _COUNTS != set(batches[0]) - _COUNTS:
            raise ValueError(
                f"a batch has the keys {sorted(batch)}, another one of its step "
                f"{sorted(batches[0])}"
            )
    # shift_labels repeats labels, which are already shifted: it is not sent a second time.
    names = [name for name in batches[0] if name not in _COUNTS | {"shift_labels"}]
    columns = {}
    for name in names:
        rows = [batch[name][0] for batch in batches]  # each [1, tokens] -> [tokens]
        columns[name] = torch.cat(rows).cpu()  # -> [tokens of the step]
    lengths: list[int] = []
    first_labels: list[int] = []
    images: list[Mapping[str, torch.Tensor]] = []
    for batch in batches:
        lengths += batch[LENGTHS]
        first_labels += batch.get(FIRST_LABELS) or [IGNORE_INDEX for _ in batch[LENGTHS]]
        images += batch.get(IMAGES) or [{} for _ in batch[LENGTHS]]
    return SourceRow(
        columns=columns,
        lengths=tuple(lengths),
        first_labels=tuple(first_labels),
        counts=RowCounts(
            padding_targets=sum(batch.get(PADDING_TARGETS, 0) for batch in batches),
            other_rows=sum(batch.get(OTHER_ROWS, 0) for batch in batches),
        ),
        given_images=tuple(images) if any(images) else (),
    )


def _check_batch(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless every column of a batch is [1, tokens], and has lengths."""
    if LENGTHS not in batch:
        raise ValueError(
            f"a batch with the keys {sorted(batch)} has no {LENGTHS!r}: collate with "
            "hf_flexseq.DataCollatorForFlexSeq, around your own collator if there is one"
        )
    tokens = sum(batch[LENGTHS])
    for name, value in batch.items():
        if name not in _COUNTS and getattr(value, "shape", None) != (1, tokens):
            raise ValueError(
                f"column {name!r} of a batch is not one value for each of its {tokens} tokens"
            )


# ---- steps


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """An optimizer step as drawn, before it is planned."""

    number: int
    """Number of the step among those that run, counted on from the first number."""
    request: int
    """Number by which the planner knows the step. It counts drawn steps that never ran, too."""
    row: SourceRow
    """Sequences that this rank drew, with the columns that the rows of all ranks have."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, of all ranks: by the rank that drew it, then in its order."""
    sources: tuple[int, ...]
    """Rank that drew each sequence."""
    targets: tuple[int, ...]
    """Tokens with a label, of each sequence of all ranks."""
    counts: RowCounts = NO_COUNTS
    """Of all ranks."""
    images: tuple[ImageSize, ...] = ()
    """Images of all ranks, in the order of their sequences; those with the same pixels once."""
    own_images: tuple[int, ...] = ()
    """Of each image that this rank drew, which of `images` it is."""
    image_plan: ImagePlan | None = None
    """How the images are encoded; None in a step without any."""
    blocks: Blocks = field(default_factory=dict)
    """By sequence the tokens that see both ways."""
    facts: StepFacts = NO_FACTS
    """Facts for the planner besides the lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """An optimizer step with its plan, before its tokens are dispatched."""

    drawn: DrawnStep

    plan: Any
    """Plan of the whole step, over all ranks."""
    waited_s: float = 0.0
    """Seconds that training waited for the plan."""
