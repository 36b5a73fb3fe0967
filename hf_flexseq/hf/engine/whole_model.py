"""The model that an engine runs planned steps of: its attachments, its cost, and the parts of its
steps.

A rank has all of the model, or accelerate gives it the parts that it needs (FSDP, ZeRO). A step is

1. dispatched     this rank gets the tokens of its shards (`WholeModel.dispatch`)
2. run            one pass over the micro-batches, where the loss is a sum over tokens, or several
                  around a loss on the source ranks; see `steps/micro_batches.py`
3. reduced        gradients, once where they can be (`reduction.py`)
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.context import ModelContexts
from hf_flexseq.hf.engine.model_planning import EngineSetup, ModelPlanning
from hf_flexseq.hf.engine.reduction import GradientReduction, note_trained, whole_parameters
from hf_flexseq.hf.model.adapters import unsuitable_adapter
from hf_flexseq.hf.model.attachments import AttachedModel, ModelSettings
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.experts import adapted_experts
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.sharding import (
    is_fully_sharded,
    resolve_sync,
    unsharded_class,
    zero_stage,
)
from hf_flexseq.hf.model.shared_prefixes import reason_not_shared
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.kernels import Kernel
from hf_flexseq.memory.store import HostStore
from hf_flexseq.plan import Plan
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.plan.shard import Shard
from hf_flexseq.planner.images import plan_images
from hf_flexseq.steps.early_encoding import EarlyEncoder
from hf_flexseq.steps.embedding_noise import NoiseColumns
from hf_flexseq.steps.exchange import micro_batch_routes, united
from hf_flexseq.steps.features import MicroBatchImages, images_of_step, with_image_columns
from hf_flexseq.steps.inputs import Inputs, indices_to_run, inputs_of, shard_alone
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches
from hf_flexseq.steps.prefetch import ImageReader
from hf_flexseq.steps.source_row import Columns, DrawnStep, PlannedStep, SourceRow
from hf_flexseq.steps.token_columns import LENGTHS, with_token_columns

if TYPE_CHECKING:
    from hf_flexseq.hf.model.expert_adapters import ExpertAdapters  # which needs PEFT


class WholeModel(AttachedModel):
    """An attached model whose steps are micro-batches of groups."""

    def __init__(
        self,
        setup: EngineSetup,
        model: nn.Module,
        settings: ModelSettings,
        *,
        lockstep: bool,
        lowered: int | None,
    ) -> None:
        """Attach `model`, with DDP buckets that are reduced early. Collective over the world.

        lockstep: True if something outside makes all ranks run every micro-batch together.
        lowered: see `ModelPlanning.lower_cap`.
        Raises NotImplementedError for an inexact model, ValueError if its state alone is too
        large.
        """
        self.setup = setup
        self._contexts: ModelContexts | None = None  # from the first step on

        # 1. what the model needs of the ranks, and what it costs
        base = base_model(model)
        check_model(base)
        adapter = unsuitable_adapter(model)
        if adapter is not None:
            raise NotImplementedError(f"hf_flexseq does not support {adapter}")
        self._adapters = self._adapters_of(base)
        lockstep = self._resolved_sync(base, lockstep=lockstep)
        note_trained(model)
        budgets = setup.communicator.cpu_group.gather_values(setup.host_bytes())
        host_memory_bytes = min(budgets)  # for activations of a rank
        layers = self._layers_of(base, host_memory_bytes)
        self.planning = ModelPlanning(
            setup,
            base,
            layers,
            host_memory_bytes=host_memory_bytes,
            reason_as_set=settings.reason_as_set,
            lockstep=lockstep,
            lowered=lowered,
        )
        """The cost of the model, and the jobs of its planners."""
        self._reduction = GradientReduction(self.planning, self._adapters)

        # 2. what `detach` undoes
        self.reason_not_shared = reason_not_shared(model, base, setup.args)
        """Why rows of the model's steps may not share prefixes; None if they may."""
        self._noise: NoiseColumns | None = None
        if settings.noise is not None:
            self._noise = NoiseColumns(*settings.noise)
            self.reason_not_shared = self.reason_not_shared or "NEFTune's noise is of each row"
        super().__init__(model, base, setup.accelerator, layers, settings)
        self._images: ModelImages | None = None
        if self.vision is not None:
            self.images = self._images = ModelImages(setup, base, self.vision, self.planning)

    def _adapters_of(self, base: PreTrainedModel) -> "ExpertAdapters | None":
        """Return the adapters on experts that are spread over ranks; None without any."""
        if not adapted_experts(base):
            return None
        from hf_flexseq.hf.model.expert_adapters import ExpertAdapters

        return ExpertAdapters(base, self.setup.communicator)

    def _resolved_sync(self, base: PreTrainedModel, *, lockstep: bool) -> bool:
        """Make equal the parameters of a sharded model that every rank has whole; return if all
        ranks run every micro-batch together. Collective over the world."""
        communicator = self.setup.communicator
        everyone = communicator.open_world() if whole_parameters(base) else None
        if everyone is not None:
            for parameter in whole_parameters(base):
                everyone.broadcast(parameter.data)  # rank 0's values, as the Trainer does
        is_ordered = communicator.transport.capabilities.ordered
        lockstep = resolve_sync(
            self.setup.args,
            base,
            self.setup.accelerator,
            lockstep=lockstep,
            is_ordered=is_ordered,
        )
        if is_ordered and not lockstep:
            communicator.open_world()  # for gradients: no group is made in a step
        return lockstep

    def _layers_of(self, base: PreTrainedModel, host_memory_bytes: int) -> LayerMemory:
        """Return the layers of a model, which obey a plan's choice for memory. Collective over the
        world. host_memory_bytes: for activations of a rank."""
        layers = LayerMemory(
            base,
            save_attention_output=self.setup.args.save_attention_output,
            make_store=partial(HostStore, self.setup.accelerator.device, host_memory_bytes),
        )
        # A hook of the user's may be on one rank alone.
        reasons = self.setup.communicator.cpu_group.gather_values(layers.reason_without_choices)
        layers.reason_without_choices = next((one for one in reasons if one is not None), None)
        return layers

    def detach(self) -> None:
        """Give the model its own attention and loss back, and accelerate its DDP handler."""
        super().detach()
        self.planning.forget_model()

    def put_adapters_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give weights that attaching has replaced to an optimizer that was made before."""
        if self._adapters is not None:
            self._adapters.put_into(optimizer)

    # ---- steps

    def dispatch(self, planned: PlannedStep, kernel: Kernel) -> RankMicroBatches:
        """Bring the drawn tokens to the ranks that the plan names. Collective over the world.
        kernel: of the model's attention."""
        # 1. what this rank holds in each micro-batch, and its tokens outside of attention
        plan: Plan = planned.plan
        device = self.setup.accelerator.device
        communicator = self.setup.communicator
        row = with_token_columns(planned.drawn.row, self.token_columns)
        if self._noise is not None:
            row = self._noise.of(row, planned.drawn.number)
        if planned.drawn.images:
            row = with_image_columns(row, planned.drawn)
        passes = self.planning.passes
        all_shards = None if passes is None else passes.shards
        layout = PlanLayout(plan, communicator.rank, all_shards)
        shards = layout.shards
        routes = micro_batch_routes(row, layout, planned.drawn.sources, communicator)
        columns = routes.dispatch(row.columns, united)

        images = None if self._images is None else self._images.of_step(planned, columns)
        self.tiles.attach_for(plan)

        # 2. what the model is called with; beyond the first micro-batch it is made while they run
        if self._contexts is None:
            both_ways = () if self.vision is None else self.vision.both_ways
            self._contexts = self._contexts_by(kernel, both_ways)
        contexts = self._contexts

        def inputs(index: int) -> Inputs:
            memory = plan.micro_batches[index].memory
            make_context = partial(contexts, blocks=planned.drawn.blocks, memory=memory)
            made = inputs_of(shards[index], columns[index], device, make_context)
            if images is not None:
                made["seq_ctx"].images = images[index]
            return made

        return RankMicroBatches(
            planned,
            indices=indices_to_run(shards, lockstep=self.planning.lockstep),
            counts=[shard.tokens for shard in shards],
            inputs_of=inputs,
            routes=routes,
            device=device,
            images=None if images is None else images[0].step,
            encode_ahead=None if self._images is None else self._images.encode_ahead,
        )

    def _contexts_by(self, kernel: Kernel, both_ways: Collection[int] = ()) -> ModelContexts:
        """Return a maker of contexts with a model's kernel, whose layers `both_ways` show images
        both ways."""
        return ModelContexts(
            partial(
                SequenceContext,
                communicator=self.setup.communicator,
                kernel=kernel,
                device=self.setup.accelerator.device,
                save_attention_output=self.setup.args.save_attention_output,
                passes=self.planning.passes,
                both_ways=both_ways,
            )
        )

    def inputs_alone(self, row: SourceRow) -> Inputs:
        """Return the inputs of a micro-batch of `row`, all on this rank, after a dispatch."""
        assert self._contexts is not None, "a step has been dispatched"
        shard = shard_alone(row.lengths, self.setup.communicator.rank)
        columns = with_token_columns(row, self.token_columns).columns
        return inputs_of(shard, columns, self.setup.accelerator.device, self._contexts)

    def reducing(
        self, step: RankMicroBatches, model: nn.Module
    ) -> AbstractContextManager[BeforeLast]:
        """Surround a step that runs now, whose gradients are reduced; see
        `GradientReduction.of_step`."""
        leaves_tower_out = self.vision is not None and not step.drawn.images
        if self.vision is not None:
            self.vision.forget_gradients()
        return self._reduction.of_step(step, model, leaves_tower_out=leaves_tower_out)

    def beside(self, model: PreTrainedModel) -> Callable[[Shard], SequenceContext]:
        """Return a function that makes the contexts of another model, which runs on the
        micro-batches of this one, with kernels for its own layers. From now on the columns that it
        needs of each token are dispatched, too. Collective over the world.

        Raises ValueError where no kernel serves its layers, and for a model whose shards all ranks
        have to gather together, unless they run in lockstep.
        """
        name = type(model).__name__
        if is_fully_sharded(model, self.setup.accelerator) and not self.planning.lockstep:
            raise ValueError(
                f"{name} is sharded, and its ranks have to run every micro-batch together: set "
                "sync='lockstep'"
            )
        kernel = self.setup.kernel_for(model, self.planning.degrees, whose=f" of {name}")
        columns = needed_columns(model)
        self.need_columns(columns)
        if LENGTHS in columns:
            self.reason_not_shared = f"{name} reads the length of the whole row"
        return self._contexts_by(kernel)


# ---- its images


class ModelImages(ImageReader):
    """The images of an attached model, from rows to features. How a step uses them is in
    `steps/features.py`; how the model takes them is in `model/vision.py`."""

    def __init__(
        self,
        setup: EngineSetup,
        base: PreTrainedModel,
        vision: VisionModel,
        planning: ModelPlanning,
    ) -> None:
        """Collective over the world. vision: how `base` takes images."""
        self.vision = vision
        self._setup = setup
        self._base = base
        self._planning = planning
        self._early_encoder: EarlyEncoder | None = None  # where a frozen tower encodes images
        setup.communicator.open_world()  # for features

    # ---- rows, before they are planned

    @property
    def draws_noise(self) -> bool:
        """See `VisionModel.draws_noise`."""
        return self.vision.draws_noise

    def read(self, row: SourceRow) -> SourceRow:
        """See `VisionModel.read`."""
        return self.vision.read(row)

    def planned(self, step: DrawnStep) -> DrawnStep:
        """Return a step that says how its images are encoded, and what memory they take."""
        cost = self._planning.cost_of_plans(step.number)
        assert cost.tower is not None, "a model with images has a tower"
        plan = plan_images(
            step.images,
            step.lengths,
            replace(cost.tower, is_sharded=self._is_sharded),
            self._planning.topology,
            cost,
            self._planning.options,
        )
        facts = replace(step.facts, held_tokens=plan.held_tokens(cost.token_bytes))
        return replace(step, image_plan=plan, facts=facts)

    @property
    def _is_sharded(self) -> bool:
        """True if parameters are gathered anew in every micro-batch."""
        return zero_stage(self._base, self._setup.accelerator) == 3

    # ---- steps

    def of_step(
        self, planned: PlannedStep, columns: Sequence[Columns]
    ) -> list[MicroBatchImages] | None:
        """Send images to the ranks that encode them, and return the images of each micro-batch;
        None in a step without any. Collective over the world.

        columns: of each micro-batch; see `images_of_step`. Raises NotImplementedError where ranks
        would wait for each other forever.
        """
        if not planned.drawn.images:
            return None
        is_sharded = self._is_sharded
        modalities = {image.modality for image in planned.drawn.images}
        if len(modalities) > 1 and is_sharded and self.vision.has_separate_towers:
            raise NotImplementedError(
                f"{unsharded_class(self._base).__name__} has one tower for images and one for "
                "videos, and ranks gather sharded ones together: train it without sharding, or "
                "give steps images or videos alone"
            )
        return images_of_step(
            planned.drawn,
            columns,
            tower=self.vision,
            communicator=self._setup.communicator,
            device=self._setup.accelerator.device,
            is_sharded=is_sharded,
        )

    def encode_ahead(self, step: RankMicroBatches) -> None:
        """Encode a step's images with a frozen tower, which nothing of the step before changes."""
        if step.images is None:
            return
        if self.vision.is_trained or self.vision.draws_noise or self._is_sharded:
            return
        if self._early_encoder is None:
            self._early_encoder = EarlyEncoder(self._setup.accelerator.device)
        with self._setup.accelerator.autocast():  # as in the model's forward
            timing = step.stopwatch.timing(step.indices[0])
            step.images.encode_ahead(self.vision, self._early_encoder, timing)
