"""Small copies of a model for timing: the same layers, but fewer, with random weights.

A copy runs micro-batches exactly as training does: packed rows with their sequence context, the
attention of the plan's groups, the chunked loss and the backward, with the same autocast and
checkpointing.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial

import torch
from transformers import PreTrainedConfig

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup
from hf_flexseq.distributed.process_groups import ProcessGroupRanks
from hf_flexseq.distributed.transport import RankGroup
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.calibration.expert_copies import (
    ExpertMeshes,
    PlaceExperts,
    expert_modules,
    leave_as_they_are,
    leave_out,
    put_over_ranks,
)
from hf_flexseq.hf.calibration.tower_trial import TriedTower, try_tower
from hf_flexseq.hf.model.facts import ModelFacts, layer_calls
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.meta_model import attention_of_text, without_sharding
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.quantized import quantization_of, quantized
from hf_flexseq.hf.model.recurrent import RecurrentFunctions
from hf_flexseq.hf.model.towers import ADAPTERS, train_tower
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.profiler.design import Layers, LayerType, ProbeLayout
from hf_flexseq.profiler.measure import Run
from hf_flexseq.steps.inputs import inputs_of
from hf_flexseq.steps.token_columns import INDICES, LENGTHS


class ModelProbes:
    """The profiler's `ProbeFactory` for one HF model."""

    def __init__(
        self,
        facts: ModelFacts,
        communicator: Communicator,
        device: torch.device,
        meshes: ExpertMeshes | None = None,
    ) -> None:
        """meshes: of the ranks that experts lie on; None where every rank computes its own."""
        self._facts = facts
        self._communicator = communicator
        self._device = device
        self._meshes = meshes
        self._expert_layers: dict[tuple[int, ...], int] = {}  # by the indices of layers

    @cached_property
    def layers(self) -> Counter[LayerType]:
        """Number of layers of each type."""
        return Counter(layer_types(self._facts.config))

    def expert_layers(self, layers: Layers) -> int:
        """Count the layers with experts over ranks in a copy."""
        kept = tuple(kept_layers(self._facts.config, layers))
        if self._meshes is not None and kept not in self._expert_layers:
            with torch.device("meta"), without_sharding():
                empty = self._facts.kind(shortened(self._facts.config, kept))
            self._expert_layers[kept] = len(expert_modules(empty))
        return self._expert_layers.get(kept, 0)

    @cached_property
    def _tried(self) -> TriedTower | None:
        """What is known of the model's tower; None without one, or where it cannot be run."""
        return try_tower(self._facts)

    @property
    def image_sizes(self) -> Sequence[int]:
        """Patches of the images that the tower can be run on, ascending."""
        return () if self._tried is None else self._tried.patches

    @property
    def expert_group(self) -> RankGroup:
        """The expert group of this rank, if experts lie on several ranks."""
        assert self._meshes is not None, "experts lie on several ranks"
        cpu_group = self._communicator.cpu_group
        assert isinstance(cpu_group, GlooCpuGroup), "transformers' ranks are torch's"
        return ProcessGroupRanks(self._meshes.experts.get_group(), cpu_group)

    def __call__(self, layers: Layers, *, with_experts: bool = True) -> "ModelProbe":
        """Make a copy with so many layers of each type. Raises ValueError without a kernel.
        with_experts: False to leave out experts over ranks."""
        calls = layer_calls(self._facts.config)
        kernel = choose_kernels(self._device, self._facts.compute_dtype, calls)
        kept = kept_layers(self._facts.config, layers)
        place: PlaceExperts = leave_as_they_are
        if self._meshes is not None:
            place = partial(put_over_ranks, self._meshes) if with_experts else leave_out
        return ModelProbe(
            self._facts, kept, kernel, self._communicator, self._device, place, self._tried
        )


class ModelProbe:
    """A copy of a model with some of its layers on `device`, made without the run's random
    numbers."""

    def __init__(
        self,
        facts: ModelFacts,
        kept: Sequence[int],
        kernel: Kernel,
        communicator: Communicator,
        device: torch.device,
        place_experts: PlaceExperts,
        tried_tower: TriedTower | None,
    ) -> None:
        """kept: indices of the layers of the copy. place_experts: does with its experts what has
        to be done. tried_tower: what is known of its tower; None if that is not run."""
        self.facts = facts
        self.kernel = kernel
        self.communicator = communicator
        self.device = device
        # 1. the copy, with random weights
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            model = facts.kind(shortened(facts.config, kept)).to(facts.dtype)
            quantization = quantization_of(facts.config)
            if quantization is not None:
                model = quantized(model, quantization)
            model.train()
            self._experts = place_experts(model)
        # 2. everything that changes its timing in training
        model.set_attn_implementation(attention_of_text(model, NAME))
        attach_chunked_loss(model)
        attach_positions(model)
        if facts.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if facts.frozen:
            model.requires_grad_(False)
            model.enable_input_require_grads()  # otherwise nothing requires grad
        train_tower(model, facts.trained_tower)
        self.model = model
        self._tried = tried_tower

    def run(self, layout: ProbeLayout) -> Run:
        """Return a function that runs forward and backward of one micro-batch."""
        shard = make_shard(layout.micro_batch, layout.lengths, self.communicator.rank)
        inputs = inputs_of(
            shard,
            self._columns(shard, layout.lengths),
            self.device,
            partial(
                SequenceContext,
                communicator=self.communicator,
                kernel=self.kernel,
                device=self.device,
                save_attention_output=self.facts.save_attention_output,
            ),
        )
        items = sum(layout.lengths)
        autocast = self._autocast()
        recurrent = RecurrentFunctions(self.model)

        def forward_backward() -> None:
            with recurrent.attached():
                with autocast:
                    outputs = self.model(**inputs, use_cache=False, num_items_in_batch=items)
                outputs.loss.backward()

        return forward_backward

    def run_experts(self, tokens: int, *, to_first: bool) -> Run:
        """Return a function that runs the experts of one layer, forward and backward, on so many
        tokens of this rank. Raises ValueError for a copy without any on several ranks. to_first:
        see `ExpertsShape`."""
        if not self._experts:
            raise ValueError("no layer of the copy has experts on several ranks")
        checkpointed = self.facts.checkpointing
        run = self._experts[0].run(tokens, to_first=to_first, checkpointed=checkpointed)
        autocast = self._autocast()

        def forward_backward() -> None:
            with autocast:
                run()

        return forward_backward

    def run_tower(self, images: int, patches: int) -> Run:
        """Return a function that encodes so many equal images of `patches` patches in one call,
        with a backward where the tower is trained."""
        assert self._tried is not None, "the tower can be run"
        drawn = [self._tried.draw(patches)] * images
        parts = self.facts.trained_tower
        if ADAPTERS in parts:  # which the copy does not have: gradients go through it
            for image in drawn:
                for value in image.arguments.values():
                    value.requires_grad_(value.is_floating_point())
        calls = self._vision.calls(drawn)
        autocast = self._autocast()

        def forward_backward() -> None:
            with torch.set_grad_enabled(bool(parts)), autocast:
                features = self._vision.encode(drawn, calls)
            if parts:
                features.sum().backward()

        return forward_backward

    @cached_property
    def _vision(self) -> VisionModel:
        return VisionModel(self.model)

    def _autocast(self) -> AbstractContextManager[None]:
        """Return autocast as in training, which can be entered again and again."""
        dtype = self.facts.autocast
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _columns(self, shard: Shard, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Make arbitrary tokens and labels for the shard, each column [tokens].

        lengths: tokens of every sequence, by id. Positions are those in the sequences, clamped to
        the largest position that the model supports.
        """
        config = self.facts.config.get_text_config()
        last_position = (getattr(config, "max_position_embeddings", None) or 2**31) - 1
        positions = torch.empty(0, dtype=torch.int64)
        own_lengths = torch.empty(0, dtype=torch.int64)
        for part in shard.slices:
            positions = torch.cat([positions, torch.arange(part.start, part.stop)])  # [tokens]
            length = torch.full((part.tokens,), lengths[part.sequence])
            own_lengths = torch.cat([own_lengths, length])  # [tokens]
        tokens = positions % config.vocab_size
        columns = {
            "input_ids": tokens,
            "labels": tokens,
            "position_ids": positions.clamp(max=last_position),
        }
        known = {LENGTHS: own_lengths, INDICES: positions}
        for name in needed_columns(self.model):
            columns[name] = known[name]
        return columns


def layer_types(config: PreTrainedConfig) -> list[LayerType]:
    """Return the type of each layer of a model."""
    types = []
    for layer in layers_of(config.get_text_config()):
        reach = None if layer.attention is None else layer.attention.reach
        recurrent = None if layer.recurrent is None else layer.recurrent.kind
        types.append(LayerType(reach, recurrent))
    return types


def kept_layers(config: PreTrainedConfig, layers: Layers) -> list[int]:
    """Return the indices of the first layers of each type, as many as `layers` asks for."""
    left = Counter(layers)
    kept = []
    for index, kind in enumerate(layer_types(config)):
        if left[kind]:
            left[kind] -= 1
            kept.append(index)
    return kept


def shortened(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Copy `config`, with only the layers at the indices `kept`.

    Lists with one entry per layer are shortened accordingly. Layers with shared keys, and dense
    first layers of a model with experts, are replaced by the most common kind.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers = text.num_hidden_layers
    if len(kept) == layers:
        return short
    text.num_hidden_layers = len(kept)
    for name, value in list(vars(text).items()):
        if name == "time_step_limit":  # always two numbers
            continue
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, [value[index] for index in kept])
    for name in ("attn_layer_indices", "hybrid_layer_ids"):
        numbers = getattr(text, name, None)
        if numbers is not None:
            setattr(text, name, [kept.index(one) for one in numbers if one in kept])
    for name in ("num_kv_shared_layers", "first_k_dense_replace"):
        if getattr(text, name, None):
            setattr(text, name, 0)
    return short
