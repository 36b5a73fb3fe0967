"""Passes that a planner may add to its plans, over the programs of a micro-batch.

A finished program is data. Passes rewrite it where one planner's plans alone need it, so neither
compiler nor replay depends on such plans. A planner names the function that makes its passes in
the registry of planners; the executor applies them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.instructions import LayerShape, Program, RowShape
from hf_flexseq.program.zones import Machine

# Rewrites the programs of one rank in one micro-batch: from a program, what it does and the shape
# (see `compile_program`) to a program with the same result.
ProgramPass = Callable[[Program, str, LayerShape | RowShape], Program]


class PlanPasses(Protocol):
    """The passes of a planner, on all ranks alike."""

    def shards(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> list[Shard] | None:
        """Return every rank's shard of a micro-batch outside of attention, [world_size], if some
        rank holds other tokens there than in attention; None if none does.

        lengths: tokens of every sequence of the plan, by sequence id.
        """

    def of_programs(self, shard: Shard, machine: Machine) -> ProgramPass:
        """Return the pass over the programs of a shard."""
