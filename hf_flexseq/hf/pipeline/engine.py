"""The engine of a run whose model is cut into pipeline stages.

It differs from `FlexSeqEngine` in three things: the model is cut, and sharded, when the engine is
made, so that the optimizer sees the parameters of the stage alone; a step's plan has chunks and
actions instead of micro-batches; and gradients are summed here, over replicas and over the two
copies of a tied tensor, where otherwise accelerate does it.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import PIPELINE_NAME
from hf_flexseq.hf.calibration.choose import cost_model_for
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.model.facts import is_checkpointed, model_shape
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.pipeline.checks import check_divides
from hf_flexseq.hf.pipeline.loading import stage_of
from hf_flexseq.pipeline.cost import StageTokenBytes, pipeline_cost, room_bytes
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.reduction import equalise, sum_gradients
from hf_flexseq.pipeline.sharding import ShardedStage
from hf_flexseq.pipeline.stages import Stage, cut
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.planner.pipeline.replicas import make_step_plan
from hf_flexseq.planner.process.pipeline_worker import PipelineWorker
from hf_flexseq.schedule.pipeline.check import check_step
from hf_flexseq.steps.lookahead import DrawnStep, InlinePlanner, Lookahead, Planner
from hf_flexseq.steps.pipeline_step import ChunkExchange, PipelineStep
from hf_flexseq.steps.trace import PREFIX

logger = logging.getLogger(__name__)


class PipelineEngine(FlexSeqEngine):
    """Plans and runs optimizer steps of a model in `args.pipeline_parallel_size` stages."""

    _cuts_models = True

    def __init__(
        self,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        model: PreTrainedModel,
        *,
        fsdp: bool = False,
    ) -> None:
        """Cuts `model` in place, unless it was loaded as a stage. Collective over the world.

        fsdp: whether the ranks of a stage share its parameters (FSDP2); of no effect where a stage
        has one rank. Raises ValueError for a number of stages that does not divide the ranks or
        exceeds layers + 1, NotImplementedError for a model without a plain decoder stack.
        """
        super().__init__(accelerator, args)
        world, stages = self.communicator.world_size, args.pipeline_parallel_size
        check_divides(stages, world)
        of_stage, degree = world // stages, args.sp_degree or 1
        if of_stage % degree:
            raise ValueError(f"sp_degree={degree} does not divide the {of_stage} ranks of a stage")
        self.of_stage = of_stage
        self.place = self.communicator.rank % of_stage  # among the ranks with the same stage
        self.degree, self.replicas, self.replica = degree, of_stage // degree, self.place // degree
        self.sharing = self._sharing(degree) if degree > 1 else None
        whole = model if stage_of(model) is None else _empty_twin(model)
        self.cost = self._named_cost or cost_model_for(
            args.cost_model, whole, accelerator, self.communicator
        )
        virtual = args.pipeline_virtual_stages
        self.stage: Stage = stage_of(model) or cut(
            model, self.communicator.rank // of_stage, stages, virtual=virtual
        )
        for number, one in self.stage.virtual.items():
            logger.info(
                "stage %d of %d has layers %d to %d", number, stages * virtual, *one.layers
            )
        pipelines = [[s * of_stage + place for s in range(stages)] for place in range(of_stage)]
        self.neighbours = Neighbours(self.communicator, pipelines, ring=virtual > 1)
        self.stage.stack.model.to(accelerator.device)
        equalise(self.stage, self.neighbours)
        self.sharded: ShardedStage | None = None
        if fsdp and self.neighbours.replicas is not None:
            self.sharded = ShardedStage(self.stage, self.neighbours.replicas)
        self._exchange = ChunkExchange(self.communicator, of_stage, degree)
        self._executor: PipelineExecutor | None = None

    def _sharing(self, degree: int) -> Sharing:
        start, index = divmod(self.communicator.rank, degree)
        return Sharing(
            self.communicator, tuple(range(start * degree, (start + 1) * degree)), index
        )

    # ---- the model

    def attach(self, model: nn.Module, *, lockstep: bool = False) -> None:
        """Make the stage run on chunks. Undone by `detach`."""
        base = self.stage.stack.model
        assert model is base, "the engine was made for another model"
        self.model = base
        self._former_attention = base.config._attn_implementation
        base.set_attn_implementation(PIPELINE_NAME)
        self._chunked_loss = attach_chunked_loss(base) if self.stage.is_last else None
        self._executor = PipelineExecutor(
            self.stage, self.neighbours, self._chosen_kernel(), sharing=self.sharing
        )

    def detach(self) -> None:
        """Give the stage its own attention, loss and layers back."""
        if self._executor is not None:
            self._executor.detach()
            self._executor = None
        super().detach()

    # ---- steps

    def _lookahead(self, steps: int) -> Lookahead:
        planner = self.make_planner(ahead=steps > 0) if self.communicator.rank == 0 else None
        return Lookahead(
            self.communicator, planner, steps, check=check_step, read=StepPlan.from_record
        )

    def make_planner(self, *, ahead: bool) -> Planner:
        """The planner of rank 0: in a process of its own when steps are planned ahead of the one
        that runs."""
        args = self.args
        return (PipelineWorker if ahead else InlinePipelinePlanner)(
            self._stage_costs(),
            replicas=self.replicas,
            schedule=args.pipeline_schedule,
            stages_per_rank=args.pipeline_virtual_stages,
            chunks=args.pipeline_chunks,
            max_tokens=None
            if args.max_tokens_per_rank is None
            else args.max_tokens_per_rank * self.degree,
            room=room_bytes(
                self.cost,
                self.stage,
                sharded_over=self.of_stage if self.sharded is not None else 1,
            ),
        )

    def _stage_costs(self) -> PipelineCost:
        """Of the stages as they are now: activation checkpointing may begin with training."""
        assert self.cost is not None, "the engine has no cost model"
        model = self.stage.stack.model
        return pipeline_cost(
            self.cost,
            self.stage,
            token_bytes(model),
            checkpointed=is_checkpointed(model),
            degree=self.degree,
        )

    def _deal(self, drawn: DrawnStep, plan: StepPlan, *, waited_s: float) -> PipelineStep:
        columns = self._exchange(drawn.row, plan, drawn.sources, plan.chunks(self.replica))
        return PipelineStep(
            number=drawn.number,
            plan=plan,
            replica=self.replica,
            row=drawn.row,
            columns=columns,
            targets=drawn.targets,
            waited_s=waited_s,
            device=self.accelerator.device,
        )

    # ---- running

    def train(self, step: PipelineStep) -> torch.Tensor:
        """Forwards and backwards of one step; afterwards gradients are those of the whole step.
        Returns this rank's share of the loss: the mean over ranks is the mean over the step's
        target tokens."""
        assert self._executor is not None, "attach the model before running steps"
        with step.stopwatch.timing(0):
            with self.sharded.training() if self.sharded is not None else nullcontext():
                loss = self._executor.train(
                    step.own_plan, step.columns, max(step.targets, 1), self.accelerator.autocast
                )
            sum_gradients(self.stage, self.neighbours)
        return loss * self.communicator.world_size

    def evaluate(self, step: PipelineStep) -> torch.Tensor:
        """The same without gradients."""
        assert self._executor is not None, "attach the model before running steps"
        with self.sharded.whole() if self.sharded is not None else nullcontext():
            loss = self._executor.evaluate(
                step.own_plan, step.columns, max(step.targets, 1), self.accelerator.autocast
            )
        return loss * self.communicator.world_size

    def finish(self, step: PipelineStep) -> dict[str, float]:
        """Write the plan trace, a line for each replica, and return the figures of the log.
        Collective."""
        measured = max(gather_objects(self.communicator, step.stopwatch.seconds().get(0, 0.0)))
        figures = {
            "stages": len(self.stage.spans),
            "chunks": max(len(plan.chunks) for plan in step.plan.plans),
            "predicted_s": max(plan.objective_s for plan in step.plan.plans),
            "measured_s": measured,
            "planning_ms_exposed": 1e3 * step.waited_s,
            "tokens_per_s": step.tokens / measured if measured else 0.0,
        }
        line = {
            "step": step.number,
            "measured_s": [measured],
            "pipeline_cost": self._stage_costs().to_record(),
        }
        for replica, (members, plan) in enumerate(
            zip(step.plan.members, step.plan.plans, strict=True)
        ):
            self._trace.append(line | {"replica": replica, "sequences": members}, plan)
        return {PREFIX + name: float(value) for name, value in figures.items()}


def _empty_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The whole model that `model` is a stage of, without memory."""
    with torch.device("meta"):
        return type(model)(model.config).to(model.dtype)


class InlinePipelinePlanner(InlinePlanner):
    """Plans pipelined steps in this process."""

    def _planner(self, cost: PipelineCost, **options: Any) -> Callable[[list[int]], StepPlan]:
        return partial(make_step_plan, cost=cost, **options)


def token_bytes(model: PreTrainedModel) -> StageTokenBytes:
    """Bytes of one token, from the model's configuration."""
    shape = model_shape(model)
    query, key_value = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    # of q, k and v; of gate and up; of o; of down
    inputs = 2 * shape.hidden + query + shape.intermediate
    gradients = query + key_value + 2 * shape.intermediate + 2 * shape.hidden
    return StageTokenBytes(
        hidden=shape.hidden * shape.dtype_bytes,
        kv=key_value * shape.dtype_bytes,
        owed=(inputs + gradients) * shape.dtype_bytes,
    )
