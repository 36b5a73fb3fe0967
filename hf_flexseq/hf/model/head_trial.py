"""Run the head of an empty model, to see what its `forward` makes of logits and labels.

The forward is called once with labels, as hf_flexseq calls it, with stand-ins for three things:

    the decoder            returns empty hidden states
    loss_function          notes its arguments and returns 0
    the router loss        notes its arguments and returns 1

So the loss of the outputs is the coefficient of the router loss. A module is the head of the model
if the tensor that it returns is the one that reaches the loss and the outputs, and if nothing else
is done with this tensor. What is called on the way is seen by a TorchFunctionMode.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_flexseq.hf.model.rehearsal import (
    FAULTS,
    TOKENS,
    class_copy,
    in_one_line,
    once_for_equal_models,
    rehearse,
    row_of,
)

ROUTER_LOSS = "load_balancing_loss_func"
"""Name of transformers' router loss, a function in the file of a model."""


@dataclass(slots=True)
class HeadTrial:
    """Findings about a forward's logits and labels."""

    head: str | None = None
    """Name of the module that made the logits; None if anything else happens to them."""
    reason: str | None = None
    """Reason why the model needs whole logits; None with a head."""
    gives_items: bool = False
    """True if the forward gives num_items_in_batch to the model's loss_function."""
    has_own_loss: bool = False
    """True if the forward computes a loss without the model's loss_function."""
    top_k: int | None = None
    """Experts per token, as the router loss gets it; None without one."""
    coefficient: float = 0.0
    """Factor of the router loss in the loss of the model."""


@once_for_equal_models
def try_head(model: PreTrainedModel) -> HeadTrial:
    """Call the forward of an empty copy of `model` with labels, and return what it did."""
    watch = _Watch()
    given: dict[str, Any] = dict(row_of("input_ids", "position_ids", "labels", "shift_labels"))
    given["num_items_in_batch"] = torch.tensor(TOKENS, device="meta")
    router = _Spy(1.0)
    loss = _Spy(0.0)
    try:
        # Ours may be set, and needs a batch; some forwards run the decoder past its stand-in.
        tried = class_copy(model, attention="eager")
        forward = _prepared(tried, watch, loss, router, given)
        outputs = rehearse(forward, given, watch)
    except FAULTS as error:
        return HeadTrial(
            reason=f"its forward could not be tried with labels ({in_one_line(error)})",
            has_own_loss=bool(watch.cross_entropies) and not loss.calls,
        )
    return _judged(watch, loss, router, given, outputs)


def _prepared(
    tried: PreTrainedModel,
    watch: "_Watch",
    loss: "_Spy",
    router: "_Spy",
    given: dict[str, Any],
) -> Callable[..., Any]:
    """Put the stand-ins into a meta model, and return its forward. given: arguments of the
    forward, to which a router loss is added."""
    # 1. the decoder, and the modules outside of it that may be the head
    decoder = _decoder_of(tried)
    decoder.forward = partial(_hidden_states, _head_width(tried))
    inside = set(decoder.modules())
    for name, module in tried.named_modules():
        if module not in inside and module is not tried:
            module.register_forward_hook(partial(watch.note_output, name))
    # 2. the losses
    tried.loss_function = loss
    forward = inspect.unwrap(type(tried).forward)
    if ROUTER_LOSS not in forward.__globals__:
        return partial(type(tried).forward, tried)
    # No global is replaced: other threads may run the model.
    scope = {**forward.__globals__, ROUTER_LOSS: router}
    with_router = types.FunctionType(
        forward.__code__, scope, None, forward.__defaults__, forward.__closure__
    )
    with_router.__kwdefaults__ = forward.__kwdefaults__
    given["output_router_logits"] = True
    return partial(with_router, tried)


def _decoder_of(tried: PreTrainedModel) -> nn.Module:
    """Return the part of a model, next to its head, that has the embedding of its tokens."""
    embedding = tried.get_input_embeddings()
    for child in tried.children():
        if embedding in child.modules():
            return child
    raise ValueError("its embedding of tokens is not in a decoder")


def _head_width(tried: PreTrainedModel) -> int:
    """Return the size of the hidden states that the head of a model reads."""
    weight = getattr(tried.get_output_embeddings(), "weight", None)
    if weight is not None:
        return int(weight.shape[-1])
    return int(tried.config.get_text_config().hidden_size)


class _DecoderOutput(MoeModelOutputWithPast):
    """Outputs of a decoder, with None for all that it does not have."""

    def __getattr__(self, name: str) -> None:
        """Return None for an output of another kind of decoder."""
        if name.startswith("__"):
            raise AttributeError(name)


def _hidden_states(width: int, *args: Any, **kwargs: Any) -> _DecoderOutput:
    """Return empty hidden states [1, tokens, width] as a decoder would."""
    hidden = torch.empty(1, TOKENS, width, dtype=torch.bfloat16)
    return _DecoderOutput(last_hidden_state=hidden, router_logits=())


@dataclass(slots=True)
class _Spy:
    """A loss that notes its arguments."""

    value: float
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        return torch.tensor(self.value, dtype=torch.float64, device="cpu")

    def argument(self, index: int, name: str) -> Any:
        """Return an argument of the last call, by its place or its name; None without it."""
        args, kwargs = self.calls[-1]
        return args[index] if len(args) > index else kwargs.get(name)


class _Watch(TorchFunctionMode):
    """Notes what modules return, and which functions are given it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[str, torch.Tensor]] = []
        """Names of modules, and the tensors that they returned."""
        self.uses: list[tuple[torch.Tensor, str]] = []
        """Arguments of functions, and the functions' names."""
        self.cross_entropies = 0

    def note_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module has returned."""
        if isinstance(output, torch.Tensor):
            self.outputs.append((name, output))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a function and its arguments, and call it."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            self.cross_entropies += 1
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Tensor):
                self.uses.append((argument, getattr(func, "__name__", str(func))))
        return func(*args, **kwargs)


def _judged(
    watch: _Watch, loss: _Spy, router: _Spy, given: dict[str, Any], outputs: Any
) -> HeadTrial:
    """Return what a finished forward has done. given: arguments. outputs: results."""
    trial = HeadTrial(has_own_loss=not loss.calls)
    if router.calls:
        trial.top_k = router.argument(2, "top_k")
        trial.coefficient = float(outputs.loss)
    if loss.calls:
        items = loss.calls[0][1].get("num_items_in_batch")
        trial.gives_items = items is given["num_items_in_batch"]
    if len(loss.calls) != 1 or watch.cross_entropies:
        trial.reason = "its forward does not call its loss_function just once"
        return trial
    if loss.argument(1, "labels") is not given["labels"]:
        trial.reason = "its forward changes the labels"
        return trial
    for name in ("shift_labels", "num_items_in_batch"):
        if loss.calls[0][1].get(name) is not given[name]:
            trial.reason = f"its forward does not give {name} to its loss_function"
            return trial
    logits = loss.argument(0, "logits")
    makers = [name for name, output in watch.outputs if output is logits]
    uses = [use for tensor, use in watch.uses if tensor is logits]
    if len(makers) != 1 or uses or getattr(outputs, "logits", None) is not logits:
        done = f" ({uses[0]})" if uses else ""
        trial.reason = f"its forward does more with the logits than to pass them on{done}"
        return trial
    calls = [name for name, _ in watch.outputs if name == makers[0]]
    if len(calls) != 1:
        trial.reason = f"its forward calls its {makers[0]} {len(calls)} times"
        return trial
    trial.head = makers[0]
    return trial
