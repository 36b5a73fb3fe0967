"""Run the layers of an unmodified decoder as a micro-batch's choice for memory says.

transformers asks one function of a layer what to do with its forward:

    layer.gradient_checkpointing          True: the function below runs the forward
    layer._gradient_checkpointing_func    called with the forward and its positional arguments, of
                                          which the first are the hidden states

During a call of the decoder that belongs to a planned step both are ours, and afterwards again
what they were. A layer that is run again in the backward goes through torch's checkpoint; its
input goes to the host by hooks on saved tensors around that call, which see the arguments of the
layer alone; what its attention or its scan gives goes where `attention/remat.py` is told.

Without a choice for the micro-batch the layers do as the user has set them for the run. That is
left to transformers, but for `offload`, with which transformers brings layers' inputs to the host:
these and the results of attention go to our store then.

Rejected: another forward for the layers, which wrappers replace, too. Rejected: to replace the
function as long as a model is attached, since its owner may replace it at any time, and a flag
that is on makes the Trainer think that the user has asked for checkpointing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_flexseq.attention import SequenceContext
from hf_flexseq.hf.model.checkpointing import CHECKPOINT, FLAG, FUNCTION, offloads, options_of
from hf_flexseq.hf.model.patches import Patch
from hf_flexseq.memory.store import HostStore, HostTensor
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.steps.users_code import users_forward_hooks


@dataclass(frozen=True, kw_only=True, slots=True)
class AsSet:
    """What the user has set for the run, which may be every second layer; a `MemoryChoice` names
    the first layers alone."""

    checkpointed: tuple[bool, ...]
    """By layer."""
    offload: bool
    """True if inputs and attention's results of checkpointed layers are on the host."""
    save_attention_output: bool
    """True if the results of attention are kept at all."""

    @property
    def uses_host(self) -> bool:
        """True if anything is on the host."""
        return self.offload

    def recomputes(self, layer: int) -> bool:
        """Return True if this layer runs again in the backward."""
        return self.checkpointed[layer]

    def input_on_host(self, layer: int) -> bool:
        """Return True if the input of this layer is on the host."""
        return self.checkpointed[layer] and self.offload

    def output_on_host(self, layer: int) -> bool:
        """Return True if the output of this layer's attention is on the host."""
        return self.input_on_host(layer) and self.save_attention_output

    def recomputes_output(self, layer: int) -> bool:
        """Return True if this layer's attention runs again in the backward."""
        return self.checkpointed[layer] and not self.save_attention_output

    def in_front(self) -> MemoryChoice:
        """Return the choice with as many checkpointed layers, which are the first ones."""
        count = sum(self.checkpointed)
        on_host = count if self.offload else 0
        return MemoryChoice(
            recomputed_layers=count,
            inputs_on_host=on_host,
            outputs_on_host=on_host if self.save_attention_output else 0,
            outputs_recomputed=0 if self.save_attention_output else count,
        )


class LayerMemory:
    """The layers of one model's decoder, and the store for what of theirs is on the host."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        save_attention_output: bool,
        make_store: Callable[[], HostStore],
    ) -> None:
        """make_store: called when the first tensor goes to the host. Raises NotImplementedError
        where the user has set `offload` and the layers cannot be told what to do."""
        self.reason_without_choices = reason_without_choices(model)
        """Why no plan may choose what the layers do; None if it may. Ranks whose hooks differ have
        different reasons; `WholeModel` gives all ranks one."""
        self.layers: tuple[nn.Module, ...] = ()
        self.store: HostStore | None = None
        """The store, once anything has gone to the host."""
        self._save_attention_output = save_attention_output
        self._make_store = make_store
        self._told = ExitStack()  # what the layers do in the call that runs now
        decoder = decoder_of(model)
        if decoder is not None and reason_not_told(model, decoder) is None:
            self._decoder = decoder
            self.layers = tuple(decoder.layers)
        elif any(offloads(module) for module in model.modules()):
            raise NotImplementedError(
                f"offload=True of activation checkpointing with {type(model).__name__}: "
                f"{self.reason_without_choices}; leave offload out"
            )

    # ---- what the user has set

    @property
    def as_set(self) -> AsSet:
        """What the user has set for the run, as it is now."""
        return AsSet(
            checkpointed=tuple(bool(getattr(layer, FLAG)) for layer in self.layers),
            offload=any(offloads(layer) for layer in self.layers),
            save_attention_output=self._save_attention_output,
        )

    # ---- calls of the decoder

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let planned calls obey their choices inside the block, which ends with the store."""
        hooks = []
        if self.layers:
            begin = self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
            end = self._decoder.register_forward_hook(self._end, always_call=True)
            hooks = [begin, end]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._told.close()
            if self.store is not None:
                self.store.close()
                self.store = None

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the layers the functions of this call, if they do not do as they are set."""
        self._told.close()  # torch runs no hook after a call that Ctrl-C has ended
        context = kwargs.get("seq_ctx")
        if not isinstance(context, SequenceContext):
            return
        choices: MemoryChoice | AsSet | None = context.memory
        if choices is None:
            choices = self.as_set
            if not choices.offload:
                return
        else:
            assert self.reason_without_choices is None, "a plan chooses for layers that cannot"
        if choices.uses_host and self.store is None:
            self.store = self._make_store()
        call = _DecoderCall(choices, context, self.store)
        for number, layer in enumerate(self.layers):
            # Where the host has a part, it is told of every layer that begins.
            flag = choices.recomputes(number) or choices.uses_host
            function = partial(call.run, number, options_of(layer))
            self._told.enter_context(Patch(layer, **{FLAG: flag, FUNCTION: function}))

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """End a call, whatever has become of it."""
        self._told.close()
        if self.store is not None:
            self.store.settle()


class _DecoderCall:
    """One call of a decoder under a choice."""

    def __init__(
        self, choices: MemoryChoice | AsSet, context: SequenceContext, store: HostStore | None
    ) -> None:
        self._choices = choices
        self._kept = context.kept
        self._store = store if choices.uses_host else None

    def run(
        self, layer: int, options: dict[str, Any], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run the forward of a layer on its positional arguments. options: for torch's
        checkpoint."""
        if not torch.is_grad_enabled():
            return function(*args)
        if self._store is not None:
            self._store.begin_layer()
        if not self._choices.recomputes(layer):
            outputs = function(*args)
        else:
            with self._of_attention(layer), self._of_input(layer, args):
                outputs = checkpoint(function, *args, **options)
        if self._store is not None and self._is_first_without_host(layer):
            self._store.come_ahead(outputs[0] if isinstance(outputs, tuple) else outputs)
        return outputs

    def _is_first_without_host(self, layer: int) -> bool:
        """Tell whether a layer has nothing on the host, and the one before it has."""
        return layer > 0 and self._on_host(layer - 1) and not self._on_host(layer)

    def _on_host(self, layer: int) -> bool:
        return self._choices.input_on_host(layer) or self._choices.output_on_host(layer)

    def _of_attention(self, layer: int) -> AbstractContextManager[None]:
        """Say where the results of attention wait for the replay."""
        if self._kept is None:
            return nullcontext()
        return self._kept.of_layer(
            keeps=not self._choices.recomputes_output(layer),
            host=self._store if self._choices.output_on_host(layer) else None,
        )

    def _of_input(self, layer: int, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """Bring the hidden states to the host that the layer is given. Raises NotImplementedError
        where they are not its first positional argument."""
        if not self._choices.input_on_host(layer):
            return nullcontext()
        assert self._store is not None, "a choice that uses the host has a store"
        if not args or not isinstance(args[0], torch.Tensor):
            raise NotImplementedError(
                f"layer {layer} is not given hidden states first, so that its input cannot be on "
                "the host: set activation_memory='as_set', without offload"
            )
        return _OnHost(args[0], self._store)


class _OnHost(saved_tensors_hooks):
    """Brings one tensor to the host when it is saved. What else is saved stays where it is: other
    arguments of a layer may be tensors that all layers share."""

    def __init__(self, chosen: torch.Tensor, store: HostStore) -> None:
        self._chosen: torch.Tensor | None = chosen  # until it is saved: hooks live as long
        self._store = store
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostTensor:
        if self._chosen is None or not _is_same(tensor, self._chosen):
            return tensor
        self._chosen = None
        return self._store.put(tensor)


def _is_same(saved: torch.Tensor, given: torch.Tensor) -> bool:
    """Tell whether a saved tensor is one that was given: another object over its memory."""
    if saved.untyped_storage() is not given.untyped_storage():
        return False
    return saved.shape == given.shape and saved.storage_offset() == given.storage_offset()


def _unpack(packed: torch.Tensor | HostTensor) -> torch.Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed


# ---- which models


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that calls the text layers, its `layers`; None if it is not found."""
    for candidate in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(getattr(candidate, "layers", None), nn.ModuleList):
            return candidate
    return None


def reason_not_told(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """Return why the layers of a decoder cannot be told what to do; None if they can."""
    for layer in decoder.layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            return f"{type(layer).__name__} is no layer that transformers can checkpoint"
        inside = (inner for inner in layer.modules() if inner is not layer)
        if any(isinstance(inner, GradientCheckpointingLayer) for inner in inside):
            return f"{type(layer).__name__} has layers inside that are checkpointed themselves"
    if not model.supports_gradient_checkpointing:
        return f"{type(model).__name__} does not support activation checkpointing"
    return None


def reason_without_choices(model: PreTrainedModel) -> str | None:
    """Return why a plan may not choose what the layers of a model do with their activations; None
    if it may."""
    decoder = decoder_of(model)
    if decoder is None:
        return f"{type(model).__name__} has no list of layers where a decoder has it"
    reason = reason_not_told(model, decoder)
    if reason is not None:
        return reason
    count = model.config.get_text_config().num_hidden_layers
    if len(decoder.layers) != count:
        return f"it has {len(decoder.layers)} layers, and num_hidden_layers={count}"
    for layer in decoder.layers:
        reason = _reason_of_user(layer) if getattr(layer, FLAG) else _reason_of_hooks(layer)
        if reason is not None:
            return reason
    return None


def _reason_of_hooks(layer: nn.Module) -> str | None:
    """Return what of the user's would run twice in a layer that is not to run again. Hooks on the
    layer itself would not: transformers checkpoints its forward without them."""
    for name, child in layer.named_children():
        if any(users_forward_hooks(child)):
            return f"a hook of yours in {name} of {type(layer).__name__} would run twice"
    return None


def _reason_of_user(layer: nn.Module) -> str | None:
    """Return what the user has set for a checkpointed layer that a choice would not obey."""
    function = getattr(layer, FUNCTION, CHECKPOINT)
    if getattr(function, "func", function) is not checkpoint and not offloads(layer):
        return f"{type(layer).__name__} is checkpointed by a function of its own"
    if "context_fn" in options_of(layer):
        return "selective activation checkpointing decides what is kept"
    return None
