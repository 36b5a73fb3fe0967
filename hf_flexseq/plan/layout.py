"""Token layout of a plan: the shard of a rank in each micro-batch, and the ranks that hold its
drawn sequences.

Tokens are sent to the layout of norms, MLP and head. It equals the layout of attention
(`shard.make_shard`), unless a planner's pass has its own.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.plan.groups import MicroBatch
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.plan.shard import Shard, Slice, make_shard, placed
from hf_flexseq.plan.units import Unit


class RowSlice(NamedTuple):
    """Tokens of one row, in the sequence that has them."""

    slice: Slice
    """The tokens, counted in the row."""
    first: int
    """The first of them, counted in the sequence."""


# (micro-batch, tokens of every sequence) -> the shards of all ranks, or None for `make_shard`
AllShards = Callable[[MicroBatch, Sequence[int]], list[Shard] | None]


class PlanLayout:
    """Layout of a plan on one rank."""

    def __init__(self, plan: Plan, rank: int, all_shards: AllShards | None = None) -> None:
        """all_shards: the layout of a planner's pass; None for attention's."""
        self._plan = plan
        self._all_shards: list[list[Shard] | None] = []  # by micro-batch
        self.shards: list[Shard] = []
        """Shard of the rank in each micro-batch."""
        for micro_batch in plan.micro_batches:
            shards = all_shards and all_shards(micro_batch, plan.lengths)
            self._all_shards.append(shards)
            own = shards[rank] if shards else make_shard(micro_batch, plan.lengths, rank)
            self.shards.append(own)
        self._units = {unit.sequence: unit for unit in plan.units}

    @property
    def has_units(self) -> bool:
        """True if any rows share tokens."""
        return bool(self._units)

    def sequences_of(self, rows: Collection[int]) -> set[int]:
        """Return the sequences of the plan in which some rows are."""
        sequences = set(rows)
        for unit in self._units.values():
            inside = {row for row, _ in unit.rows}
            if not sequences.isdisjoint(inside):
                sequences = (sequences - inside) | {unit.sequence}
        return sequences

    def of_rows(self, part: Slice) -> list[RowSlice]:
        """Return a slice of a sequence as slices of rows: several for the tokens that rows of a
        unit share, node by node, and of each node by ascending row."""
        unit: Unit | None = self._units.get(part.sequence)
        if unit is None:
            return [RowSlice(part, part.start)]
        layout = unit.layout
        slices = []
        for node, start, stop in layout.pieces(part.start, part.stop):
            shift = layout.before[node] - layout.starts[node]
            for row, last in unit.rows:
                if layout.starts[node] <= layout.starts[last] < layout.subtree_stops[node]:
                    of_row = Slice(sequence=row, start=start + shift, stop=stop + shift)
                    slices.append(RowSlice(of_row, start))
        return slices

    def placed(self, sequences: Collection[int]) -> Iterator[tuple[int, Slice]]:
        """Yield (rank, slice) for each slice of some sequences; the slices of one rank are in row
        order, micro-batch by micro-batch.

        sequences: ids, best as a set.
        """
        for micro_batch, shards in zip(self._plan.micro_batches, self._all_shards, strict=True):
            if shards is None:
                yield from placed(micro_batch, self._plan.lengths, sequences)
                continue
            for shard in shards:
                for part in shard.slices:
                    if part.sequence in sequences:
                        yield shard.rank, part
