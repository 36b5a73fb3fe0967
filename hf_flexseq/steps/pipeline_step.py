"""One optimizer step through pipelines, with the tokens of its chunks: a few integers each, which
every rank of a replica gets for all chunks of that replica."""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.steps.exchange import Columns, RowExchange, SourceRow
from hf_flexseq.steps.stopwatch import Stopwatch


class ChunkExchange(RowExchange):
    """Brings tokens from where they were drawn to every stage of the replica that works on
    them."""

    def __init__(self, communicator: Communicator, of_stage: int, degree: int) -> None:
        """of_stage: ranks with the same stage; each `degree` neighbours of them share a
        replica."""
        super().__init__(communicator)
        self._of_stage, self._degree = of_stage, degree

    def _outgoing(
        self, row: SourceRow, plan: StepPlan, sources: Sequence[int]
    ) -> list[list[slice]]:
        """Tokens of this rank's row to send to each rank, by chunk and slice."""
        starts = self._starts(row, sources)
        by_replica = [
            [
                slice(starts[part.sequence] + part.start, starts[part.sequence] + part.stop)
                for chunk in plan.chunks(replica)
                for part in chunk.slices
                if part.sequence in starts
            ]
            for replica in range(self._of_stage // self._degree)
        ]
        ranks = range(self.communicator.world_size)
        return [by_replica[rank % self._of_stage // self._degree] for rank in ranks]

    def _starts(self, row: SourceRow, sources: Sequence[int]) -> dict[int, int]:
        """Where in this rank's row each of its sequences begins."""
        drawn = (
            sequence for sequence, rank in enumerate(sources) if rank == self.communicator.rank
        )
        starts, offset = {}, 0
        for sequence, length in zip(drawn, row.lengths, strict=True):
            starts[sequence] = offset
            offset += length
        return starts


class PipelineStep:
    """What one rank runs of a step. row: what it drew. columns: of each chunk of its replica, [1,
    t], on its device. targets: tokens with a label in the whole step."""

    __slots__ = ("columns", "number", "plan", "replica", "row", "stopwatch", "targets", "waited_s")

    def __init__(
        self,
        *,
        number: int,
        plan: StepPlan,
        replica: int,
        row: SourceRow,
        columns: Sequence[Columns],
        targets: int,
        waited_s: float,
        device: torch.device,
    ) -> None:
        self.number, self.plan, self.replica, self.row = number, plan, replica, row
        self.targets, self.waited_s = targets, waited_s
        self.stopwatch = Stopwatch(device)
        self.columns = [
            {
                name: value.unsqueeze(0).to(device, non_blocking=True)
                for name, value in of_chunk.items()
            }
            for of_chunk in columns
        ]

    @property
    def tokens(self) -> int:
        """Tokens of the whole step, over all ranks."""
        return sum(self.plan.lengths)

    @property
    def own_plan(self) -> PipelinePlan:
        return self.plan.plans[self.replica]
