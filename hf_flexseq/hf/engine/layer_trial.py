"""Count the bytes that the layers of a model keep for their backward, and hold in it, for each
token.

A copy of the model without memory runs micro-batches, forward and backward, on fake tensors: with
the user's own modules, adapters and frozen weights, with our attention, recurrent layers and loss,
and with the dtypes of the run. Of layers that are alike one runs; the others pass their input on.

    forward and backward   the live bytes before and behind each layer, and the most in between
                           (`layer_watch.py`)
    forward                with checkpointed layers, which keep an input and attention's results

A model that cannot run so is not counted: `cost/layer_bytes.py` computes its bytes from sizes.
Rejected: counting on the device, which takes memory and arithmetic for bytes that shapes alone
decide.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.remat import KeptAttention, Region
from hf_flexseq.base.patches import Patch
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.activations import Activations, LayerBytes
from hf_flexseq.cost.layer_bytes import with_uneven_experts
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.lone_rank import LoneTransport
from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.layer_memory import decoder_of, reason_not_told
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.mlp_trial import holds_experts
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.rehearsal import (
    CPU,
    FAULTS,
    class_copy,
    fake_copy,
    once_for_equal_models,
    rehearse,
)
from hf_flexseq.hf.model.sharding import has_sharded_modules, unsharded_class
from hf_flexseq.hf.model.tiles import find_mlps
from hf_flexseq.memory.layer_watch import LayerWatch, SeenLayer
from hf_flexseq.memory.live_bytes import LiveBytes, StandInKernel, stand_in_sum
from hf_flexseq.steps.inputs import Inputs, inputs_of, shard_alone, without_labels

logger = logging.getLogger(__name__)

# A prime that no parameter's size has is the number of chunks of 64 tokens in a micro-batch. Its
# sequences have so many chunks at most, for a scan takes a step for each.
_PRIMES = (73, 71, 79, 83, 89, 97, 101)
_CHUNK = 64
_MOST_CHUNKS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedBytes:
    """Bytes of one token that were counted; see `Activations`."""

    kinds: tuple[LayerBytes, ...]
    order: tuple[int, ...]
    base_bytes: float
    head_bytes: float
    mlp_params: int
    """Parameters of the MLPs that can be tiled, all layers."""
    has_experts: tuple[bool, ...]
    """True for each of `kinds` that has experts."""

    def in_place_of(
        self, computed: Activations, shape: ModelShape, imbalance: float = 1.0
    ) -> Activations:
        """Return activations with these bytes instead of those computed from the model's sizes.
        imbalance: of experts that are spread over ranks."""
        kinds = []
        for kind, has_experts in zip(self.kinds, self.has_experts, strict=True):
            uneven = with_uneven_experts(kind, shape, imbalance)
            kinds.append(uneven if has_experts else kind)
        return replace(
            computed,
            kinds=tuple(kinds),
            order=self.order,
            base_bytes=self.base_bytes,
            head_bytes=self.head_bytes,
            mlp_share=shape.share_of(self.mlp_params),
        )


def count_bytes(
    model: PreTrainedModel, *, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> CountedBytes | None:
    """Return the bytes that a token takes in a model, or None where that cannot be tried.

    dtype: of the weights that are computed with. autocast: its dtype; None without.
    """
    return _count(model, dtype, autocast, signature_of(model))


@once_for_equal_models
def _count(
    model: PreTrainedModel, dtype: torch.dtype, autocast: torch.dtype | None, signature: object
) -> CountedBytes | None:
    """Try a model in the first way that works. signature: of its modules and parameters."""
    mlps = [mlp.name for mlp in find_mlps(model).mlps]
    complaints = logging.getLogger("torch._subclasses.fake_tensor")  # of operations that fail
    with Patch(complaints, disabled=True):
        for skips in (True, False):
            for has_own_modules in (True, False):
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                try:
                    whole = _whole(model) if has_own_modules else _of_class(model, dtype)
                    copied = fake_copy(whole, dtype, mode)
                    trial = LayerTrial(copied, mode, autocast, skips=skips)
                    return trial.count(mlps)
                except FAULTS as error:
                    logger.debug("bytes of %s are not counted: %s", type(model).__name__, error)
    return None


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model. Raises ValueError for a sharded one."""
    is_sharded = any(hasattr(parameter, "ds_numel") for parameter in model.parameters())
    if is_sharded or has_sharded_modules(model):
        raise ValueError("its parameters are sharded")
    return model


def _of_class(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy made from class and configuration, frozen where the model is."""
    made = class_copy(model, dtype=dtype)
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    has_frozen = not all(trained.values())
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained.get(name, not has_frozen))
    return made


class KeptInTrials(KeptAttention):
    """Keeps attention's results under a dispatch mode, too, as the fake tensors' mode is one."""

    __slots__ = ()

    def serves(self, region: Region) -> bool:
        """See `KeptAttention.serves`."""
        return region.frame in self._calls if region.replays else self._keeps


class LayerTrial:
    """The runs of one copy."""

    def __init__(
        self,
        model: PreTrainedModel,
        mode: FakeTensorMode,
        autocast: torch.dtype | None,
        *,
        skips: bool,
    ) -> None:
        """skips: True to run one layer of each kind, False to run all."""
        self._mode = mode
        self._autocast = autocast
        self.model = model
        reason = reason_not_told(model)
        if reason is not None:
            raise ValueError(reason)
        decoder: Any = decoder_of(model)
        self._layers = [*decoder.layers]
        self.factor = _factor_of(model)
        self._order = _kinds(self._layers)
        last = {kind: index for index, kind in enumerate(self._order)}
        self._running = sorted(last.values()) if skips else [*range(len(self._layers))]
        self._of_kind = [self._running.index(last[kind]) for kind in sorted(last)]
        # layers whose attention calls are counted one by one, since others make none
        self._counted = {index: self._layers[index] for index in self._running} if skips else None
        self._communicator = Communicator(
            Topology(nodes=1, ranks_per_node=1), transport=LoneTransport()
        )

    def count(self, mlps: Sequence[str]) -> CountedBytes:
        """Run the micro-batches, and return the bytes of one token. mlps: names in the decoder of
        the modules that can be tiled."""
        tiled = [self.model.get_decoder().get_submodule(name) for name in mlps]
        loss = attach_chunked_loss(self.model, stand_in_sum)
        for index, layer in enumerate(self._layers):
            if index not in self._running:
                layer.forward = pass_on
        embedding = self.model.get_input_embeddings()
        embedding.register_forward_hook(_require_grad)  # as below adapters, if all is frozen
        with on_micro_batches(self.model, self._counted):
            watch = self._run(tiled)
            run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            for index in self._running:
                running: Any = self._layers[index]
                running.gradient_checkpointing = True
                running._gradient_checkpointing_func = run_again
            checkpointed = self._run((), is_checkpointed=True)
        if loss is not None:
            loss.detach()
        tokens = self.factor * _CHUNK
        base = watch.layers[0].before - watch.layers[0].input
        held = base
        layers = []
        for seen, with_input in zip(watch.layers, checkpointed.layers, strict=True):
            layers.append(_layer_bytes(seen, with_input, held, tokens))
            held += seen.kept
        return CountedBytes(
            kinds=tuple(layers[place] for place in self._of_kind),
            order=tuple(self._order),
            base_bytes=base / tokens,
            head_bytes=(watch.head - held) / tokens,
            mlp_params=sum(one.numel() for mlp in tiled for one in mlp.parameters()),
            has_experts=tuple(
                holds_experts(self._layers[self._running[place]]) for place in self._of_kind
            ),
        )

    def _run(self, tiled: Sequence[nn.Module], *, is_checkpointed: bool = False) -> LayerWatch:
        """Run forward and backward, or the forward of checkpointed layers alone, and return what
        lived. tiled: MLPs that can be tiled."""
        with self._mode:
            inputs = self.inputs()
        tracker = LiveBytes(self.factor)
        watch = LayerWatch(tracker)
        for index in self._running:
            layer = self._layers[index]
            inside = set(layer.modules())
            watch.on(layer, [mlp for mlp in tiled if mlp in inside])
        if is_checkpointed:
            inputs = without_labels(inputs)
            inputs["seq_ctx"].kept = KeptInTrials()
        else:
            inputs["num_items_in_batch"] = self.factor * _CHUNK
        rehearse(
            self.model,
            inputs,
            tracker,
            mode=self._mode,
            grad=True,
            autocast=self._autocast,
            trains=not is_checkpointed,
        )
        watch.remove()
        return watch

    def inputs(self) -> Inputs:
        """Return the arguments of a call."""
        chunks = self.factor
        lengths = [_MOST_CHUNKS * _CHUNK] * (chunks // _MOST_CHUNKS)
        lengths.append(chunks % _MOST_CHUNKS * _CHUNK)
        names = ("input_ids", "labels", "position_ids", *needed_columns(self.model))
        columns = {name: torch.zeros(sum(lengths), dtype=torch.int64) for name in names}
        context = partial(
            SequenceContext,
            communicator=self._communicator,
            kernel=StandInKernel(),
            device=CPU,
            save_attention_output=False,
        )
        return inputs_of(shard_alone(lengths, 0), columns, CPU, context)


def pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the hidden states that a layer is given."""
    return hidden_states


def _require_grad(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the embeddings of tokens have a gradient."""
    return output if output.requires_grad else output.requires_grad_()


# ---- layers


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Return the kind of each layer, as a number; layers of equal modules have one kind."""
    known: dict[object, int] = {}
    return [known.setdefault(signature_of(layer), len(known)) for layer in layers]


# Switches that every copy has alike: it is in training mode, without checkpointing.
_SAME_IN_COPIES = ("training", "gradient_checkpointing")


def signature_of(layer: nn.Module) -> object:
    """Return a signature that is equal for layers, or models of one configuration, that keep the
    same bytes."""
    parts: list[object] = []
    for name, module in layer.named_modules():
        switches = []
        for key, value in vars(module).items():
            if isinstance(value, bool) and key not in _SAME_IN_COPIES:
                switches.append((key, value))
        parts.append((name, unsharded_class(module), tuple(sorted(switches))))
    for name, parameter in layer.named_parameters():
        parts.append((name, parameter.shape, parameter.dtype, parameter.requires_grad))
    return tuple(parts)


# ---- what was seen


def _layer_bytes(seen: SeenLayer, checkpointed: SeenLayer, held: int, tokens: int) -> LayerBytes:
    """Return the bytes of a token in a layer that ran whole, and in another run checkpointed.
    held: bytes that lived before it."""
    peak = seen.peak - held
    given = checkpointed.behind - checkpointed.before - checkpointed.input
    return LayerBytes(
        input_bytes=seen.input / tokens,
        output_bytes=given / tokens,
        kept_bytes=seen.kept / tokens,
        mlp_bytes=seen.mlp / tokens,
        peak_bytes=peak / tokens,
        tiled_bytes=max(0, seen.tiled) / tokens,
        rest_bytes=(min(peak, seen.rest - held)) / tokens,
    )


def _factor_of(model: nn.Module) -> int:
    """Return a prime that is no factor of any parameter's size."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    for prime in _PRIMES:
        if all(size % prime for size in sizes):
            return prime
    raise ValueError("its parameters have sizes of all kinds")
