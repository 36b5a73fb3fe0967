"""Facts about the rows of a step, which ranks gather before they plan it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from hf_flexseq.plan.blocks import Range
from hf_flexseq.steps.source_row import SourceRow, common_dtypes


class RowFacts(NamedTuple):
    """Facts about the row that a rank has drawn, or about all ranks' rows, one after the other, as
    JSON values."""

    dtypes: Mapping[str, str]
    """Of the columns, by name; {} for a rank that has drawn nothing."""
    counts: Sequence[int]
    """A `RowCounts`."""
    lengths: Sequence[int]
    targets: Sequence[int]
    images: Sequence[Mapping[str, Any]]
    """An `ImageSize` each, whose sequence is counted from the first one of the rows."""
    image_marks: Sequence[int]
    """See `same_images.py`."""
    blocks: Sequence[tuple[int, Sequence[Range]]]
    """The tokens that see both ways, by sequence, counted from the first one of the rows."""
    marks: Sequence[int]
    """Of the beginnings of sequences; see `prefixes.py`."""

    @classmethod
    def of(cls, row: SourceRow, marks: Sequence[int]) -> "RowFacts":
        """Return the facts of a row."""
        images = row.images
        return cls(
            dtypes=row.dtypes,
            counts=row.counts,
            lengths=row.lengths,
            targets=row.targets,
            images=[asdict(image.size) for image in images.images],
            image_marks=[image.mark for image in images.images],
            blocks=list(images.blocks.items()),
            marks=marks,
        )

    @classmethod
    def joined(cls, of_ranks: Sequence["RowFacts"], phase: str) -> "RowFacts":
        """Return the facts of all ranks' rows. Raises ValueError for ranks that drew different
        columns. phase: when they did, in words."""
        images: list[Mapping[str, Any]] = []
        blocks: list[tuple[int, Sequence[Range]]] = []
        first = 0  # sequence of the rank
        for one in of_ranks:
            images += [{**size, "sequence": first + size["sequence"]} for size in one.images]
            blocks += [(first + sequence, ranges) for sequence, ranges in one.blocks]
            first += len(one.lengths)
        return cls(
            dtypes=common_dtypes([one.dtypes for one in of_ranks], phase),
            counts=[sum(each) for each in zip(*(one.counts for one in of_ranks), strict=True)],
            lengths=[length for one in of_ranks for length in one.lengths],
            targets=[count for one in of_ranks for count in one.targets],
            images=images,
            image_marks=[mark for one in of_ranks for mark in one.image_marks],
            blocks=blocks,
            marks=[mark for one in of_ranks for mark in one.marks],
        )
