"""The integers of a plan of groups: how a plan travels between ranks, and how a rank finds its own
groups without looking at anybody else's as objects.

    PlanArrays    all groups of all micro-batches as a few arrays
    pack, unpack  the arrays as bytes, int32, with a small JSON object behind them

A plan for 1,024 ranks has thousands of groups. As objects they take each rank tens of milliseconds
to make, in every step, and it needs a handful of them: `MicroBatch.groups_of` finds those here.

Bytes of a plan, all integers little-endian:

    5 x int64    sequences, micro-batches, groups, placed sequences, bytes of JSON
    int32        the arrays of `PlanArrays`, in the order of its fields
    JSON         the rest of the plan's record

Rejected: JSON for everything, as files have it, which takes ten times as long to read.
"""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

COUNTS = 5  # integers in front
COUNT = np.dtype("<i8")
NUMBER = np.dtype("<i4")  # of tokens, ranks and ids, all of which are below 2^31


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanArrays:
    """The groups of a plan, one after the other: by micro-batch, and there widest first."""

    lengths: Ints
    """[sequences] Tokens of each sequence."""
    groups_in: Ints
    """[micro-batches] Number of groups of each."""
    remap: Ints
    """[micro-batches] 1 where tokens stand evenly on all ranks outside of attention, else 0."""
    starts: Ints
    """[groups] First rank of each."""
    degrees: Ints
    """[groups] Ranks of each."""
    strategies: Ints
    """[groups] Index of the strategy in `STRATEGIES`."""
    members: Ints
    """[groups] Number of sequences of each."""
    sequences: Ints
    """[placed] Ids of the groups' sequences, by group: in a plan of legal form each id once."""

    # ---- where groups and sequences stand

    @cached_property
    def batch_of(self) -> Ints:
        """[groups] Index of each group's micro-batch."""
        return np.repeat(np.arange(self.groups_in.size), self.groups_in)

    @cached_property
    def first_group(self) -> Ints:
        """[micro-batches + 1] Groups before each micro-batch, and all groups."""
        return _offsets(self.groups_in)

    @cached_property
    def first_member(self) -> Ints:
        """[groups + 1] Placed sequences before each group's, and all of them."""
        return _offsets(self.members)

    @cached_property
    def group_of(self) -> Ints:
        """[placed] The group of each placed sequence."""
        return np.repeat(np.arange(self.members.size), self.members)

    @cached_property
    def place_of(self) -> Ints:
        """[sequences] Where each sequence stands in `sequences`, in a plan of legal form."""
        places = np.empty_like(self.lengths)
        places[self.sequences] = np.arange(self.sequences.size)
        return places

    def is_covering(self) -> bool:
        """Tell if every sequence is placed exactly once, and nothing else is."""
        if self.sequences.size != self.lengths.size:
            return False
        return bool((np.sort(self.sequences) == np.arange(self.lengths.size)).all())

    # ---- tokens

    @cached_property
    def before(self) -> Ints:
        """[placed] Tokens of the sequences before each one in its group."""
        before = _offsets(self.lengths[self.sequences])[:-1]
        return before - before[self.first_member[:-1]][self.group_of]

    @cached_property
    def tokens(self) -> Ints:
        """[groups] Tokens of each group's sequences together."""
        up_to = _offsets(self.lengths[self.sequences])
        return np.diff(up_to[self.first_member])

    def tokens_per_rank(self, world_size: int) -> Ints:
        """Return `MicroBatch.tokens_per_rank` of each micro-batch: [micro-batches, world_size]."""
        shares = -(-self.tokens // self.degrees)
        # Each group's share is added at its first rank, and taken off behind its last one.
        changes = np.zeros((self.groups_in.size, world_size + 1), dtype=np.int64)
        np.add.at(changes, (self.batch_of, self.starts), shares)
        np.subtract.at(changes, (self.batch_of, self.starts + self.degrees), shares)
        return changes.cumsum(axis=1)[:, :-1]

    # ---- the groups of a rank

    def groups_of(self, rank: int) -> Ints:
        """Return the groups that `rank` works in, of all micro-batches."""
        works = (self.starts <= rank) & (rank < self.starts + self.degrees)
        return np.flatnonzero(works)


def _offsets(sizes: Ints) -> Ints:
    """Return the sum of the sizes before each one, and of all of them: [n] -> [n + 1]."""
    offsets = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


# ---- bytes


def pack(arrays: PlanArrays, rest: dict[str, Any]) -> bytes:
    """Return the arrays and the rest of a plan, JSON values, as bytes."""
    text = json.dumps(rest).encode()
    columns = [getattr(arrays, field.name) for field in fields(arrays)]
    counts = np.array(
        [
            arrays.lengths.size,
            arrays.groups_in.size,
            arrays.starts.size,
            arrays.sequences.size,
            len(text),
        ],
        dtype=COUNT,
    )
    return counts.tobytes() + np.concatenate(columns).astype(NUMBER).tobytes() + text


def unpack(data: bytes) -> tuple[PlanArrays, dict[str, Any]]:
    """Return what `pack` was called on. Raises ValueError for bytes of another size."""
    if len(data) < COUNTS * COUNT.itemsize:
        raise ValueError(f"not a packed plan: {len(data)} bytes")
    counts = np.frombuffer(data, COUNT, COUNTS).tolist()
    sequences, batches, groups, placed, text_bytes = counts
    sizes = [sequences, batches, batches, groups, groups, groups, groups, placed]
    start = COUNTS * COUNT.itemsize
    stop = start + sum(sizes) * NUMBER.itemsize
    if min(counts) < 0 or stop + text_bytes != len(data):
        raise ValueError(f"not a packed plan: {len(data)} bytes do not hold {counts}")
    numbers = np.frombuffer(data, NUMBER, sum(sizes), start).astype(np.int64)
    columns = np.split(numbers, np.cumsum(sizes)[:-1])
    names = [field.name for field in fields(PlanArrays)]
    return PlanArrays(**dict(zip(names, columns, strict=True))), json.loads(data[stop:])
