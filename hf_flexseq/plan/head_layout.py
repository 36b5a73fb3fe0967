"""Positions of the heads of several tensors in one flat buffer that is cut into parts.

Ulysses sends every rank its heads of q, k and v in one message. The message, a *part* of the
buffer, is [tokens, heads of the part, head_dim], with its heads of all tensors side by side. For
example q of four heads and k of two, on two ranks:

    part 0    of every token    q0 q1 k0
    part 1    of every token    q2 q3 k1

A *slot* is the place of one head of one token. With T tokens part 0 has slots 0 to 3T - 1, and
head q1 of token n is in slot 1 + 3n. So a head of a part is a *column* of slots: a first one and a
stride. Columns with the same pattern in consecutive parts are a *run*.

`kernels/fused_operations.py` packs tensors into such a buffer, run by run, and unpacks them again;
`kernels/triton_kernels.py` does so column by column.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class HeadColumn(NamedTuple):
    """One head of one tensor, in one part of the buffer."""

    tensor: int
    head: int
    slot: int  # slot for token 0
    stride: int  # slots between consecutive tokens


class HeadRun(NamedTuple):
    """Adjacent heads, in consecutive parts of the buffer with the same pattern."""

    tensor: int
    head: int  # the first head in the first part
    heads: int  # in each part
    slot: int  # slot of the first head and token 0
    stride: int  # slots between consecutive tokens
    parts: int
    head_step: int  # heads between consecutive parts
    slot_step: int  # slots between consecutive parts

    def columns(self) -> Iterator[HeadColumn]:
        """Yield the columns of the run, part after part."""
        for part in range(self.parts):
            head = self.head + part * self.head_step
            slot = self.slot + part * self.slot_step
            for i in range(self.heads):
                yield HeadColumn(self.tensor, head + i, slot + i, self.stride)


class HeadLayout:
    """The places of the heads of some tensors [tokens, heads, head_dim] in a flat buffer."""

    __slots__ = ("columns", "heads", "numbers", "runs", "shared", "slots", "tokens")

    def __str__(self) -> str:
        """Return the number of heads of each tensor."""
        return f"{' + '.join(map(str, self.heads))} heads in {len(self.slots)} parts"

    def __init__(self, head_ranges: Sequence[Sequence[range]], tokens: int) -> None:
        """head_ranges: by tensor and part, the heads in the part. Each head is in some part."""
        slots, runs = _runs(head_ranges, tokens)
        columns: list[HeadColumn] = []
        for run in runs:
            columns.extend(run.columns())
        # Sorted by head; parts that share a head stay in their order.
        columns.sort(key=lambda column: (column.tensor, column.head))

        self.tokens = tokens
        self.runs = tuple(runs)
        self.columns = len(columns)
        """Number of columns."""
        self.slots = tuple(slots)
        """Slots of each part; times head_dim they are elements."""
        self.heads = tuple(_all_heads(ranges) for ranges in head_ranges)
        """Heads of each tensor."""
        self.shared = tuple(
            sum(map(len, ranges)) > heads
            for ranges, heads in zip(head_ranges, self.heads, strict=True)
        )
        """True for each tensor with heads in several parts."""
        self.numbers: NDArray[np.int64] = _numbers(columns, self.heads)
        """The columns as integers, in one flat int64 array: [columns, 4], the fields of each,
        sorted by tensor and head; then, by tensor and head, the number of its first column, and
        at the end `columns`."""


def _runs(head_ranges: Sequence[Sequence[range]], tokens: int) -> tuple[list[int], list[HeadRun]]:
    """Return the slots of each part, and the runs of all tensors."""
    # 1. one run for each tensor and part
    starts: list[int] = []  # first slot of each part
    single: list[list[HeadRun]] = [[] for _ in head_ranges]
    slots = []
    end = 0
    for ranges_of_part in zip(*head_ranges, strict=True):
        stride = sum(map(len, ranges_of_part))
        starts.append(end)
        before = 0  # heads of previous tensors
        for number, one in enumerate(ranges_of_part):
            if one:
                run = HeadRun(number, one.start, len(one), end + before, stride, 1, 0, 0)
                single[number].append(run)
            before += len(one)
        slots.append(tokens * stride)
        end += tokens * stride
    # 2. parts with the same pattern are joined
    runs: list[HeadRun] = []
    for of_tensor in single:
        joined: list[HeadRun] = []
        for run in of_tensor:
            longer = _longer(joined[-1], run) if joined else None
            if longer is None:
                joined.append(run)
            else:
                joined[-1] = longer
        runs += joined
    return slots, runs


def _longer(run: HeadRun, following: HeadRun) -> HeadRun | None:
    """Return a run extended by a run of one part, or None if its pattern differs."""
    if (following.heads, following.stride) != (run.heads, run.stride):
        return None
    head_step = following.head - run.head - (run.parts - 1) * run.head_step
    slot_step = following.slot - run.slot - (run.parts - 1) * run.slot_step
    if run.parts == 1:
        # Parts that share a head are separate: one addition would lose the other.
        is_alike = head_step >= run.heads
    else:
        is_alike = (head_step, slot_step) == (run.head_step, run.slot_step)
    if not is_alike:
        return None
    return run._replace(parts=run.parts + 1, head_step=head_step, slot_step=slot_step)


def _all_heads(ranges: Sequence[range]) -> int:
    """Return the number of heads of a tensor; each must be in some part."""
    heads: set[int] = set()
    for one in ranges:
        heads.update(one)
    assert heads == set(range(len(heads))), "every head is in some part"
    return len(heads)


def _numbers(columns: Sequence[HeadColumn], heads: Sequence[int]) -> NDArray[np.int64]:
    """Return `HeadLayout.numbers`. columns: sorted by tensor and head. heads: of each tensor."""
    firsts: list[int] = []
    last = None
    for number, column in enumerate(columns):
        if (column.tensor, column.head) != last:
            last = (column.tensor, column.head)
            firsts.append(number)
    assert len(firsts) == sum(heads), "every head has a column"
    fields = np.array(columns, dtype=np.int64).reshape(-1)
    return np.concatenate((fields, np.array([*firsts, len(columns)], dtype=np.int64)))
