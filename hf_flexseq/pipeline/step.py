"""A pipeline's optimizer step as one rank runs it: chunks, the way of their tokens, their trace
and their figures."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.steps.exchange import Routes, own_offsets, routes_of, tokens_of
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.source_row import Columns, PlannedStep, SourceRow
from hf_flexseq.steps.trace import LogFigures, PlanTrace


class RankChunks(RankStep[StepPlan]):
    """The chunks of one replica's plan, with their tokens, on every rank of the replica."""

    def __init__(
        self,
        planned: PlannedStep,
        columns: Sequence[Columns],
        *,
        replica: int,
        device: torch.device,
    ) -> None:
        """columns: each [tokens], by chunk of the replica. replica: the one of this rank."""
        super().__init__(planned, device)
        self.replica = replica
        self.columns: list[Columns] = []  # of each chunk, [1, tokens] on the device
        for columns_of_chunk in columns:
            moved = {}
            for name, value in columns_of_chunk.items():
                row = value.unsqueeze(0)  # [tokens] -> [1, tokens]
                moved[name] = to_device(row, device)
            self.columns.append(moved)

    @property
    def own_plan(self) -> PipelinePlan:
        """The plan of this rank's replica."""
        return self.plan.plans[self.replica]


def chunk_routes(
    row: SourceRow,
    plan: StepPlan,
    sources: Sequence[int],
    communicator: Communicator,
    replica_of: Callable[[int], int],
) -> Routes:
    """Return the routes of a rank to the chunks of its replica, on every stage of it. row: the
    sequences that this rank drew. sources: the rank that drew each sequence. replica_of: the
    replica of a rank."""
    source_of = np.array(sources, dtype=np.int64)
    own = np.flatnonzero(source_of == communicator.rank)
    offsets = own_offsets(row, own, source_of.size)
    by_replica = []
    for replica in range(len(plan.plans)):
        slices = [part for chunk in plan.chunks(replica) for part in chunk.slices]
        by_replica.append(tokens_of(slices, offsets))
    by_rank = [by_replica[replica_of(rank)] for rank in range(communicator.world_size)]
    counts = [tokens.size for tokens in by_rank]
    chunks = [chunk.slices for chunk in plan.chunks(replica_of(communicator.rank))]
    return routes_of(np.concatenate(by_rank), counts, chunks, source_of, communicator.cpu_group)


def traced(step: RankChunks, trace: PlanTrace, cost: PipelineCost, whole: CostModel) -> LogFigures:
    """Write a finished step's trace, a line per replica; return its figures. Collective over the
    world. cost: of the stages. whole: of the whole model."""
    own_s = step.stopwatch.seconds().get(0, 0.0)
    measured_s = max(trace.communicator.cpu_group.gather_values(own_s))
    plans = step.plan.plans
    if trace.is_written:
        of_all = {
            "cost_model": trace.digest(whole),
            "measured_s": [measured_s],
            "waited_s": step.waited_s,
            "pipeline_cost": cost.to_record(),
        }
        lines = []
        for replica, (members, plan) in enumerate(zip(step.plan.members, plans, strict=True)):
            own = {"replica": replica, "sequences": members}
            lines.append(of_all | own | plan.to_record())
        trace.write(step.number, lines)
    return {
        "stages": plans[0].stages,
        "chunks": max(len(plan.chunks) for plan in plans),
        "predicted_s": step.plan.objective_s,
        "measured_s": measured_s,
        "tokens_per_s": step.tokens / measured_s if measured_s else 0.0,
    }
