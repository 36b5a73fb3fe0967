"""What turns a dataloader into planned steps and runs them: the one code path of the trainer and
of a plain loop.

engine = FlexSeqEngine(accelerator, FlexSeqArguments(...))
engine.attach(model)                                   # before accelerator.prepare
model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
for step in engine.steps(dataloader, accumulation=4):
    loss = step.backward(model)
    optimizer.step()
    optimizer.zero_grad()
engine.detach()
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_flexseq.attention.deterministic import slowdown
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import broadcast_object
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.calibration.choose import MADE_FOR_THE_MODEL, cost_model_for
from hf_flexseq.hf.model.buckets import early_buckets
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.loss import ChunkedLoss, attach_chunked_loss
from hf_flexseq.hf.trainer_checks import check_accelerator, resolve_sync
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Plan
from hf_flexseq.plan import check as check_plan
from hf_flexseq.planner.process.client import PlannerWorker
from hf_flexseq.planner.static import check_degree
from hf_flexseq.schedule.routing import NicFigures, links_of
from hf_flexseq.schedule.routing_notes import LayerTokenBytes, routing_reason
from hf_flexseq.steps.exchange import RowExchange
from hf_flexseq.steps.lookahead import DrawnStep, InlinePlanner, Lookahead, Planner
from hf_flexseq.steps.step import Inputs, OptimizerStep, model_inputs, shards_of
from hf_flexseq.steps.trace import PlanTrace, plan_line

logger = logging.getLogger(__name__)

MEASURED_TOKENS = 1024  # to tell what deterministic attention costs


class FlexSeqEngine:
    """Plans and runs optimizer steps of an unmodified HF model under accelerate."""

    _cuts_models = False

    def __init__(
        self,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        """Raises ValueError or NotImplementedError for an accelerator, a cost model or a degree
        that cannot work."""
        check_accelerator(accelerator, args)
        if args.pipeline_parallel_size > 1 and not self._cuts_models:
            raise NotImplementedError(
                f"pipeline_parallel_size={args.pipeline_parallel_size} in a loop of your own: use "
                f"FlexSeqTrainer, or 1"
            )
        # Streams are dispatched from rank 0 by default, which breaks on rows of different lengths.
        accelerator.dataloader_config.dispatch_batches = False
        self.accelerator, self.args = accelerator, args
        self._named_cost = None
        if args.cost_model not in MADE_FOR_THE_MODEL:
            self._named_cost = load_cost_model(args.cost_model)
        self.communicator = communicator or Communicator()
        if args.sp_degree is not None:
            check_degree(args.sp_degree, self.communicator.topology)
        self.model: PreTrainedModel | None = None
        self.cost: CostModel | None = None
        self.lockstep = False
        self._links: NicFigures | None = None
        self._kernel: Kernel | None = None
        self._chunked_loss: ChunkedLoss | None = None
        self._former_attention: str | None = None
        self._former_ddp: DistributedDataParallelKwargs | None = None
        self._exchange = RowExchange(self.communicator)
        self._training: Lookahead | None = None
        self._trace = PlanTrace(args.plan_trace, self.communicator)

    # ---- the model

    def attach(self, model: nn.Module, *, lockstep: bool = False) -> None:
        """Make `model` run on planned batches: its attention implementation and its loss. Undone
        by `detach`.

        lockstep: whether something outside of the engine's sight makes all ranks run every
        micro-batch together. Raises NotImplementedError when the model cannot be trained exactly.
        """
        base = base_model(model)
        check_model(base)
        self.lockstep = resolve_sync(self.args, base, self.accelerator, lockstep=lockstep)
        self.cost = self._named_cost or cost_model_for(
            self.args.cost_model,
            base,
            self.accelerator,
            self.communicator,
            attention_remat=self.args.attention_remat,
        )
        self.cost.strategies(self.args.strategy)  # raises for one that it has no figures for
        if self.args.routing == "auto" and self.communicator.topology.nodes > 1:
            # Rank 0's: a file of a cost model may differ from node to node, and all ranks must
            # route alike.
            self._links = broadcast_object(
                self.communicator, links_of(self.cost, self.communicator.topology)
            )
        if self.args.max_tokens_per_rank is None:
            # Raises when the model's state alone is too large.
            self.cost.max_tokens_per_rank(self.communicator.world_size)
        self._former_ddp = self.accelerator.ddp_handler
        self.accelerator.ddp_handler = early_buckets(self._former_ddp, model)
        self._former_attention = base.config._attn_implementation
        base.set_attn_implementation(NAME)
        self._chunked_loss = attach_chunked_loss(model)
        self.model = base

    def detach(self) -> None:
        """Give the model its own attention and loss back, and end the planner."""
        if self.model is not None:
            assert self._former_attention is not None, (
                "attached without a former attention implementation"
            )
            self.model.set_attn_implementation(self._former_attention)
            self.accelerator.ddp_handler = self._former_ddp
            if self._chunked_loss is not None:
                self._chunked_loss.detach()
        self.model = self._chunked_loss = None
        if self._training is not None:
            self._training.close()
            self._training = None

    @contextmanager
    def attached(self, model: nn.Module, *, lockstep: bool = False) -> Iterator[None]:
        """`attach` and `detach` around a block; nothing happens when the model is attached
        already."""
        if self.model is not None:
            yield
            return
        self.attach(model, lockstep=lockstep)
        try:
            yield
        finally:
            self.detach()

    # ---- steps

    def next_step(
        self, iterator: Iterator[Mapping[str, Any]], num_batches: int
    ) -> OptimizerStep | None:
        """The next training step, of `num_batches` batches per rank; None when no rank has data
        left."""
        if self._training is None:
            self._training = self._lookahead(self.args.lookahead)
        return self._step(self._training, iterator, num_batches)

    def evaluation_steps(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[OptimizerStep]:
        """Every batch as a step, until no rank has data left. Planned in place."""
        lookahead = self._lookahead(0)
        iterator = iter(batches)
        while (step := self._step(lookahead, iterator, 1)) is not None:
            yield step

    def steps(
        self, dataloader: Iterable[Mapping[str, Any]], accumulation: int = 1
    ) -> Iterator["EngineStep"]:
        """One pass over a prepared dataloader, `accumulation` batches per rank and optimizer
        step."""
        iterator = iter(dataloader)
        while (step := self.next_step(iterator, accumulation)) is not None:
            yield EngineStep(self, step)
            self.finish(step)

    def _lookahead(self, steps: int) -> Lookahead:
        planner = self.make_planner(ahead=steps > 0) if self.communicator.rank == 0 else None
        legal = partial(
            check_plan,
            topology=self.communicator.topology,
            max_tokens_per_rank=self.args.max_tokens_per_rank,
        )
        return Lookahead(self.communicator, planner, steps, check=legal)

    def make_planner(self, *, ahead: bool) -> Planner:
        """The planner of rank 0: in a process of its own when steps are planned ahead of the one
        that runs."""
        assert self.cost is not None, "attach the model before drawing steps"
        make = PlannerWorker if ahead else InlinePlanner
        return make(
            self.communicator.topology,
            self.cost,
            planner=self.args.planner,
            strategy=self.args.strategy,
            sp_degree=self.args.sp_degree,
            max_tokens_per_rank=self.args.max_tokens_per_rank,
            sync="lockstep" if self.lockstep else "free",
            remap=self.args.remap,
        )

    def _step(
        self, lookahead: Lookahead, iterator: Iterator[Mapping[str, Any]], num_batches: int
    ) -> OptimizerStep | None:
        drawn = lookahead.next(iterator, num_batches)
        return None if drawn is None else self._deal(*drawn, waited_s=lookahead.waited_s)

    def _deal(self, drawn: DrawnStep, plan: Plan, *, waited_s: float) -> OptimizerStep:
        """Bring the tokens to the ranks that the plan names."""
        if drawn.number == 0:
            for note in plan.notes:
                logger.info(note)
        if drawn.number == 0 and self.communicator.world_size > 1:
            self._log_routing(plan)
        shards = shards_of(plan, self.communicator.rank, self.communicator.topology)
        columns = self._exchange(drawn.row, plan, drawn.sources, shards)
        columns = [
            self._exchange.evened(found, shard) if micro_batch.remap else found
            for found, shard, micro_batch in zip(columns, shards, plan.micro_batches, strict=True)
        ]
        micro_batches = model_inputs(
            shards,
            columns,
            lockstep=self.lockstep,
            communicator=self.communicator,
            kernel=self._chosen_kernel(),
            device=self.accelerator.device,
            attention_remat=self.args.attention_remat,
            deterministic=self.args.deterministic,
            links=self._links,
        )
        return OptimizerStep(
            number=drawn.number,
            plan=plan,
            row=drawn.row,
            targets=drawn.targets,
            micro_batches=micro_batches,
            waited_s=waited_s,
            device=self.accelerator.device,
        )

    def _chosen_kernel(self) -> Kernel:
        if self._kernel is None:
            assert self.model is not None, "attach the model before drawing steps"
            config = self.model.config.get_text_config()
            self._kernel = choose_kernel(
                self.accelerator.device, self._compute_dtype(), _heads(config)[2]
            )
            if self.args.deterministic and self.communicator.rank == 0:
                self._log_slowdown(config)
        return self._kernel

    def _log_routing(self, plan: Plan) -> None:
        # whose groups gather: there are no rings
        if self.args.routing == "off" or self.args.deterministic:
            return
        heads, kv_heads, head_dim = _heads(self.model.config.get_text_config())
        head_bytes = head_dim * self._compute_dtype().itemsize
        token = LayerTokenBytes(queries=heads * head_bytes, keys=2 * kv_heads * head_bytes)
        topology = self.communicator.topology
        logger.info(routing_reason(plan.micro_batches, plan.lengths, topology, self._links, token))

    def _log_slowdown(self, config: PretrainedConfig) -> None:
        heads, kv_heads, head_dim = _heads(config)
        options = {"dtype": self._compute_dtype(), "device": self.accelerator.device}
        q, k = (torch.ones(MEASURED_TOKENS, h, head_dim, **options) for h in (heads, kv_heads))
        factor = slowdown(q, k, self.communicator, self._chosen_kernel())
        logger.warning(
            "deterministic=True: attention of %s tokens on one rank takes %.1f times as long as "
            "otherwise; where "
            "ranks share a sequence its backward computes up to twice as much, and its keys are "
            "gathered",
            f"{MEASURED_TOKENS:,}",
            factor,
        )

    def _compute_dtype(self) -> torch.dtype:
        assert self.model is not None, "attach the model before drawing steps"
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return autocast.get(self.accelerator.mixed_precision, next(self.model.parameters()).dtype)

    # ---- running

    def run(
        self,
        step: OptimizerStep,
        model: nn.Module,
        forward_backward: Callable[[Inputs], torch.Tensor],
    ) -> torch.Tensor:
        """Forward and backward of every micro-batch; gradients are reduced with the last one (in
        lockstep under a sharded model with each). Returns the sum of the losses, detached."""

        @contextmanager
        def accumulating() -> Iterator[None]:
            state = self.accelerator.gradient_state
            syncs = state.sync_gradients
            state._set_sync_gradients(False)  # DeepSpeed would step its optimizer otherwise
            try:
                with self._no_reduction(model):
                    yield
            finally:
                state._set_sync_gradients(syncs)

        return step.run(forward_backward, accumulating).detach()

    def _no_reduction(self, model: nn.Module) -> AbstractContextManager[None]:
        """DDP keeps gradients local until the last micro-batch. FSDP and DeepSpeed reduce into
        their shards each time: waiting would hold the whole model's gradients on every rank."""
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if each or not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.accelerator.no_sync(model)  # type: ignore[no-any-return]

    def finish(self, step: OptimizerStep) -> dict[str, float]:
        """Record a step that has run: the plan trace, and its figures for the log. Collective over
        the world."""
        assert self.cost is not None, "attach the model before running steps"
        return self._trace.record(step, self.cost)

    def describe(self, figures: dict[str, float]) -> str:
        """The figures of a step in one line, for people."""
        return plan_line(figures)


class EngineStep:
    """A step of a hand-written loop."""

    __slots__ = ("_engine", "step")

    def __init__(self, engine: FlexSeqEngine, step: OptimizerStep) -> None:
        self._engine, self.step = engine, step

    @property
    def plan(self) -> Plan:
        return self.step.plan

    def backward(self, model: nn.Module) -> torch.Tensor:
        """Forward and backward of the whole step. Returns this rank's share of the loss: the mean
        over ranks is the mean over the step's target tokens. Gradients are those of that mean,
        over all ranks."""
        accelerator = self._engine.accelerator

        def forward_backward(inputs: Inputs) -> torch.Tensor:
            outputs = model(
                **inputs, use_cache=False, num_items_in_batch=max(self.step.targets, 1)
            )
            # DDP, FSDP and DeepSpeed average gradients over ranks; the step's gradient is their
            # sum.
            loss = outputs.loss * accelerator.num_processes
            deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
            accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
            return loss.detach()

        return self._engine.run(self.step, model, forward_backward)


def _heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and their size."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model under PEFT's wrapper, if there is one.

    Raises ValueError for a model that accelerate has wrapped, NotImplementedError for one that is
    not transformers'.
    """
    if isinstance(getattr(model, "module", None), nn.Module) and not isinstance(
        model, PreTrainedModel
    ):
        raise ValueError(
            f"attach the model before accelerator.prepare wraps it in {type(model).__name__}"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise NotImplementedError(
            f"hf_flexseq trains transformers models; {type(base).__name__} is none"
        )
    return base
