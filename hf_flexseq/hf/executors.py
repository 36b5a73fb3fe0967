"""What an engine's steps are executed by, which depends on how much of the model a rank has.

    WholeModelExecutor    all of it: a plan is micro-batches of groups (here)
    StageExecutor         one stage of a pipeline: a plan is chunks and actions
                          (`pipeline/executor.py`)

`FlexSeqEngine` does everything that is alike: it draws, plans ahead, traces. It asks its
`Executor` for the rest, and never which of the two it has.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.deterministic import slowdown
from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.forward import forward_only
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.connect import connect
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.calibration.source import CostSource, named_cost
from hf_flexseq.hf.model.buckets import early_buckets
from hf_flexseq.hf.model.checks import check_deterministic, check_model
from hf_flexseq.hf.model.facts import (
    AttentionShape,
    attention_shape,
    compute_dtype,
    is_fully_sharded,
    layer_calls,
)
from hf_flexseq.hf.model.images import check_text_alone
from hf_flexseq.hf.model.loss import ChunkedLoss, attach_chunked_loss
from hf_flexseq.hf.model.positions import AttachedPositions, attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import RecurrentFunctions, attach_recurrent
from hf_flexseq.hf.model.router import RouterLoss, asks_for_router_loss
from hf_flexseq.hf.sharding import BeforeLast, SteppedFsdp, fsdp_figures, reduces_each_batch
from hf_flexseq.hf.trainer_checks import resolve_sync
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.plan import Plan
from hf_flexseq.plan import check as check_plan
from hf_flexseq.plan.rows import shards_of
from hf_flexseq.plan.shard import Shard
from hf_flexseq.planner.blocks import exchange_degrees
from hf_flexseq.planner.process.client import InlinePlanner, Planner, PlannerWorker
from hf_flexseq.planner.process.jobs import GroupsJob, Job
from hf_flexseq.program.blocks import BLOCK
from hf_flexseq.schedule.routing import NicFigures, links_of
from hf_flexseq.steps.exchange import Columns, RowExchange, SourceRow
from hf_flexseq.steps.inputs import Inputs, indices_to_run, inputs_of, model_inputs
from hf_flexseq.steps.lookahead import DrawnStep
from hf_flexseq.steps.passes import Objective, PassStep
from hf_flexseq.steps.reduction import reduced_once
from hf_flexseq.steps.step import OptimizerStep
from hf_flexseq.steps.token_columns import with_token_columns
from hf_flexseq.steps.trace import Figures, PlanTrace

logger = logging.getLogger(__name__)

ForwardBackward = Callable[[Inputs], torch.Tensor]  # one micro-batch -> its loss, a scalar


# ---- what an executor is


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """Holds all that an engine has before it has seen a model; its executor is made from it."""

    accelerator: Accelerator
    args: FlexSeqArguments
    communicator: Communicator

    costs: CostSource
    """Where the cost model comes from."""

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        communicator: Communicator | None,
        *,
        timeout: timedelta | None = None,
    ) -> "EngineSetup":
        """Connect the ranks, unless `communicator` does already, and load the named cost model.
        Collective over the world.

        timeout: of every exchange; None takes that of the job's group. Raises ValueError, on all
        ranks, for a cost model that does not exist on rank 0's machine, and where the ranks cannot
        be connected.
        """
        if communicator is None:
            communicator = Communicator(transport=connect(accelerator.device, timeout=timeout))
        return cls(
            accelerator=accelerator,
            args=args,
            communicator=communicator,
            costs=CostSource(
                args.cost_model,
                named_cost(args.cost_model, communicator),
                accelerator,
                communicator,
            ),
        )


class TrainerHooks(Protocol):
    """Does what a Trainer has to do differently when a rank has but a part of the model;
    `FlexSeqMixin` calls each method in place of the Trainer's own."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as the Trainer is to run it."""

    def set_training_mode(self, model: nn.Module, optimizer: Any) -> None:
        """Do what the Trainer does to model and optimizer before a step."""

    def floating_point_ops(self, step: Any) -> int:
        """Return the operations of this rank in one step; 0 for no step."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale gradients down to a norm of `max_norm` over the whole model; return the former
        norm."""

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradients."""

    def save(self, trainer: Any, folder: str) -> None:
        """Write the weights, and what the Trainer saves beside them."""

    def load(self, folder: str) -> None:
        """Read the weights."""

    def save_optimizer(self, trainer: Any, folder: str) -> None:
        """Write the state of optimizer and scheduler."""

    def load_optimizer(self, trainer: Any, folder: str | None) -> None:
        """Read the state of optimizer and scheduler, where `folder` has one."""


class Executor(Protocol):
    """Runs the steps of one model.

    In the order of calls: `attach`; `planner`; then for each step `check` (on rank 0), `read`,
    `deal`, `train` or `evaluate`, `figures`; at last `detach`.
    """

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the whole model; None before it is known."""

    @property
    def attached(self) -> bool:
        """True between `attach` and `detach`."""

    @property
    def trainer_hooks(self) -> TrainerHooks | None:
        """The hooks of a Trainer that has to do some things differently; None for nothing."""

    @property
    def router(self) -> RouterLoss | None:
        """The router loss of the attached model; None for none."""

    def attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Make `model` run on planned steps. Collective over the world.

        lockstep: whether something outside makes all ranks run every micro-batch together.
        """

    def detach(self) -> None:
        """Leave the model and the accelerator as `attach` found them."""

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""

    def check(self, plan: Any) -> None:
        """Raise ValueError for a plan that would compute something wrong or hang."""

    def read(self, data: bytes) -> Any:
        """Return the plan whose `to_bytes` gave `data`."""

    def deal(self, drawn: DrawnStep, plan: Any, *, waited_s: float) -> Any:
        """Bring the drawn tokens to where the plan wants them, and return the step that this rank
        runs. Collective over the world."""

    def train(
        self, step: Any, forward_backward: ForwardBackward, model: nn.Module
    ) -> torch.Tensor:
        """Run forwards and backwards of one step, and reduce gradients.

        forward_backward: runs a micro-batch of a whole model. model: as accelerate has wrapped it.
        Returns this rank's loss, a scalar; the mean over ranks is the mean over target tokens.
        """

    def evaluate(self, step: Any, forward: ForwardBackward, model: nn.Module) -> torch.Tensor:
        """Run the forwards of one step. Returns a loss as `train` does."""

    def figures(self, step: Any, trace: PlanTrace) -> Figures:
        """Write the trace of a finished step and return its figures for the log. Collective over
        the world."""


# ---- the executor of a whole model


class WholeModelExecutor:
    """Runs micro-batches of groups on a model that every rank has, or of which accelerate gives it
    what it needs (FSDP, ZeRO)."""

    trainer_hooks: TrainerHooks | None = None

    def __init__(self, setup: EngineSetup) -> None:
        """Raises NotImplementedError for pipeline stages, which a Trainer alone can run."""
        stages = setup.args.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size={stages} in a loop of your own: use FlexSeqTrainer, or 1"
            )
        self.setup = setup
        self.cost: CostModel | None = None
        self.lockstep = False
        self.kernel: Kernel | None = None  # chosen with the first step
        self._exchange = RowExchange(setup.communicator)
        self._links: NicFigures | None = None  # None: transfers go straight
        self._former_programs: MicroBatchPrograms | None = None  # of the last context
        self.fsdp: SteppedFsdp | None = None  # made with the cost model
        self._token_columns: tuple[str, ...] = ()  # that the model needs of each token

        # what `detach` gives back
        self._model: PreTrainedModel | None = None
        self._chunked_loss: ChunkedLoss | None = None
        self._positions: AttachedPositions | None = None
        self._recurrent: RecurrentFunctions | None = None
        self.router: RouterLoss | None = None  # of a model that asks for one
        self._former_attention: str | None = None
        self._former_ddp: DistributedDataParallelKwargs | None = None

    @property
    def attached(self) -> bool:
        """True between `attach` and `detach`."""
        return self._model is not None

    # ---- the model

    def attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Give `model` our attention, recurrent layers, loss and positions, and DDP buckets that
        are reduced early.

        Raises NotImplementedError when the model cannot be trained exactly, and ValueError when
        its state alone is too large. Collective over the world.
        """
        args = self.setup.args
        accelerator = self.setup.accelerator
        communicator = self.setup.communicator

        # 1. what the model needs of the ranks, and what it costs
        base = base_model(model)
        check_model(base)
        if self.setup.args.deterministic:
            check_deterministic(base)
        is_ordered = communicator.transport.capabilities.ordered
        self.lockstep = resolve_sync(
            args, base, accelerator, lockstep=lockstep, is_ordered=is_ordered
        )
        if is_ordered and not self.lockstep:
            communicator.open_world()  # for gradients: no group is made in a step
        costs = self.setup.costs
        cost = costs.find(costs.subject(base, attention_remat=args.attention_remat))
        self.cost = cost
        cost.strategies(args.strategy)  # raises for one that it has no figures for
        self._open_blocks(cost)
        self._links = self._links_of(cost)
        if args.max_tokens_per_rank is None:
            cost.max_tokens_per_rank(communicator.world_size)  # raises where nothing is left
        self.fsdp = SteppedFsdp(
            fsdp_figures(base, accelerator, communicator, self.cost),
            communicator,
            over_replicas=reduces_each_batch(accelerator),
        )

        # 2. what `detach` undoes
        self._former_ddp = accelerator.ddp_handler
        self._former_attention = base.config._attn_implementation
        accelerator.ddp_handler = early_buckets(accelerator.ddp_handler, model)
        base.set_attn_implementation(NAME)
        self._chunked_loss = attach_chunked_loss(model)
        self._positions = attach_positions(base)
        self._recurrent = attach_recurrent(base)
        self.router = RouterLoss(model, base) if asks_for_router_loss(base) else None
        self._token_columns = needed_columns(base)
        self._model = base

    def detach(self) -> None:
        """Give the model its own attention and loss back, and accelerate its DDP handler."""
        if self._model is None:
            return
        self._model.set_attn_implementation(self._former_attention)
        self.setup.accelerator.ddp_handler = self._former_ddp
        if self._chunked_loss is not None:
            self._chunked_loss.detach()
        if self._positions is not None:
            self._positions.detach()
        if self._recurrent is not None:
            self._recurrent.detach()
        if self.router is not None:
            self.router.detach()
        self._model = None
        self._chunked_loss = None
        self._positions = None
        self._recurrent = None
        self.router = None
        self._former_programs = None
        if self.fsdp is not None:
            self.fsdp.forget_model()

    def _open_blocks(self, cost: CostModel) -> None:
        """Make the groups of ranks that may exchange heads, where a collective is faster than
        messages. Collective."""
        args = self.setup.args
        communicator = self.setup.communicator
        degrees = exchange_degrees(
            cost, communicator.topology, strategy=args.strategy, sp_degree=args.sp_degree
        )
        communicator.open_fast_blocks(degrees)

    def _links_of(self, cost: CostModel) -> NicFigures | None:
        """Return the NICs over which transfers may be routed; None for no routing."""
        topology = self.setup.communicator.topology
        if self.setup.args.routing == "off" or topology.nodes == 1:
            return None
        return links_of(cost, topology)

    # ---- planning

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""
        return self._planner_by(self._known_cost(), ahead=ahead)

    def forward_planner(self) -> Planner:
        """Make the planner of rank 0 for passes that have no backward, in place."""
        return self._planner_by(forward_only(self._known_cost()), ahead=False)

    def _known_cost(self) -> CostModel:
        assert self.cost is not None, "attach sets the cost model"
        return self.cost

    def _planner_by(self, cost: CostModel, *, ahead: bool) -> Planner:
        assert self.fsdp is not None, "attach sets FSDP2's figures"
        job = GroupsJob(
            topology=self.setup.communicator.topology,
            cost=cost,
            options=self._options(),
            routing=self._routed_bytes(),
            fsdp=self.fsdp.figures,
        )
        return planner_of(job, ahead=ahead)

    def _options(self) -> dict[str, Any]:
        """Return the keyword arguments of `make_plan`, as JSON values."""
        args = self.setup.args
        return {
            "planner": args.planner,
            "strategy": args.strategy,
            "sp_degree": args.sp_degree,
            "max_tokens_per_rank": args.max_tokens_per_rank,
            "sync": "lockstep" if self.lockstep else "free",
            "remap": args.remap,
        }

    def _routed_bytes(self) -> dict[str, int] | None:
        """Return the bytes of a token in one layer, for the plan's note on routing; None where
        nothing could be routed."""
        args = self.setup.args
        # deterministic groups gather: there are no rings
        if args.routing == "off" or args.deterministic or self.setup.communicator.world_size == 1:
            return None
        shape = self._shape()
        head_bytes = shape.head_dim * self._compute_dtype().itemsize
        return {"queries": shape.query_heads * head_bytes, "keys": 2 * shape.kv_heads * head_bytes}

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a plan that would compute something wrong or hang."""
        check_plan(plan, self.setup.communicator.topology, self.setup.args.max_tokens_per_rank)

    def read(self, data: bytes) -> Plan:
        """Return the plan whose `to_bytes` gave `data`."""
        return Plan.from_bytes(data)

    # ---- steps

    def deal(self, drawn: DrawnStep, plan: Plan, *, waited_s: float) -> OptimizerStep | PassStep:
        """Bring the drawn tokens to the ranks that the plan names. Collective over the world. A
        step with a router loss runs several times."""
        if self.router is not None:
            return self.deal_passes(drawn, plan, waited_s=waited_s)
        device = self.setup.accelerator.device

        # 1. what this rank holds in each micro-batch, and its tokens outside of attention
        shards, row = self._held(drawn, plan)
        columns = self._exchange(row, plan, drawn.sources, shards)

        # 2. what the model is called with; beyond the first micro-batch it is made while they run
        indices = indices_to_run(shards, lockstep=self.lockstep)
        inputs = model_inputs(
            shards,
            columns,
            lockstep=self.lockstep,
            device=device,
            make_context=self._make_context,
        )
        return OptimizerStep(drawn, plan, indices, inputs, waited_s=waited_s, device=device)

    def deal_passes(self, drawn: DrawnStep, plan: Plan, *, waited_s: float) -> PassStep:
        """Bring the drawn tokens to the ranks that the plan names, for a step that runs several
        times. Collective over the world."""
        device = self.setup.accelerator.device
        shards, row = self._held(drawn, plan)
        routes = self._exchange.routes(row, plan, drawn.sources, shards)
        columns = self._exchange.deal(row.columns, routes)

        def inputs(index: int) -> Inputs:
            return inputs_of(shards[index], columns[index], device, self._make_context)

        return PassStep(
            drawn,
            plan,
            indices=indices_to_run(shards, lockstep=self.lockstep),
            counts=[shard.linear_tokens for shard in shards],
            inputs_of=inputs,
            exchange=self._exchange,
            routes=routes,
            waited_s=waited_s,
            device=device,
        )

    def _held(self, drawn: DrawnStep, plan: Plan) -> tuple[list[Shard], SourceRow]:
        """Return what this rank holds in each micro-batch of a plan, and what it has drawn, with
        all columns that the model needs; choose the kernel with the first step. Collective over
        the world."""
        communicator = self.setup.communicator
        assert self._model is not None, "attach sets the model"
        check_text_alone(self._model.config, drawn.row.columns, communicator)
        if self.kernel is None:
            self.kernel = self._choose_kernel(max(plan.lengths))
        shards = shards_of(plan, communicator.rank, communicator.topology)
        return shards, with_token_columns(drawn.row, self._token_columns)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Give the attached model its own attention back inside the block, to generate with."""
        assert self._model is not None, "attach sets the model"
        self._model.set_attn_implementation(self._former_attention)
        try:
            yield
        finally:
            self._model.set_attn_implementation(NAME)

    @contextmanager
    def planned_attention(self) -> Iterator[None]:
        """Give the attached model our attention inside the block, also where `own_attention` has
        taken it away."""
        assert self._model is not None, "attach sets the model"
        former = self._model.config._attn_implementation
        if former == NAME:
            yield
            return
        self._model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self._model.set_attn_implementation(former)

    def _make_context(self, shard: Shard) -> SequenceContext:
        """Return what attention is told about one shard, with the programs that the layers of the
        micro-batch before have asked for."""
        assert self.kernel is not None, "deal chooses the kernel first"
        context = self._context(shard, self.kernel, self._former_programs)
        self._former_programs = context.programs
        return context

    def _context(
        self, shard: Shard, kernel: Kernel, former: MicroBatchPrograms | None
    ) -> SequenceContext:
        """Return the context of a shard for the layers of one model.

        former: the programs of that model's context before; None for none.
        """
        args = self.setup.args
        context = SequenceContext(
            shard,
            self.setup.communicator,
            kernel,
            self.setup.accelerator.device,
            attention_remat=args.attention_remat,
            deterministic=args.deterministic,
            links=self._links,
        )
        if former is not None:
            context.programs.prepare(former.keys)
        return context

    def beside(self, model: PreTrainedModel) -> Callable[[Shard], SequenceContext]:
        """Return what makes the contexts of another model, which runs on the micro-batches of the
        attached one, with kernels for its own layers. From now on the columns that it needs of
        each token are dealt, too. Collective over the world.

        Raises ValueError where no kernel serves its layers, and for a model whose shards all ranks
        have to gather together, unless they run in lockstep.
        """
        name = type(model).__name__
        if is_fully_sharded(model, self.setup.accelerator) and not self.lockstep:
            raise ValueError(
                f"{name} is sharded, and its ranks have to run every micro-batch together: set "
                "sync='lockstep'"
            )
        with Attempt() as choosing:
            if self.setup.args.deterministic:
                check_deterministic(model)
            kernel = self._kernel_of(model)
        host = self.setup.communicator.host
        choosing.raise_together(host.gather_values, f"choosing the attention kernel of {name}")
        columns = (*self._token_columns, *needed_columns(model))
        self._token_columns = tuple(dict.fromkeys(columns))  # each once
        former: MicroBatchPrograms | None = None

        def context_of(shard: Shard) -> SequenceContext:
            nonlocal former
            context = self._context(shard, kernel, former)
            former = context.programs
            return context

        return context_of

    def train(
        self,
        step: OptimizerStep | PassStep,
        forward_backward: ForwardBackward,
        model: nn.Module,
    ) -> torch.Tensor:
        """Run forward and backward of every micro-batch and return the sum of the losses, a
        detached scalar; see `train_passes` for a loss that is computed at home.

        DDP reduces gradients with the last micro-batch, or after it (`_reducing`); ZeRO reduces
        with each, and FSDP2 as memory allows.
        """
        with self._of_step(step.plan, model) as before_last:
            if isinstance(step, PassStep):
                router = self._router_of_step(model)
                loss = step.run_after_totals(router, forward_backward, before_last)
            else:
                loss = step.run(forward_backward, before_last)
            return loss.detach()

    def train_passes(
        self,
        step: PassStep,
        objective: Objective,
        model: nn.Module,
        weights: Columns | None = None,
    ) -> torch.Tensor:
        """Run both passes of every micro-batch around the loss that `objective` computes, and
        return that of this rank, a detached scalar. Gradients are reduced as `train` does.

        weights: the gradients of the loss, where they are known before it: then one pass does.
        """
        with self._of_step(step.plan, model) as before_last:
            if weights is not None:
                return step.run_once(objective, weights, before_last)
            return step.run(objective, before_last)

    @contextmanager
    def _of_step(
        self, plan: Plan, model: nn.Module
    ) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        """Surround a step; the block gets what surrounds each micro-batch but the last."""
        assert self.fsdp is not None, "attach sets FSDP2's figures"
        with self._reducing(model), self.fsdp.of_step(plan, model) as fsdp_before_last:
            yield partial(self._accumulating, model, fsdp_before_last)

    def _reducing(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Surround all micro-batches of a step by what reduces gradients in place of DDP, where
        ranks run different micro-batches and transfers are carried out in order."""
        communicator = self.setup.communicator
        if self.lockstep or not communicator.transport.capabilities.ordered:
            return nullcontext()
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return reduced_once(model, communicator)

    def evaluate(
        self, step: OptimizerStep | PassStep, forward: ForwardBackward, model: nn.Module
    ) -> torch.Tensor:
        """Run the forward of every micro-batch and return the sum of the losses, a detached
        scalar."""
        if isinstance(step, PassStep):
            return step.run_after_totals(self._router_of_step(model), forward).detach()
        return step.run(forward).detach()

    def _router_of_step(self, model: nn.Module) -> RouterLoss:
        assert self.router is not None, "deal has seen a router loss"
        return self.router.of_step(model)

    @contextmanager
    def _accumulating(self, model: nn.Module, fsdp_before_last: BeforeLast) -> Iterator[None]:
        """Surround a micro-batch that is not the step's last."""
        state = self.setup.accelerator.gradient_state
        syncs = state.sync_gradients
        state._set_sync_gradients(False)  # DeepSpeed would step its optimizer otherwise
        try:
            with self._without_reduction(model), fsdp_before_last():
                yield
        finally:
            state._set_sync_gradients(syncs)

    def _without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which DDP keeps gradients local until its last micro-batch.

        DeepSpeed and FSDP1 reduce into their shards each time: waiting would hold the whole
        model's gradients on every rank. FSDP2 has policies of its own (`hf/sharding.py`).
        """
        accelerator = self.setup.accelerator
        each = reduces_each_batch(accelerator)
        if each or not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[Any] = accelerator.no_sync(model)
        return context

    def figures(self, step: OptimizerStep | PassStep, trace: PlanTrace) -> Figures:
        """Write the trace of a finished step and return its figures for the log. Collective over
        the world."""
        assert self.cost is not None, "attach sets the cost model"
        return trace.record(step, self.cost)

    # ---- the kernel

    def _choose_kernel(self, longest: int) -> Kernel:
        """Return the kernel of all steps. Collective over the world: a machine may lack what the
        others have.

        longest: tokens of the longest sequence of the first step.
        """
        args = self.setup.args
        communicator = self.setup.communicator
        assert self._model is not None, "attach sets the model"
        with Attempt() as choosing:
            kernel = self._kernel_of(self._model)
            if args.deterministic and communicator.rank == 0:
                self._log_slowdown(kernel, longest)
        choosing.raise_together(communicator.host.gather_values, "choosing the attention kernel")
        return kernel

    def _kernel_of(self, model: PreTrainedModel) -> Kernel:
        """Return a kernel for all layers of a model. Raises ValueError where there is none."""
        return choose_kernels(
            self.setup.accelerator.device,
            compute_dtype(model, self.setup.accelerator),
            layer_calls(model.config),
            repeatable_keys=BLOCK if self.setup.args.deterministic else 0,
        )

    def _log_slowdown(self, kernel: Kernel, longest: int) -> None:
        """Measure on rank 0 how much longer deterministic attention takes, and log it. The other
        ranks wait for it about a second, once.

        longest: tokens of the longest sequence of the first step.
        """
        shape = self._shape()
        like = {"dtype": self._compute_dtype(), "device": self.setup.accelerator.device}
        q = torch.ones(1, shape.query_heads, shape.head_dim, **like)  # one token
        k = torch.ones(1, shape.kv_heads, shape.head_dim, **like)
        found = slowdown(longest, q, k, self.setup.communicator, kernel)
        logger.warning(
            "deterministic=True: attention of %s tokens on one rank takes %.1f times as long as "
            "otherwise (the longest sequence of the first step has %s); where ranks share a "
            "sequence its backward computes up to twice as much, and its keys are gathered",
            f"{found.tokens:,}",
            found.factor,
            f"{longest:,}",
        )

    def _shape(self) -> AttentionShape:
        return attention_shape(self._config().get_text_config())

    def _config(self) -> PreTrainedConfig:
        assert self._model is not None, "attach sets the model"
        return self._model.config

    def _compute_dtype(self) -> torch.dtype:
        assert self._model is not None, "attach sets the model"
        return compute_dtype(self._model, self.setup.accelerator)


# ---- what both executors use


def planner_of(job: Job, *, ahead: bool) -> Planner:
    """Return a planner for `job`: in a process of its own when steps are planned ahead of the one
    that runs, in this process otherwise."""
    if ahead:
        return PlannerWorker(job)
    return InlinePlanner(job)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model under PEFT's wrapper, if there is one.

    Raises ValueError for a model that accelerate has wrapped, NotImplementedError for one that is
    not transformers'.
    """
    is_wrapped = isinstance(getattr(model, "module", None), nn.Module)
    if is_wrapped and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach the model before accelerator.prepare wraps it in {type(model).__name__}"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise NotImplementedError(
            f"hf_flexseq trains transformers models; {type(base).__name__} is none"
        )
    return base
