"""The executor of a whole model: a plan is micro-batches of groups.

A rank has all of the model, or accelerate gives it what it needs of it (FSDP, ZeRO). A step is

1. dispatched     this rank gets the tokens of its shards (`dispatch`)
2. run            one pass over the micro-batches, where the loss is a sum over tokens
                  (`micro_batches`), or several around a loss on the source ranks (`reducing`);
                  see `steps/micro_batches.py`
3. reduced        gradients, once where they can be (`reduction.py`)

What the model itself is given is in `attachments.py`.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.contexts import ModelContexts
from hf_flexseq.config import AS_SET
from hf_flexseq.cost import CostModel
from hf_flexseq.hf.adapters import unsuitable_adapter
from hf_flexseq.hf.attachments import AttachedModel, AttentionByCall, ModelSettings
from hf_flexseq.hf.executors import EngineSetup, base_model, kernel_of, planner_of
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.experts import adapted_experts
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.router import RouterLoss
from hf_flexseq.hf.model.sharding_kind import is_fully_sharded
from hf_flexseq.hf.model_images import ModelImages
from hf_flexseq.hf.model_planning import Factors, ModelPlanning
from hf_flexseq.hf.reduction import GradientReduction, note_trained, whole_parameters
from hf_flexseq.hf.shared_prefixes import reason_not_shared
from hf_flexseq.hf.sync import resolve_sync
from hf_flexseq.kernels import Kernel
from hf_flexseq.memory.store import HostStore
from hf_flexseq.plan import Plan
from hf_flexseq.plan import check as check_plan
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.plan.shard import Shard
from hf_flexseq.planner.process.client import Planner
from hf_flexseq.planner.process.jobs import GroupsJob
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.embedding_noise import NoiseColumns
from hf_flexseq.steps.exchange import RowExchange, united
from hf_flexseq.steps.features import with_image_columns
from hf_flexseq.steps.inputs import Inputs, indices_to_run, inputs_of, shard_alone
from hf_flexseq.steps.learned_cost import corrected_cost
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches
from hf_flexseq.steps.prefetch import ImageReader, VersionedJob
from hf_flexseq.steps.source_row import PlannedStep, SourceRow
from hf_flexseq.steps.token_columns import LENGTHS, with_token_columns
from hf_flexseq.steps.trace import LogFigures, PlanTrace

if TYPE_CHECKING:
    from hf_flexseq.hf.model.expert_adapters import ExpertAdapters  # which needs PEFT


class WholeModelExecutor:
    """Runs micro-batches of groups on a whole model, as accelerate provides it (FSDP, ZeRO)."""

    trainer_hooks = None

    def __init__(self, setup: EngineSetup) -> None:
        """Raises NotImplementedError for pipeline stages, which a Trainer alone can run."""
        stages = setup.args.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size={stages} in a loop of your own: use FlexSeqTrainer, or 1"
            )
        self.setup = setup
        self.lockstep = False
        self.kernel: Kernel | None = None  # chosen with the first step
        self.reason_not_shared: str | None = None  # of the attached model
        self.settings = ModelSettings()  # of models that are attached
        self._noise: NoiseColumns | None = None  # of the attached model
        self.host_memory_bytes = 0  # for activations of a rank, from `attach` on
        self._lowered: int | None = None  # by `lower_cap`
        self._exchange = RowExchange(setup.communicator)
        self._planning: ModelPlanning | None = None  # of the model that was attached last
        self._model: AttachedModel | None = None
        self._adapters: ExpertAdapters | None = None  # of the attached model, if it has any
        self._contexts: ModelContexts | None = None  # of the attached model, from its first step
        self._images: ModelImages | None = None  # of the attached model, if it takes any

    @property
    def attached(self) -> bool:
        """True between `attach` and `detach`."""
        return self._model is not None

    @property
    def cost(self) -> CostModel | None:
        """What the model costs that was attached last, as far as its steps have taught; None
        before."""
        planning = self._planning
        return None if planning is None else corrected_cost(planning.cost, planning.newest)

    @property
    def planning(self) -> ModelPlanning:
        """The planning of the model that was attached last."""
        assert self._planning is not None, "attach sets the planning"
        return self._planning

    @property
    def router(self) -> RouterLoss | None:
        """The router loss of the attached model; None without one."""
        return None if self._model is None else self._model.router

    @property
    def layers(self) -> LayerMemory:
        """The layers of the attached model, which keep what they are told."""
        return self._attached_model.layers

    @property
    def reason_without_choices(self) -> str | None:
        """Why no plan may choose where activations of the attached model are; None if it may."""
        if self.setup.args.activation_memory == AS_SET:
            return f"activation_memory={AS_SET!r}"
        plugin = getattr(self.setup.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.activation_checkpointing:
            return "activation_checkpointing of FSDP is on"
        return self.settings.reason_as_set or self.layers.reason_without_choices

    @property
    def keeps_own_loss(self) -> bool:
        """True if the attached model computes its loss itself, of all logits at once."""
        return self._attached_model.keeps_own_loss

    @property
    def virtual_tokens(self) -> int:
        """Virtual tokens that the attached model puts in front of each sequence."""
        return self._attached_model.virtual_tokens

    @property
    def _attached_model(self) -> AttachedModel:
        assert self._model is not None, "attach sets the model"
        return self._model

    # ---- the model

    def attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Attach `model`, with DDP buckets that are reduced early. Collective over the world.
        Raises NotImplementedError for an inexact model, ValueError if its state alone is too
        large."""
        args = self.setup.args
        accelerator = self.setup.accelerator
        communicator = self.setup.communicator

        # 1. what the model needs of the ranks, and what it costs
        base = base_model(model)
        check_model(base)
        adapter = unsuitable_adapter(model)
        if adapter is not None:
            raise NotImplementedError(f"hf_flexseq does not support {adapter}")
        self._adapters = None
        if adapted_experts(base):
            from hf_flexseq.hf.model.expert_adapters import ExpertAdapters

            self._adapters = ExpertAdapters(base, communicator)
        everyone = communicator.open_world() if whole_parameters(base) else None
        if everyone is not None:
            for parameter in whole_parameters(base):
                everyone.broadcast(parameter.data)  # rank 0's values, as the Trainer does
        is_ordered = communicator.transport.capabilities.ordered
        self.lockstep = resolve_sync(
            args, base, accelerator, lockstep=lockstep, is_ordered=is_ordered
        )
        if is_ordered and not self.lockstep:
            communicator.open_world()  # for gradients: no group is made in a step
        note_trained(model)
        layers = self._layers_of(base)
        self._planning = ModelPlanning(
            self.setup,
            base,
            layers,
            host_memory_bytes=self.host_memory_bytes,
            lockstep=self.lockstep,
            lowered=self._lowered,
        )

        # 2. what `detach` undoes
        self.reason_not_shared = reason_not_shared(model, base, args)
        self._noise = None
        if self.settings.noise is not None:
            self._noise = NoiseColumns(*self.settings.noise)
            self.reason_not_shared = self.reason_not_shared or "NEFTune's noise is of each row"
        self._model = AttachedModel(model, base, accelerator, layers, self.settings)
        if self._model.vision is not None:
            self._images = ModelImages(
                self.setup, base, self._model.vision, self._planning, may_choose=self._may_choose
            )

    def put_adapters_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give weights that `attach` has replaced to an optimizer that was made before."""
        if self._adapters is not None:
            self._adapters.put_into(optimizer)

    def detach(self) -> None:
        """Give the model its own attention and loss back, and accelerate its DDP handler."""
        if self._model is None:
            return
        self._model.detach()
        self._model = None
        self._images = None
        self._contexts = None
        self.planning.fsdp.forget_model()

    def _layers_of(self, base: PreTrainedModel) -> LayerMemory:
        """Return the layers of a model, which keep what they are told. Collective over the
        world."""
        budgets = self.setup.communicator.cpu_group.gather_values(self.setup.host_bytes())
        self.host_memory_bytes = min(budgets)
        device = self.setup.accelerator.device
        layers = LayerMemory(
            base,
            save_attention_output=self.setup.args.save_attention_output,
            make_store=partial(HostStore, device, self.host_memory_bytes),
        )
        # A hook of the user's may be on one rank alone.
        reasons = self.setup.communicator.cpu_group.gather_values(layers.reason_without_choices)
        layers.reason_without_choices = next((one for one in reasons if one is not None), None)
        return layers

    # ---- planning

    def lower_cap(self, tokens: int) -> None:
        """Let plans of planners to come give a rank fewer tokens in a micro-batch: `tokens` where
        activations are as set for the run, and where a choice keeps fewer of their bytes as many
        more. A cap that is lower already stays."""
        self._lowered = min(tokens, self._lowered or tokens)
        if self._planning is not None:
            self._planning.lower_cap(self._lowered)

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""
        return planner_of(self._job(), ahead=ahead)

    def forward_planner(self) -> Planner:
        """Make the planner of rank 0 for passes that have no backward, in place."""
        return planner_of(self._job(trains=False), ahead=False)

    def _job(self, *, trains: bool = True) -> GroupsJob:
        return self._job_by(self.planning.newest, trains=trains)

    def _job_by(self, factors: Factors, *, trains: bool = True) -> GroupsJob:
        # Not earlier: FSDP wraps MLPs after `attach`, and the user may put hooks on them.
        base = self._attached_model.base
        return self.planning.job(base, factors, may_choose=self._may_choose, trains=trains)

    @property
    def jobs(self) -> VersionedJob:
        """Jobs of training steps, which change with what steps teach."""
        return self

    def version_of(self, number: int | None) -> Hashable:
        """Return what tells the jobs of steps apart: the factors of the cost model. number: see
        `VersionedJob`."""
        return self.planning.newest if number is None else self.planning.factors_of(number)

    def job_of(self, number: int) -> GroupsJob:
        """Return the job by which step `number` is planned."""
        return self._job_by(self.planning.factors_of(number))

    @property
    def _may_choose(self) -> bool:
        return self.reason_without_choices is None

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a plan that would compute something wrong or hang."""
        check_plan(plan, self.setup.communicator.topology, self.planning.max_tokens_per_rank)

    def read(self, data: bytes) -> Plan:
        """Return the plan whose `to_bytes` gave `data`."""
        return Plan.from_bytes(data)

    # ---- steps

    def dispatch(self, planned: PlannedStep) -> RankMicroBatches:
        """Bring the drawn tokens to the ranks that the plan names. Collective over the world."""
        # 1. what this rank holds in each micro-batch, and its tokens outside of attention
        plan: Plan = planned.plan
        device = self.setup.accelerator.device
        communicator = self.setup.communicator
        model = self._attached_model
        row = with_token_columns(planned.drawn.row, model.token_columns)
        if self._noise is not None:
            row = self._noise.of(row, planned.drawn.number)
        if planned.drawn.images:
            row = with_image_columns(row, planned.drawn)
        passes = self.planning.passes
        all_shards = None if passes is None else passes.shards
        layout = PlanLayout(plan, communicator.rank, all_shards)
        shards = layout.shards
        routes = self._exchange.routes(row, layout, planned.drawn.sources)
        columns = self._exchange.dispatch(row.columns, routes, united)

        images = None if self._images is None else self._images.of_step(planned, columns)
        model.tiles.attach_for(plan)

        # 2. what the model is called with; beyond the first micro-batch it is made while they run
        contexts = self._contexts_of_run()

        def inputs(index: int) -> Inputs:
            memory = plan.micro_batches[index].memory
            make_context = partial(contexts, blocks=planned.drawn.blocks, memory=memory)
            made = inputs_of(shards[index], columns[index], device, make_context)
            if images is not None:
                made["seq_ctx"].images = images[index]
            return made

        return RankMicroBatches(
            planned,
            indices=indices_to_run(shards, lockstep=self.lockstep),
            counts=[shard.tokens for shard in shards],
            inputs_of=inputs,
            exchange=self._exchange,
            routes=routes,
            device=device,
            images=None if images is None else images[0].step,
            encode_ahead=None if self._images is None else self._images.encode_ahead,
        )

    @property
    def takes_images(self) -> bool:
        """True if the attached model takes images here."""
        return self._images is not None

    @property
    def images(self) -> ImageReader | None:
        """What reads the images of rows, or refuses them; None for a model of text."""
        if self._images is None:
            return self._attached_model.text_reader
        return self._images

    def _contexts_of_run(self) -> ModelContexts:
        """Return the maker of contexts; the first step chooses its kernel. Collective."""
        if self.kernel is None:
            self.kernel = kernel_of(self.setup, self._attached_model.base, self.planning.degrees)
        if self._contexts is None:
            vision = self._attached_model.vision
            both_ways = () if vision is None else vision.both_ways
            self._contexts = self._contexts_by(self.kernel, both_ways)
        return self._contexts

    def _contexts_by(self, kernel: Kernel, both_ways: Collection[int] = ()) -> ModelContexts:
        """Return a maker of contexts with a model's kernel, whose layers `both_ways` show images
        both ways."""
        return ModelContexts(
            self.setup.communicator,
            kernel,
            self.setup.accelerator.device,
            save_attention_output=self.setup.args.save_attention_output,
            passes=self.planning.passes,
            both_ways=both_ways,
        )

    def inputs_alone(self, row: SourceRow) -> Inputs:
        """Return the inputs of a micro-batch of `row`, all on this rank, after a dispatch."""
        assert self._contexts is not None, "a step has been dispatched"
        shard = shard_alone(row.lengths, self.setup.communicator.rank)
        columns = with_token_columns(row, self._attached_model.token_columns).columns
        return inputs_of(shard, columns, self.setup.accelerator.device, self._contexts)

    def micro_batches(
        self, step: RankMicroBatches, model: nn.Module, *, trains: bool
    ) -> Iterator[Inputs]:
        """Yield the inputs of every micro-batch of a step, once; the caller runs it and adds its
        loss to the step. `reduction.py` decides when gradients are reduced. Collective over the
        world."""
        if not trains:
            yield from self._in_order(step, model, nullcontext)
            return
        with self.reducing(step, model) as before_last:
            yield from self._in_order(step, model, before_last)

    def _in_order(
        self, step: RankMicroBatches, model: nn.Module, before_last: BeforeLast
    ) -> Iterator[Inputs]:
        """Return the inputs of every micro-batch; a router loss needs a pass before."""
        if self.router is None:
            return step.micro_batches(before_last)
        return step.with_totals(self.router.of_step(model), before_last)

    def reducing(
        self, step: RankMicroBatches, model: nn.Module
    ) -> AbstractContextManager[BeforeLast]:
        """Surround a step; the block gets the surroundings of each micro-batch but the last."""
        vision = self._attached_model.vision
        if vision is not None:
            vision.forget_gradients()
        reduction = GradientReduction(
            accelerator=self.setup.accelerator,
            communicator=self.setup.communicator,
            fsdp=self.planning.policies(step.number),
            adapters=self._adapters,
            lockstep=self.lockstep,
            leaves_tower_out=vision is not None and not step.drawn.images,
        )
        return reduction.of_step(step.plan, model)

    def figures(self, step: RankMicroBatches, trace: PlanTrace) -> LogFigures:
        """Write a finished step's trace; return its figures. Collective over the world."""
        planning = self.planning
        cost = corrected_cost(planning.cost, planning.factors_of(step.number))
        return trace.record(step, cost, planning.learn)

    # ---- what a loss on the source ranks needs of the model

    def rows_of(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        """Return what yields the sequences of calls; see `AttachedModel.rows_of`."""
        return self._attached_model.rows_of(calls)

    @property
    def attention(self) -> AttentionByCall:
        """What gives the attached model its own attention or ours."""
        return self._attached_model.attention

    def beside(self, model: PreTrainedModel) -> Callable[[Shard], SequenceContext]:
        """Return what makes the contexts of another model, which runs on the micro-batches of the
        attached one, with kernels for its own layers. From now on the columns that it needs of
        each token are dispatched, too. Collective over the world.

        Raises ValueError where no kernel serves its layers, and for a model whose shards all ranks
        have to gather together, unless they run in lockstep.
        """
        name = type(model).__name__
        if is_fully_sharded(model, self.setup.accelerator) and not self.lockstep:
            raise ValueError(
                f"{name} is sharded, and its ranks have to run every micro-batch together: set "
                "sync='lockstep'"
            )
        kernel = kernel_of(self.setup, model, self.planning.degrees, whose=f" of {name}")
        columns = needed_columns(model)
        self._attached_model.need_columns(columns)
        if LENGTHS in columns:
            self.reason_not_shared = f"{name} reads the length of the whole row"
        return self._contexts_by(kernel)
