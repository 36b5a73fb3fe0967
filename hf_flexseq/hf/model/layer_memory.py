"""Run the layers of an unmodified decoder as a micro-batch's choice for memory says.

transformers asks one function of a layer what to do with its forward:

    layer.gradient_checkpointing          True: the function below runs the forward
    layer._gradient_checkpointing_func    called with the forward and its positional arguments, of
                                          which the first are the hidden states

During a call of the decoder that belongs to a planned step both are ours; afterwards both are
restored. A layer that is run again in the backward goes through torch's checkpoint; its input goes
to the host by hooks on saved tensors around that call, which see the arguments of the layer alone;
the results of its attention or its scan go where `attention/remat.py` is told.

Without a choice for the micro-batch the layers do as the user has set them for the run. That is
left to transformers, but for `offload`, with which transformers brings layers' inputs to the host:
these and the results of attention go to our store then.

Rejected: another forward for the layers, which wrappers replace, too. Rejected: to replace the
function as long as a model is attached, since its owner may replace it at any time, and a flag
that is on makes the Trainer think that the user has asked for checkpointing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.remat import KeptAttention
from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.checkpointing import CHECKPOINT, FLAG, FUNCTION, offloads, options_of
from hf_flexseq.memory.store import HostStore, HostTensor
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.steps.users_code import users_forward_hooks


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
        """Why no plan may choose for the layers; None if it may. Ranks whose hooks differ have
        different reasons; `WholeModel` gives all ranks one."""
        self.layers: tuple[nn.Module, ...] = ()
        self.store: HostStore | None = None
        """The store, once anything has gone to the host."""
        self._save_attention_output = save_attention_output
        self._make_store = make_store
        self._told = ExitStack()  # patches of the layers in the running call
        if reason_not_told(model) is None:
            decoder: Any = decoder_of(model)
            self._decoder = decoder
            self.layers = tuple(decoder.layers)
        elif any(offloads(module) for module in model.modules()):
            raise NotImplementedError(
                f"offload=True of activation checkpointing with {type(model).__name__}: "
                f"{self.reason_without_choices}; leave offload out"
            )

    # ---- what the user has set

    @property
    def as_set(self) -> MemoryChoice:
        """The user's setting for the run, as it is now: the choice with as many checkpointed
        layers, which may be every second one (`_places`)."""
        count = sum(map(_is_checkpointed, self.layers))
        on_host = count if any(map(offloads, self.layers)) else 0
        return MemoryChoice(
            recomputed_layers=count,
            inputs_on_host=on_host,
            outputs_on_host=on_host if self._save_attention_output else 0,
            outputs_recomputed=0 if self._save_attention_output else count,
        )

    def _places(self) -> list[int]:
        """Return the place of each layer where the checkpointed ones come first."""
        numbers = range(len(self.layers))
        in_order = sorted(numbers, key=lambda number: not _is_checkpointed(self.layers[number]))
        return [in_order.index(number) for number in numbers]

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
        choice: MemoryChoice | None = context.memory
        places: Sequence[int] = range(len(self.layers))
        if choice is None:
            choice, places = self.as_set, self._places()
            if not choice.uses_host:
                return
        else:
            assert self.reason_without_choices is None, "a plan chooses for layers that cannot"
        if choice.uses_host and self.store is None:
            self.store = self._make_store()
        before: _LayerCall | None = None
        for number, layer in enumerate(self.layers):
            call = _LayerCall(
                number=number,
                place=places[number],
                choice=choice,
                options=options_of(layer),
                kept=context.kept,
                store=self.store if choice.uses_host else None,
                is_behind_host=before is not None and before.is_on_host,
            )
            # Where the host has a part, it is told of every layer that begins.
            flag = choice.recomputes(call.place) or choice.uses_host
            self._told.enter_context(Patch(layer, **{FLAG: flag, FUNCTION: call.run}))
            before = call

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """End a call, whatever has become of it."""
        self._told.close()
        if self.store is not None:
            self.store.settle()


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerCall:
    """One call of a layer under a choice."""

    number: int
    place: int
    """Where the layer stands for the choice."""
    choice: MemoryChoice
    options: dict[str, Any]
    """Of torch's checkpoint."""
    kept: KeptAttention | None
    store: HostStore | None
    """None for a choice that does not use the host."""
    is_behind_host: bool
    """True if the layer before has something on the host."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the forward of the layer on its positional arguments."""
        if not torch.is_grad_enabled():
            return function(*args)
        if self.store is not None:
            self.store.begin_layer()
        if not self.choice.recomputes(self.place):
            outputs = function(*args)
        else:
            with self._of_attention(), self._of_input(args):
                outputs = checkpoint(function, *args, **self.options)
        if self.store is not None and self.is_behind_host and not self.is_on_host:
            self.store.come_ahead(outputs[0] if isinstance(outputs, tuple) else outputs)
        return outputs

    @property
    def is_on_host(self) -> bool:
        """True if the layer has something on the host."""
        choice, place = self.choice, self.place
        return choice.input_on_host(place) or choice.output_on_host(place)

    def _of_attention(self) -> AbstractContextManager[None]:
        """Say where the results of attention wait for the replay."""
        if self.kept is None:
            return nullcontext()
        return self.kept.of_layer(
            keeps=not self.choice.recomputes_output(self.place),
            host=self.store if self.choice.output_on_host(self.place) else None,
        )

    def _of_input(self, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """Bring the hidden states to the host that the layer is given. Raises NotImplementedError
        where they are not its first positional argument."""
        if not self.choice.input_on_host(self.place):
            return nullcontext()
        assert self.store is not None, "a choice that uses the host has a store"
        if not args or not isinstance(args[0], torch.Tensor):
            raise NotImplementedError(
                f"layer {self.number} is not given hidden states first, so that its input cannot "
                "be on the host: set activation_memory='as_set', without offload"
            )
        return _OnHost(args[0], self.store)


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


def _is_checkpointed(layer: nn.Module) -> bool:
    return bool(getattr(layer, FLAG))


# ---- which models


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that calls the text layers, its `layers`; None if it is not found."""
    for candidate in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(getattr(candidate, "layers", None), nn.ModuleList):
            return candidate
    return None


def reason_not_told(model: PreTrainedModel) -> str | None:
    """Return why the layers of a model's decoder cannot be told what to do; None if they can."""
    decoder = decoder_of(model)
    if decoder is None:
        return f"{type(model).__name__} has no list of layers where a decoder has it"
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
    """Return why a plan may not choose how a model's layers treat their activations; None if it
    may."""
    reason = reason_not_told(model)
    if reason is not None:
        return reason
    decoder: Any = decoder_of(model)
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
    """Return the user's setting for a checkpointed layer that a choice would not obey."""
    function = getattr(layer, FUNCTION, CHECKPOINT)
    if getattr(function, "func", function) is not checkpoint and not offloads(layer):
        return f"{type(layer).__name__} is checkpointed by a function of its own"
    if "context_fn" in options_of(layer):
        return "selective activation checkpointing decides what is kept"
    return None
