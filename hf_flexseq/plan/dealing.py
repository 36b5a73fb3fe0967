"""Which tokens go where: from the sequences that a rank drew to rows outside of attention.

    Dealing(plan, moves, world_size)
        sent_from(sequences)    for a rank that drew these: what it sends, by target
        held_on(rank)           for that rank: what it gets, in the order of its rows

Both are *stretches*: tokens of one sequence that stand one behind the other on one rank. A token
goes straight to where it stands in norms, MLP and head, also in a remapped micro-batch: attention
never sees token ids. Either list takes time that grows with its own length and, as one operation
of numpy, with the number of ranks.

Two ranks come to the same order on their own: by micro-batch, and there by row of the target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.remap import Move
from hf_flexseq.plan.rows import Destinations, parts_of, ranges, zone_rows
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.plan.wire import Ints


class Stretches(NamedTuple):
    """Tokens [start, start + size) of sequences: arrays [stretches] of equal size."""

    sequence: Ints
    """Id of the sequence."""
    start: Ints
    """First token, counted in the sequence."""
    size: Ints
    """Number of tokens."""
    rank: Ints
    """The rank on which they stand outside of attention."""
    batch: Ints
    """Index of the micro-batch."""


class Dealing:
    """Where the tokens of a plan stand outside of attention."""

    __slots__ = ("_arrays", "_destinations", "_moves", "_world_size", "_zones")

    def __init__(self, plan: Plan, moves: Sequence[Sequence[Move]], world_size: int) -> None:
        """moves: of each micro-batch, all that `Shard.moves` has; () where none is remapped."""
        self._arrays = plan.arrays
        self._moves = moves
        self._world_size = world_size
        self._zones = zone_rows(plan, world_size)
        self._destinations = Destinations(self._zones.tokens, moves)

    def sent_from(self, sequences: Ints) -> Stretches:
        """Return where all tokens of some sequences go, by target, and there in its order."""
        places = self._arrays.place_of[sequences]
        degrees = self._arrays.degrees[self._arrays.group_of[places]]
        indices = ranges(np.zeros_like(degrees), degrees)
        stretches, row = self._stretches(np.repeat(places, degrees), indices)
        return _taken(stretches, np.lexsort((row, stretches.batch, stretches.rank)))

    def held_on(self, rank: int) -> Stretches:
        """Return what stands on `rank`, in the order of micro-batches and rows."""
        # 1. its own groups, and in a remapped micro-batch those of who gives it tokens
        groups = [self._arrays.groups_of(rank)]
        holders = [np.full_like(groups[0], rank)]
        for batch, moves in enumerate(self._moves):
            for move in moves:
                if move.target == rank:
                    of_peer = self._arrays.groups_of(move.source)
                    of_peer = of_peer[self._arrays.batch_of[of_peer] == batch]
                    groups.append(of_peer)
                    holders.append(np.full_like(of_peer, move.source))
        group, holder = np.concatenate(groups), np.concatenate(holders)

        # 2. all that they hold in attention, and of that what stands here outside of it
        counts = self._arrays.members[group]
        places = ranges(self._arrays.first_member[group], counts)
        indices = np.repeat(holder - self._arrays.starts[group], counts)
        stretches, row = self._stretches(places, indices)
        here = np.flatnonzero(stretches.rank == rank)
        order = np.lexsort((row[here], stretches.batch[here]))
        return _taken(stretches, here[order])

    def _stretches(self, places: Ints, indices: Ints) -> tuple[Stretches, Ints]:
        """Return what ranks hold of sequences, and the first row of each stretch outside of
        attention.

        places, indices: see `parts_of`.
        """
        arrays, zones = self._arrays, self._zones
        parts = parts_of(arrays, places, indices)
        group = arrays.group_of[places[parts.pair]]
        index = indices[parts.pair]
        holder = arrays.batch_of[group] * self._world_size + arrays.starts[group] + index
        row = zones.row[zones.first[group] + index] + parts.row  # in attention
        stretch, offset, size, holder, row = self._destinations.cut(
            self._destinations.first_row[holder] + row, parts.stop - parts.start
        )
        stretches = Stretches(
            sequence=arrays.sequences[places[parts.pair]][stretch],
            start=parts.start[stretch] + offset,
            size=size,
            rank=holder % self._world_size,
            batch=holder // self._world_size,
        )
        return stretches, row


def _taken(stretches: Stretches, order: Ints) -> Stretches:
    """Return some of the stretches, in this order."""
    return Stretches(*(column[order] for column in stretches))
