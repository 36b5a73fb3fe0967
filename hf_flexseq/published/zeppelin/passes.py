"""Passes of Zeppelin: routing over several NICs, and remapping."""

from collections.abc import Sequence

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.instructions import LayerShape, Program, RowShape
from hf_flexseq.program.passes import ProgramPass
from hf_flexseq.program.zones import Machine
from hf_flexseq.published.zeppelin.remap import (
    RemapPass,
    RemappedShard,
    is_worth_it,
    remapped_shards,
)
from hf_flexseq.published.zeppelin.routes import RoutePass
from hf_flexseq.published.zeppelin.routing import NicFigures, links_of


class ZeppelinPasses:
    """The passes of one run; see `program.passes.PlanPasses`."""

    def __init__(self, cost: CostModel, topology: Topology, *, lockstep: bool) -> None:
        """lockstep: True if all ranks run every micro-batch together; False never remaps."""
        self._cost = cost
        self._topology = topology
        self._remaps = lockstep
        self._links: NicFigures | None = links_of(cost, topology)

    def shards(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> list[Shard] | None:
        """Return every rank's shard of a remapped micro-batch; None for any other."""
        if not self._remaps or not is_worth_it(self._cost, micro_batch, lengths, self._topology):
            return None
        return remapped_shards(micro_batch, lengths, self._topology)

    def of_programs(self, shard: Shard, machine: Machine) -> ProgramPass:
        """Return the pass over the programs of a shard: routing, then remapping."""
        passes: list[ProgramPass] = []
        if self._links is not None and self._links.may_route:
            passes.append(RoutePass(shard, machine, self._links))
        if isinstance(shard, RemappedShard):
            passes.append(RemapPass(shard))

        def apply(program: Program, what: str, shape: LayerShape | RowShape) -> Program:
            for one in passes:
                program = one(program, what, shape)
            return program

        return apply
