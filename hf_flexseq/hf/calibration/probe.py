"""Make small copies of a model to be timed: the same layers, but fewer of them, with weights of no
meaning.

A copy runs micro-batches exactly as training does: packed rows with their sequence context, the
attention of the plan's groups, the chunked loss, the backward; under the same autocast and with
the same checkpointing.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from transformers import PreTrainedConfig

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.facts import ModelFacts, layer_calls
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import RecurrentFunctions
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
        self, facts: ModelFacts, communicator: Communicator, device: torch.device
    ) -> None:
        self._facts = facts
        self._communicator = communicator
        self._device = device

    @cached_property
    def layers(self) -> Counter[LayerType]:
        """How many layers of each type the model has."""
        return Counter(layer_types(self._facts.config))

    def __call__(self, layers: Layers) -> "ModelProbe":
        """Make a copy with so many layers of each type. Raises ValueError, naming the layer, if
        no kernel serves all layers."""
        calls = layer_calls(self._facts.config)
        kernel = choose_kernels(self._device, self._facts.compute_dtype, calls)
        kept = kept_layers(self._facts.config, layers)
        return ModelProbe(self._facts, kept, kernel, self._communicator, self._device)


class ModelProbe:
    """A copy of a model with some of its layers on `device`.

    The random numbers of the run stay as they are.
    """

    def __init__(
        self,
        facts: ModelFacts,
        kept: Sequence[int],
        kernel: Kernel,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        """kept: indices of the layers that the copy has."""
        self.facts = facts
        self.kernel = kernel
        self.communicator = communicator
        self.device = device
        # 1. the copy, with random weights
        with untouched_random_numbers(device), torch.device(device):
            model = facts.kind(shortened(facts.config, kept)).to(facts.dtype).train()
        # 2. everything that changes its seconds in training
        model.set_attn_implementation(NAME)
        attach_chunked_loss(model)
        attach_positions(model)
        if facts.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if facts.frozen:
            model.requires_grad_(False)
            model.enable_input_require_grads()  # else there would be no backward at all
        self.model = model

    def run(self, layout: ProbeLayout) -> Run:
        """Return a function that runs one micro-batch, forward and backward, whenever called."""
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
        autocast = torch.autocast(  # may be entered again and again
            self.device.type, self.facts.autocast, enabled=self.facts.autocast is not None
        )

        recurrent = RecurrentFunctions(self.model)

        def forward_backward() -> None:
            with recurrent.attached():
                with autocast:
                    outputs = self.model(**inputs, use_cache=False, num_items_in_batch=items)
                outputs.loss.backward()

        return forward_backward

    def _columns(self, shard: Shard, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Make tokens and labels of no meaning for the shard, each column [tokens].

        lengths: tokens of every sequence, by id.
        Tokens stand at the positions that they have in their sequences, as far as the model knows
        such positions.
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
    """Choose the first layers of a model with so many of each type."""
    left = Counter(layers)
    kept = []
    for index, kind in enumerate(layer_types(config)):
        if left[kind]:
            left[kind] -= 1
            kept.append(index)
    return kept


def shortened(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Copy `config`, with only the layers at the indices `kept`.

    Every list with an entry for each layer keeps those of these. Layers that read the keys of
    others, and dense ones at the start of a model with experts, are replaced by what most layers
    are.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers = text.num_hidden_layers
    if len(kept) == layers:
        return short
    text.num_hidden_layers = len(kept)
    for name, value in list(vars(text).items()):
        if name == "time_step_limit":  # two numbers, whatever the layers
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


@contextmanager
def untouched_random_numbers(device: torch.device) -> Iterator[None]:
    """Put the generators of the CPU and of `device` back to their state before the block."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
