"""Positions of the heads of several tensors in one flat buffer that is cut into parts.

Ulysses sends every rank its heads of q, k and v in one message. The message, a *part* of the
buffer, is [tokens, heads of the part, head_dim], with its heads of all tensors side by side. For
example q of four heads and k of two, on two ranks:

    part 0    of every token    q0 q1 k0
    part 1    of every token    q2 q3 k1

A *slot* is the place of one head of one token. With T tokens part 0 has slots 0 to 3T - 1, and
head q1 of token n is in slot 1 + 3n: a first slot and a stride. Heads with the same pattern in
several parts, which are evenly apart, are a *run*.

`kernels/fused_operations.py` packs tensors into such a buffer and unpacks them again.
"""

from collections.abc import Sequence
from typing import NamedTuple


class HeadRun(NamedTuple):
    """Adjacent heads, in some parts of the buffer with the same pattern."""

    tensor: int
    head: int  # the first head in the first part
    heads: int  # in each part
    slot: int  # slot of the first head and token 0
    stride: int  # slots between consecutive tokens
    parts: int
    head_step: int  # heads from one of its parts to the next
    slot_step: int  # slots from one of its parts to the next


class HeadLayout:
    """The places of the heads of some tensors [tokens, heads, head_dim] in a flat buffer."""

    __slots__ = ("heads", "runs", "shared", "slots", "tokens")

    def __str__(self) -> str:
        """Return the number of heads of each tensor."""
        return f"{' + '.join(map(str, self.heads))} heads in {len(self.slots)} parts"

    def __init__(self, head_ranges: Sequence[Sequence[range]], tokens: int) -> None:
        """head_ranges: by tensor and part, the heads in the part. Each head is in some part."""
        slots, runs = _runs(head_ranges, tokens)
        self.tokens = tokens
        self.runs = tuple(runs)
        self.slots = tuple(slots)
        """Slots of each part; times head_dim they are elements."""
        self.heads = tuple(_all_heads(ranges) for ranges in head_ranges)
        """Heads of each tensor."""
        self.shared = tuple(
            sum(map(len, ranges)) > heads
            for ranges, heads in zip(head_ranges, self.heads, strict=True)
        )
        """True for each tensor with heads in several parts."""


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
    # 2. parts with the same pattern are joined, those between them may have others
    runs: list[HeadRun] = []
    for of_tensor in single:
        joined: list[HeadRun] = []
        for run in of_tensor:
            for place, earlier in enumerate(joined):
                longer = _longer(earlier, run)
                if longer is not None:
                    joined[place] = longer
                    break
            else:
                joined.append(run)
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
