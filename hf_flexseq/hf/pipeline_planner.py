"""Plans the steps of a pipeline: sequences are dealt to replicas, and each replica gets a schedule."""

from collections.abc import Sequence

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.hf.pipeline_step import StepPlan
from hf_flexseq.pipeline.stages import Stage
from hf_flexseq.schedule.pipeline.actions import PipelinePlan


class PipelinePlanner:
    """Plans in this process, when the result is wanted."""

    def __init__(self, args: FlexSeqArguments, cost: CostModel, stage: Stage, replicas: int) -> None:
        self.args, self.cost, self.stage, self.replicas = args, cost, stage, replicas
        self._submitted: dict[int, list[int]] = {}

    def submit(self, step: int, lengths: list[int]) -> None:
        self._submitted[step] = lengths

    def result(self, step: int) -> StepPlan:
        lengths = self._submitted.pop(step)
        members = deal_to_replicas(lengths, self.replicas, self.cost)
        plans = tuple(self.plan_replica(tuple(lengths[i] for i in ids)) for ids in members)
        return StepPlan(lengths=tuple(lengths), members=members, plans=plans)

    def plan_replica(self, lengths: tuple[int, ...]) -> PipelinePlan:
        raise NotImplementedError

    def close(self) -> None:
        self._submitted.clear()


def deal_to_replicas(lengths: Sequence[int], replicas: int, cost: CostModel) -> tuple[tuple[int, ...], ...]:
    """The ids of each replica's sequences: longest first, each to the replica with the least modelled work so far."""
    held: list[list[int]] = [[] for _ in range(replicas)]
    work = [0] * replicas
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        replica = min(range(replicas), key=lambda r: (work[r], r))
        held[replica].append(sequence)
        work[replica] += cost.sequence_ns(lengths[sequence], 1, "local", False)
    return tuple(tuple(sorted(ids)) for ids in held)
