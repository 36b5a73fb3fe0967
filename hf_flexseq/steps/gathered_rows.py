"""Sequences and images of a step, gathered from the facts that each rank sends about its row."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.steps.images import RowImages
from hf_flexseq.steps.source_row import SourceRow


class RowFacts(NamedTuple):
    """Facts that a rank sends about its row, as JSON values."""

    dtypes: Mapping[str, str]
    """Of the columns, by name; {} for a rank that has drawn nothing."""
    uncounted_targets: int
    padding_targets: int
    other_rows: int
    lengths: Sequence[int]
    targets: Sequence[int]
    images: Sequence[Mapping[str, Any]]
    """An `ImageSize` each, whose sequence is counted from the rank's first one."""
    image_marks: Sequence[int]
    """See `same_images.py`."""
    blocks: Sequence[tuple[int, Sequence[Range]]]
    """The tokens that see both ways, by sequence, counted from the rank's first one."""
    marks: Sequence[int]
    """Of the beginnings of sequences; see `prefixes.py`."""

    @classmethod
    def of(cls, row: SourceRow, marks: Sequence[int]) -> "RowFacts":
        """Return the facts of a row."""
        images = RowImages(placeholders={}) if row.images is None else row.images
        return cls(
            dtypes=row.dtypes,
            uncounted_targets=row.uncounted_targets,
            padding_targets=row.padding_targets,
            other_rows=row.other_rows,
            lengths=row.lengths,
            targets=row.targets,
            images=[asdict(image.size) for image in images.images],
            image_marks=[image.mark for image in images.images],
            blocks=list(images.blocks.items()),
            marks=marks,
        )


@dataclass(slots=True)
class GatheredRows:
    """Sequences and images of all ranks, by rank and in the order of each."""

    uncounted_targets: int = 0
    padding_targets: int = 0
    other_rows: int = 0
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Rank that drew each sequence."""
    images: list[ImageSize] = field(default_factory=list)
    image_marks: list[int] = field(default_factory=list)
    first_images: list[int] = field(default_factory=list)
    """By rank the index of the first image that it drew."""
    blocks: dict[int, Sequence[Range]] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, of_ranks: Sequence[RowFacts]) -> "GatheredRows":
        """Join the facts of all ranks."""
        everyone = cls()
        for rank, one in enumerate(of_ranks):
            first = len(everyone.lengths)
            everyone.uncounted_targets += one.uncounted_targets
            everyone.padding_targets += one.padding_targets
            everyone.other_rows += one.other_rows
            everyone.first_images.append(len(everyone.images))
            for size in one.images:
                everyone.images.append(ImageSize(**{**size, "sequence": first + size["sequence"]}))
            everyone.image_marks += one.image_marks
            for sequence, ranges in one.blocks:
                everyone.blocks[first + sequence] = [(start, stop) for start, stop in ranges]
            everyone.lengths += one.lengths
            everyone.targets += one.targets
            everyone.marks += one.marks
            everyone.sources += [rank] * len(one.lengths)
        return everyone
