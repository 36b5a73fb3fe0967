"""Token layout of a plan: the shard of a rank in each micro-batch, and the ranks that hold its
drawn sequences.

Tokens are sent to the layout of norms, MLP and head. It equals the layout of attention
(`shard.make_shard`), unless a planner's pass has its own.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from hf_flexseq.plan.groups import MicroBatch
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.plan.shard import Shard, Slice, make_shard, placed

# (micro-batch, tokens of every sequence) -> the shards of all ranks, or None for `make_shard`
AllShards = Callable[[MicroBatch, Sequence[int]], list[Shard] | None]


class PlanLayout:
    """Layout of a plan on one rank."""

    def __init__(self, plan: Plan, rank: int, all_shards: AllShards | None = None) -> None:
        """all_shards: the layout of a planner's pass; None for that of attention."""
        self._plan = plan
        self._all_shards: list[list[Shard] | None] = []  # by micro-batch
        self.shards: list[Shard] = []
        """Shard of the rank in each micro-batch."""
        for micro_batch in plan.micro_batches:
            shards = all_shards and all_shards(micro_batch, plan.lengths)
            self._all_shards.append(shards)
            own = shards[rank] if shards else make_shard(micro_batch, plan.lengths, rank)
            self.shards.append(own)

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
