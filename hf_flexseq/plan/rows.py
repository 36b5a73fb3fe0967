"""Where every token of a plan stands, by closed forms over arrays.

`shard.py` says what one rank holds in one micro-batch, and is the definition: layouts are
explained there. Whoever sends tokens must know the same of all ranks that want them, for a few
sequences, in time that does not grow with everything else in the plan:

    parts_of         the parts of sequences that given ranks of their groups hold
    zone_rows        where in a rank's row each of its zones begins, and the tokens of all ranks
    Destinations     where rows of attention stand outside of it
    shards_of        the shards of one rank, as `make_shard` makes them

A sequence is dealt to ranks one token after the other (`shard.cuts`), so the share of a rank is
the mean one, or one token more or less, with at most two changes along the ranks. Sums over the
ranks before a given one therefore need no loop.

tests/plan/test_rows.py compares all of it with `shard.py`, token by token.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_flexseq.plan.groups import Group
from hf_flexseq.plan.remap import Move, transport
from hf_flexseq.plan.rings import chunks_per_rank
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.plan.shard import Shard, Slice, Zone, mirrored
from hf_flexseq.plan.wire import Ints, PlanArrays
from hf_flexseq.registry import STRATEGIES
from hf_flexseq.topology import Topology

Flags = npt.NDArray[np.bool_]


@functools.cache
def _chunks_of_strategies() -> Ints:
    """Return by index in STRATEGIES the chunks of a sequence that a rank holds, 0 for none."""
    return np.array([chunks_per_rank(strategy) for strategy in STRATEGIES])


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return start, start + 1, ... of each range, one range after the other: [sum(sizes)]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + sizes, sizes) + np.arange(total)


# ---- parts of sequences


class Parts(NamedTuple):
    """Tokens [start, stop) of sequences on ranks: arrays [parts] of equal size."""

    pair: Ints
    """Which of the asked pairs of a sequence and a rank this is a part of."""
    start: Ints
    """First token, counted in the sequence."""
    stop: Ints
    """First token behind the part."""
    row: Ints
    """First row of the part, counted in the rank's zone."""


def parts_of(arrays: PlanArrays, places: Ints, indices: Ints) -> Parts:
    """Return what the rank of indices[i], in its group, holds of the sequence at places[i].

    places: [pairs] indices into `arrays.sequences`. indices: [pairs] of ranks in the groups.
    Parts stand in the order of the pairs, and two of one pair in the order of the rank's row.
    """
    group = arrays.group_of[places]
    chunks = _chunks_of_strategies()[arrays.strategies[group]]
    lengths = arrays.lengths[arrays.sequences[places]]
    starts = np.zeros((places.size, 2), dtype=np.int64)  # [pairs, first and second part]
    stops = np.zeros((places.size, 2), dtype=np.int64)
    rows = np.zeros((places.size, 2), dtype=np.int64)

    # 1. ranks that hold one part of all sequences of the group together
    whole = np.flatnonzero(chunks == 0)
    before = arrays.before[places[whole]]
    degree = arrays.degrees[group[whole]]
    tokens = arrays.tokens[group[whole]]
    begin = indices[whole] * tokens // degree
    end = (indices[whole] + 1) * tokens // degree
    starts[whole, 0] = np.clip(begin - before, 0, lengths[whole])
    stops[whole, 0] = np.clip(end - before, 0, lengths[whole])
    rows[whole, 0] = before + starts[whole, 0] - begin

    # 2. ranks that hold one chunk, or two, of each sequence
    cut = np.flatnonzero(chunks > 0)
    bounds = _chunk_bounds(
        before=arrays.before[places[cut]],
        lengths=lengths[cut],
        degrees=arrays.degrees[group[cut]],
        indices=indices[cut],
        is_mirrored=_mirrored(arrays, places[cut]),
        is_halved=chunks[cut] == 2,
    )
    starts[cut], stops[cut] = bounds.starts, bounds.stops
    rows[cut, 0] = bounds.row
    rows[cut, 1] = bounds.row + bounds.stops[:, 0] - bounds.starts[:, 0]

    # 3. without those that hold no token
    pair, which = np.nonzero(stops > starts)
    return Parts(pair, starts[pair, which], stops[pair, which], rows[pair, which])


class _Bounds(NamedTuple):
    starts: Ints  # [pairs, 2] first token of the front and of the back chunk
    stops: Ints  # [pairs, 2]
    row: Ints  # [pairs] first row in the rank's zone


def _chunk_bounds(
    *,
    before: Ints,
    lengths: Ints,
    degrees: Ints,
    indices: Ints,
    is_mirrored: Flags,
    is_halved: Flags,
) -> _Bounds:
    """Return the chunks of sequences that the ranks of `indices` hold, as `shard.cuts` has them.

    All arrays are [pairs]. before: tokens that the group was dealt before the sequence.
    is_halved: whether a rank's share is cut into a front and a back chunk.
    """
    # 1. The share of a rank is `mean`, plus `extra` on the ranks [low, high).
    dealt, behind = before % degrees, (before + lengths) % degrees
    mean = (before + lengths) // degrees - before // degrees
    extra = np.where(behind >= dealt, 1, -1)
    low, high = np.minimum(dealt, behind), np.maximum(dealt, behind)

    def fronts(share: Ints) -> Ints:
        return np.where(is_halved, share - share // 2, share)

    def sums(ranks: Ints) -> tuple[Ints, Ints]:
        """Return the tokens of the front and of the back chunks of the first `ranks` ranks."""
        among = np.clip(ranks, low, high) - low  # how many of them have the extra token
        share = mean * ranks + extra * among
        front = fronts(mean) * ranks + (fronts(mean + extra) - fronts(mean)) * among
        return front, share - front

    # 2. Front chunks come first, in the order of the ranks; back chunks the other way round.
    front_before, back_before = sums(indices)
    front_with, back_with = sums(indices + 1)
    front_all, back_all = sums(degrees)
    front_size, back_size = front_with - front_before, back_with - back_before
    front = np.where(is_mirrored, front_all - front_with, front_before)
    back = front_all + np.where(is_mirrored, back_before, back_all - back_with)
    starts = np.stack([front, back], axis=1)
    sizes = np.stack([front_size, back_size], axis=1)
    row = (before + degrees - 1 - indices) // degrees  # tokens of the rank before this sequence
    return _Bounds(starts, starts + sizes, row)


def _mirrored(arrays: PlanArrays, places: Ints) -> Flags:
    """Return for each placed sequence whether it lies the other way round: [pairs]."""
    flags = np.zeros(arrays.sequences.size, dtype=bool)
    for group in np.unique(arrays.group_of[places]).tolist():
        first, stop = arrays.first_member[group : group + 2].tolist()
        if stop - first > 1:  # a single one never does
            flags[first:stop] = mirrored(arrays.lengths[arrays.sequences[first:stop]].tolist())
    return flags[places]


# ---- rows


class ZoneRows:
    """Where the zones of all ranks begin. A zone's number is `first[group] + index`."""

    __slots__ = ("first", "row", "tokens")

    def __init__(self, arrays: PlanArrays, world_size: int) -> None:
        self.first = np.cumsum(arrays.degrees) - arrays.degrees
        """[groups] Zones before those of the group."""
        group = np.repeat(np.arange(arrays.degrees.size), arrays.degrees)
        index = np.arange(group.size) - self.first[group]
        tokens, degrees = arrays.tokens[group], arrays.degrees[group]
        contiguous = (index + 1) * tokens // degrees - index * tokens // degrees
        dealt = (tokens + degrees - 1 - index) // degrees
        held = np.where(_chunks_of_strategies()[arrays.strategies[group]] == 0, contiguous, dealt)

        # Zones of one rank stand one after the other, in the order of the groups.
        holder = arrays.batch_of[group] * world_size + arrays.starts[group] + index
        order = np.argsort(holder, kind="stable")
        ends = np.cumsum(held[order])
        holders = arrays.groups_in.size * world_size
        tokens_of = np.bincount(holder, weights=held, minlength=holders).astype(np.int64)
        begins = np.cumsum(tokens_of) - tokens_of  # [holders] tokens of the holders before
        self.row = np.empty_like(ends)
        """[zones] First row of the zone in its rank's row."""
        self.row[order] = ends - held[order] - begins[holder[order]]
        self.tokens = tokens_of.reshape(-1, world_size)
        """[micro-batches, world_size] Tokens of each rank in attention."""


def zone_rows(plan: Plan, world_size: int) -> ZoneRows:
    """Return where the zones of all ranks begin."""
    return ZoneRows(plan.arrays, world_size)


class Destinations:
    """Where rows of attention stand outside of it, in all micro-batches.

    Rows of all ranks are counted through: those of rank 0 in micro-batch 0, of rank 1, and so on.
    A *run* of them stands together outside of attention: what a rank keeps, or gives to one other.
    """

    __slots__ = ("begin", "first_row", "holder", "row")

    def __init__(self, tokens: Ints, moves: Sequence[Sequence[Move]]) -> None:
        """tokens: [micro-batches, world_size] in attention. moves: of each micro-batch, by source,
        then by target."""
        world_size = tokens.shape[1]
        held = tokens.reshape(-1)  # [holders], a rank in a micro-batch each
        self.first_row = np.cumsum(held) - held
        """[holders] Rows before the holder's."""
        table = [
            (batch * world_size + move.source, batch * world_size + move.target, move.tokens)
            for batch, moves_of in enumerate(moves)
            for move in moves_of
        ]
        source, target, moved = np.array(table, dtype=np.int64).reshape(-1, 3).T
        given = np.bincount(source, weights=moved, minlength=held.size).astype(np.int64)
        kept = held - given

        # What a rank gives are its last rows, and what it gets stands behind what it keeps.
        given_before = _before_in(source, moved)
        got_before = np.empty_like(moved)
        by_target = np.argsort(target, kind="stable")
        got_before[by_target] = _before_in(target[by_target], moved[by_target])
        holders = np.arange(held.size)
        begin = np.concatenate(
            [self.first_row, self.first_row[source] + kept[source] + given_before]
        )
        order = np.argsort(begin, kind="stable")
        self.begin = begin[order]
        """[runs] First row of each run."""
        self.holder = np.concatenate([holders, target])[order]
        """[runs] Who holds the run outside of attention."""
        self.row = np.concatenate([np.zeros_like(held), kept[target] + got_before])[order]
        """[runs] Where the run begins in the holder's row outside of attention."""

    def cut(self, rows: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Cut stretches of rows where runs end: [stretches] -> [pieces].

        rows: first row of each stretch, counted through. sizes: rows of each, at least one.
        Returns (stretch, offset in it, size, holder, row in the holder's) of every piece.
        """
        first = np.searchsorted(self.begin, rows, side="right") - 1
        last = np.searchsorted(self.begin, rows + sizes - 1, side="right") - 1
        counts = last - first + 1
        stretch = np.repeat(np.arange(rows.size), counts)
        run = ranges(first, counts)
        ends = np.append(self.begin[1:], np.iinfo(np.int64).max)
        begin = np.maximum(rows[stretch], self.begin[run])
        end = np.minimum(rows[stretch] + sizes[stretch], ends[run])
        row = self.row[run] + begin - self.begin[run]
        return stretch, begin - rows[stretch], end - begin, self.holder[run], row


def _before_in(keys: Ints, sizes: Ints) -> Ints:
    """Return the sum of the sizes before each one that have its key; equal keys stand together."""
    before = np.cumsum(sizes) - sizes
    if not keys.size:
        return before
    is_first = np.append(True, keys[1:] != keys[:-1])
    return before - np.maximum.accumulate(np.where(is_first, before, 0))


# ---- the shards of one rank


def shards_of(plan: Plan, rank: int, topology: Topology) -> list[Shard]:
    """Return what `rank` holds in each micro-batch; in a remapped one with the moves of all
    ranks."""
    arrays = plan.arrays
    groups = arrays.groups_of(rank)
    zones: list[list[Zone]] = [[] for _ in plan.micro_batches]
    slices = _slices_of(arrays, groups, rank)
    own_groups = [group for batch in plan.micro_batches for group in batch.groups_of(rank)]
    for number, group, own in zip(groups.tolist(), own_groups, slices, strict=True):
        of_batch = zones[arrays.batch_of[number]]
        of_batch.append(_zone(arrays, number, group, rank, own, of_batch))
    shards = [Shard(rank=rank, zones=tuple(of_batch)) for of_batch in zones]
    if not arrays.remap.any():
        return shards
    tokens = zone_rows(plan, topology.world_size).tokens
    for index in np.flatnonzero(arrays.remap).tolist():
        moves = transport(tuple(tokens[index].tolist()), topology)
        shards[index] = replace(shards[index], moves=moves)
    return shards


def _slices_of(arrays: PlanArrays, groups: Ints, rank: int) -> list[tuple[Slice, ...]]:
    """Return the slices that `rank` holds for each of its groups."""
    counts = arrays.members[groups]
    places = ranges(arrays.first_member[groups], counts)
    indices = np.repeat(rank - arrays.starts[groups], counts)
    parts = parts_of(arrays, places, indices)
    ids = arrays.sequences[places[parts.pair]]
    slices = [
        Slice(sequence=sequence, start=start, stop=stop)
        for sequence, start, stop in zip(
            ids.tolist(), parts.start.tolist(), parts.stop.tolist(), strict=True
        )
    ]
    owner = np.repeat(np.arange(groups.size), counts)[parts.pair]  # [slices]
    bounds = np.searchsorted(owner, np.arange(groups.size + 1)).tolist()
    return [tuple(slices[first:stop]) for first, stop in pairwise(bounds)]


def _zone(
    arrays: PlanArrays,
    number: int,
    group: Group,
    rank: int,
    slices: tuple[Slice, ...],
    before: Sequence[Zone],
) -> Zone:
    """Return the zone of a rank in group `number`, behind its zones `before`."""
    first, stop = arrays.first_member[number : number + 2].tolist()
    row = before[-1].stop if before else 0
    return Zone(
        group=group,
        index=rank - group.start,
        lengths=tuple(arrays.lengths[arrays.sequences[first:stop]].tolist()),
        slices=slices,
        start=row,
        stop=row + sum(part.tokens for part in slices),
    )
