"""What all ranks have drawn for a step, from the numbers that each of them sends.

signature, uncounted and padding targets,
other rows                                    one number each
lengths, targets, images, blocks, marks       lists, behind their lengths (`in_one_list`)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.steps.images import NUMBERS, RowImages, blocks_of, sizes_of
from hf_flexseq.steps.source_row import SourceRow

LISTS = 5


def numbers_of(row: SourceRow, marks: Sequence[int]) -> list[int]:
    """Return what a rank sends of its row. marks: of the beginnings of its sequences."""
    images = RowImages(placeholders={}) if row.images is None else row.images
    lists = (row.lengths, row.targets, images.numbers, images.block_numbers, marks)
    counts = (row.uncounted_targets, row.padding_targets, row.other_rows)
    return [row.signature, *counts, *in_one_list(lists)]


def in_one_list(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the lengths of LISTS lists, and then all of their numbers."""
    assert len(lists) == LISTS, "one for each kind of numbers"
    return [*(len(one) for one in lists), *(number for one in lists for number in one)]


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
    """See `same_images.py`."""
    first_images: list[int] = field(default_factory=list)
    """By rank the index of the first image that it drew."""
    blocks: dict[int, Sequence[Range]] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    """Of the beginnings of sequences; see `prefixes.py`."""

    @classmethod
    def of(cls, gathered: Sequence[Sequence[int]]) -> "GatheredRows":
        """Read the numbers of all ranks."""
        everyone = cls()
        for rank, (_, uncounted, padding_targets, other_rows, *counted) in enumerate(gathered):
            everyone.uncounted_targets += uncounted
            everyone.padding_targets += padding_targets
            everyone.other_rows += other_rows
            ends = list(accumulate([LISTS, *counted[:LISTS]]))
            lists = [counted[start:stop] for start, stop in pairwise(ends)]
            everyone._add(rank, *lists)
        return everyone

    def _add(
        self,
        rank: int,
        lengths: Sequence[int],
        targets: Sequence[int],
        images: Sequence[int],
        blocks: Sequence[int],
        marks: Sequence[int],
    ) -> None:
        first = len(self.lengths)
        self.first_images.append(len(self.images))
        self.images += sizes_of(images, first_sequence=first)
        self.image_marks += images[NUMBERS - 1 :: NUMBERS]
        self.blocks |= blocks_of(blocks, first_sequence=first)
        self.lengths += lengths
        self.targets += targets
        self.marks += marks
        self.sources += [rank] * len(lengths)
