"""The engine of a rank that has one stage of the model.

It differs from a whole model's engine in three things: the model is cut, and sharded, when the
engine is made, so that the optimizer sees the parameters of the stage alone; a step's plan has
chunks and actions instead of micro-batches; and gradients are summed here, over replicas and over
the two copies of a tied tensor, where otherwise accelerate does it.

    pipeline 0    rank 0    rank 2    rank 4         two pipelines of three stages:
    pipeline 1    rank 1    rank 3    rank 5         ranks with the same stage are neighbours
                  stage 0   stage 1   stage 2

`degree` neighbours of a stage share the chunks of one replica by Ulysses; without, every pipeline
is a separate replica.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.layer_bytes import FLOAT32_BYTES
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.engine.cost_choice import CostSubject
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.checkpointing import NonReentrant
from hf_flexseq.hf.model.facts import (
    autocast_dtype,
    is_checkpointed,
    model_shape,
)
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.rehearsal import class_copy
from hf_flexseq.hf.model.shared_prefixes import OFF
from hf_flexseq.hf.model.towers import reader_of_text
from hf_flexseq.pipeline.checkpoint import StageMember
from hf_flexseq.pipeline.cost import StageTokenBytes, pipeline_cost, room_bytes
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.planning import PipelineOptions
from hf_flexseq.pipeline.planning.job import StagesJob
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.pipeline.planning.walk import check_step
from hf_flexseq.pipeline.reduction import equalise, reduce_gradients
from hf_flexseq.pipeline.sharding import ShardedStage
from hf_flexseq.pipeline.stages import Stage, cut
from hf_flexseq.pipeline.step import RankChunks, chunk_routes, traced
from hf_flexseq.pipeline.trainer.checks import check_divides
from hf_flexseq.pipeline.trainer.loading import stage_of
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.planner.process.client import Planner, start_planner
from hf_flexseq.steps.learned_cost import corrected_cost
from hf_flexseq.steps.prefetch import PrefetchedSteps, Step
from hf_flexseq.steps.source_row import PlannedStep
from hf_flexseq.steps.token_columns import with_token_columns
from hf_flexseq.steps.trace import LogFigures, PlanTrace

logger = logging.getLogger(__name__)


class PipelineEngine(FlexSeqEngine):
    """Plans chunks and runs them on a model in `args.pipeline_parallel_size` stages."""

    def __init__(
        self,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        *,
        model: PreTrainedModel,
        fsdp: bool = False,
        **options: Any,
    ) -> None:
        """Cut `model` in place, unless it was loaded as a stage. Collective over the world.

        fsdp: True if the ranks of a stage share its parameters (FSDP2); of no effect where a stage
        has one rank. accelerator, args, options: see `FlexSeqEngine`. Raises ValueError for a
        number of stages that does not divide the ranks or exceeds layers + 1, NotImplementedError
        for a model without a plain decoder stack.
        """
        super().__init__(accelerator, args, **options)
        setup = self.setup
        communicator = self.communicator
        device = accelerator.device

        # 1. which rank has what
        stages = args.pipeline_parallel_size
        self.degree = args.sp_degree or 1
        self.ranks_per_stage = _ranks_per_stage(stages, self.degree, communicator.world_size)
        stage_index, member_index = divmod(communicator.rank, self.ranks_per_stage)
        self.replicas = self.ranks_per_stage // self.degree
        self.replica = self._replica_of(communicator.rank)
        communicator.open_world()  # for the norm of gradients: no group is made in a step
        self.sharing = _sharing(communicator, self.degree)
        communicator.open_fast_blocks([self.degree])

        # 2. what the cost model of the whole is to be made for, then this rank's stage of it
        whole = model if stage_of(model) is None else class_copy(model, dtype=model.dtype)
        self._cost_subject = CostSubject(whole, accelerator, communicator.topology)
        self._cost: CostModel | None = None  # found when training begins
        self._costs_of_run: PipelineCost | None = None  # made with the figures of its first step
        self.stage: Stage = stage_of(model) or cut(
            model, stage_index, stages, virtual=args.stages_per_rank
        )
        for number, virtual_stage in self.stage.virtual.items():
            first, last = virtual_stage.layers
            count = len(self.stage.spans)
            logger.info("stage %d of %d has layers %d to %d", number, count, first, last)

        # 3. the ranks before and after, and equal weights on all ranks with the same stage
        self.neighbours = Neighbours(
            communicator,
            _pipelines(stages, self.ranks_per_stage),
            ring=args.stages_per_rank > 1,
        )
        self.stage.stack.model.to(device)
        equalise(self.stage, self.neighbours)
        cast_dtype = _cast_dtype(model, accelerator)
        self.sharded = self._shard(cast_dtype) if fsdp else None
        # Hidden states have the dtype that the parameters have during a step.
        hidden_dtype = cast_dtype if self.sharded is not None else None
        self._hidden_bytes = (hidden_dtype or model.dtype).itemsize

        # raises, on all ranks alike, where a stage's state alone is too large
        self._is_mixed = cast_dtype is not None
        self.memory_limit = self._room(setup.costs.expected(self._cost_subject))

        self.member = StageMember(
            stage=self.stage,
            communicator=communicator,
            index=member_index,
            is_sharded=self.sharded is not None,
        )
        self._token_columns: list[str] = []  # that some stage needs of each token

        self._checkpointing = NonReentrant(self.stage.stack.model)
        self._pipeline: PipelineExecutor | None = None
        self._undone_by_detach = ExitStack()

    def _check_stages(self, args: FlexSeqArguments) -> None:
        """Accept stages, which this engine runs."""

    def _shard(self, cast_dtype: torch.dtype | None) -> ShardedStage | None:
        """Share the stage's parameters over its ranks (FSDP2); None where it has one rank."""
        replicas = self.neighbours.replicas
        if replicas is None:
            return None
        return ShardedStage(self.stage, replicas.process_group, param_dtype=cast_dtype)

    def _room(self, cost: CostModel) -> tuple[int, ...]:
        """Return the bytes that each rank of a pipeline has left besides its stage's state."""
        sharded_over = self.ranks_per_stage if self.sharded is not None else 1
        return room_bytes(cost, self.stage, sharded_over=sharded_over, mixed=self._is_mixed)

    # ---- the model

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the whole model; None before it is known."""
        return self._cost

    @property
    def is_attached(self) -> bool:
        """True between `attach` and `detach`, while the stage runs on chunks."""
        return self._pipeline is not None

    @property
    def whole_model(self) -> WholeModel:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "a loop of your own, and a loss that is computed from figures of whole sequences, do "
            "not run in pipeline stages: set pipeline_parallel_size=1"
        )

    def _attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Make the stage run on chunks; `lockstep` has no effect. Collective over the world.
        Raises ValueError for another model than the one that was cut."""
        base = self.stage.stack.model
        if model is not base:
            raise ValueError("the engine was made for another model")
        cpu_group = self.communicator.cpu_group
        kernel = self.setup.kernel_for(base, [self.degree])
        costs = self.setup.costs
        self._cost = corrected_cost(costs.find(self._cost_subject), costs.learned.newest)
        self._costs_of_run = None
        self.memory_limit = self._room(self._cost)
        with ExitStack() as attached:
            attached.enter_context(on_micro_batches(base, self.stage.own_layers))
            attached.callback(self._checkpointing.restore)
            chunked_loss = attach_chunked_loss(base) if self.stage.is_last else None
            if chunked_loss is not None:
                attached.callback(chunked_loss.detach)
            of_stages = cpu_group.gather_values(needed_columns(base))
            self._token_columns = sorted({name for names in of_stages for name in names})
            self._pipeline = PipelineExecutor(
                self.stage, self.neighbours, kernel, sharing=self.sharing
            )
            attached.callback(self._pipeline.detach)
            self._undone_by_detach = attached.pop_all()
        self._let_every_rank_draw()

    def _detach_model(self) -> None:
        """Undo `_attach`. The model stays cut."""
        self._undone_by_detach.close()
        self._pipeline = None

    # ---- planning

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""
        job = StagesJob(
            cost=self.stage_costs(), options=self._plan_options(), replicas=self.replicas
        )
        return start_planner(job, ahead=ahead)

    def _training_steps(self, lookahead: int, first_number: int) -> PrefetchedSteps:
        if self.args.shared_prefixes != OFF:
            logger.info("rows share no prefixes: the stages of a pipeline run chunks of rows")
        return self._prefetched(lookahead, first_number)

    def _prefetched(
        self, lookahead: int, first_number: int = 0, *, what: str = "step", **options: Any
    ) -> PrefetchedSteps:
        """Return steps planned by rank 0, which share no prefixes and teach nothing. Collective
        over the world."""
        config = self.stage.stack.model.config
        return PrefetchedSteps(
            self.communicator,
            self._started(partial(self.planner, ahead=lookahead > 0)),
            lookahead,
            dispatch=self.dispatch,
            check=check_step,
            read=StepPlan.from_record,
            first_number=first_number,
            what=what,
            images=reader_of_text(config, "the stages of a pipeline take text"),
        )

    def _plan_options(self) -> PipelineOptions:
        """Return the options of planning the steps of one replica."""
        args = self.args
        max_tokens = args.max_tokens_per_rank
        if max_tokens is not None:
            max_tokens *= self.degree  # so many ranks share a chunk
        return PipelineOptions(
            schedule=args.pipeline_schedule,
            max_tokens=max_tokens,
            memory_limit=self.memory_limit,
        )

    def stage_costs(self) -> PipelineCost:
        """Return the stages' current costs: activation checkpointing may begin with training."""
        assert self._cost is not None, "attach finds the cost model"
        model = self.stage.stack.model
        return pipeline_cost(
            self._cost,
            self.stage,
            token_bytes(model, hidden_bytes=self._hidden_bytes),
            checkpointed=is_checkpointed(model),
            degree=self.degree,
            topology=self.communicator.topology,
        )

    # ---- steps

    def dispatch(self, planned: PlannedStep) -> RankChunks:
        """Dispatch the drawn tokens to every rank of their replica. Collective over the world."""
        drawn = planned.drawn
        row = with_token_columns(drawn.row, self._token_columns)
        routes = chunk_routes(
            row, planned.plan, drawn.sources, self.communicator, self._replica_of
        )
        columns = routes.dispatch(row.columns)
        return RankChunks(planned, columns, replica=self.replica, device=self.accelerator.device)

    def _replica_of(self, rank: int) -> int:
        """Return the replica that a rank of the world works on."""
        return rank % self.ranks_per_stage // self.degree

    def run(self, step: RankChunks, model: nn.Module, *, is_last: bool) -> None:
        """Run the actions of a training step: neither a micro-batch nor a wrapped model is run.
        Afterwards gradients cover the whole step. Collective over the world.

        The loss of the step is multiplied by the number of ranks on the last stage, and 0 on the
        others: the mean over ranks, which the Trainer logs, is the mean over the step's target
        tokens.

        model: as accelerate has wrapped it. is_last: True for the last step.
        """
        self._begin(step)
        self._checkpointing.replace()
        with step.stopwatch.timing(0):
            with self.sharded.training() if self.sharded is not None else nullcontext():
                self._add_loss(step, self._attached_pipeline.train)
            reduce_gradients(self.stage, self.neighbours)
        self._end(step, model, is_last=is_last)

    def evaluate(self, step: RankChunks) -> None:
        """Run the forward actions of a step; its loss is scaled as in `run`. Collective over the
        world."""
        with self.sharded.whole() if self.sharded is not None else nullcontext():
            self._add_loss(step, self._attached_pipeline.evaluate)

    @property
    def _attached_pipeline(self) -> PipelineExecutor:
        assert self._pipeline is not None, "a drawn step has an attached stage"
        return self._pipeline

    def _add_loss(self, step: RankChunks, run: Callable[..., torch.Tensor]) -> None:
        loss = run(step.own_plan, step.columns, max(step.targets, 1), self.accelerator.autocast)
        step.add(loss * self.communicator.world_size)

    def figures_of(self, step: Step, trace: PlanTrace) -> LogFigures:
        """Write a step's trace, a line per replica; return figures. Collective over the world."""
        assert self._cost is not None, "attach finds the cost model"
        if self._costs_of_run is None:
            self._costs_of_run = self.stage_costs()
        assert isinstance(step, RankChunks), "a stage runs chunks"
        return traced(step, trace, self._costs_of_run, self._cost)


def _cast_dtype(model: PreTrainedModel, accelerator: Accelerator) -> torch.dtype | None:
    """Return the 16-bit dtype to which float32 weights are cast in a step; None if uncast."""
    return autocast_dtype(accelerator) if model.dtype == torch.float32 else None


def _sharing(communicator: Communicator, degree: int) -> Sharing | None:
    """Return the ranks that share this rank's chunks; None where it is alone."""
    if degree == 1:
        return None
    index = communicator.rank % degree
    first = communicator.rank - index
    return Sharing(communicator, tuple(range(first, first + degree)), index)


def _ranks_per_stage(stages: int, degree: int, world_size: int) -> int:
    """Return how many ranks have the same stage. Raises ValueError where the number of stages does
    not divide the world size, or `degree` does not divide the ranks per stage."""
    check_divides(stages, world_size)
    ranks_per_stage = world_size // stages
    if ranks_per_stage % degree:
        raise ValueError(
            f"sp_degree={degree} does not divide the {ranks_per_stage} ranks of a stage"
        )
    return ranks_per_stage


def _pipelines(stages: int, ranks_per_stage: int) -> list[list[int]]:
    """Return the ranks of each pipeline, by stage."""
    pipelines = []
    for index in range(ranks_per_stage):
        ranks = [stage * ranks_per_stage + index for stage in range(stages)]
        pipelines.append(ranks)
    return pipelines


def token_bytes(model: PreTrainedModel, *, hidden_bytes: int) -> StageTokenBytes:
    """Return the bytes of one token. hidden_bytes: of one number of the hidden states."""
    shape = model_shape(model)
    query = shape.heads * shape.head_dim
    key_value = 2 * shape.kv_heads * shape.head_dim
    # what the weights of one layer are multiplied with: q, k, v; gate, up; o; down
    inputs = shape.hidden + shape.hidden + query + shape.intermediate
    # and the gradients of what comes out: q; k, v; gate, up; o, down
    gradients = query + key_value + 2 * shape.intermediate + 2 * shape.hidden
    return StageTokenBytes(
        hidden=shape.hidden * hidden_bytes,
        # norms compute in float32
        head=shape.hidden * (max(hidden_bytes, FLOAT32_BYTES) + 3 * hidden_bytes),
        kv=key_value * shape.dtype_bytes * shape.attention_count // shape.layers,
        owed=(inputs + gradients) * shape.dtype_bytes,
    )
