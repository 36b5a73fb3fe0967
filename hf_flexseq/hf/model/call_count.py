"""Count attention calls in every planned forward of a model, layer by layer.

The trial (`trial.py`) runs a copy that is made from class and configuration. The model that trains
may be another one: a layer may have a configuration of its own, and with it the attention that it
was loaded with; attention may be replaced when the model has been looked at, by a callback or a
library. Neither has to raise anything. So each forward is compared with the trial:

1. begin    the outermost forward with a `seq_ctx` gives it an empty list
2. call     `flexseq_attention` adds the module that has called it
3. end      these modules must be as many for each layer as in the trial, and each must run the
            forward of its class, as the class was defined

A replay of a checkpointed layer finds no list, since the forward has ended. A forward with the
modules of the last one, whose forwards are the same, costs some microseconds: nothing is read but
lists and attributes, and the device is never waited for.

Rejected: to look at the model once, when the first step begins, which would miss a callback's
later changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.hf.model.attention import number_of
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.hf.model.trial import try_model
from hf_flexseq.steps.forward_hooks import around_forward
from hf_flexseq.steps.users_code import is_known, package

# Packages whose functions may stand around the forward of a library's attention: they run it.
_AROUND = ("accelerate", "hf_flexseq", "torch", "transformers")

OWN_ATTENTION = (
    "attention that hf_flexseq does not compute would mix the sequences of a row: leave it as the "
    "model's class has it"
)


@contextmanager
def counted_calls(
    model: PreTrainedModel, layers: Mapping[int, nn.Module] | None = None
) -> Iterator[None]:
    """Count the calls of a model's planned forwards inside the block. A forward raises
    NotImplementedError, before any backward, if a layer has not called attention as in the trial,
    or has called it by a replaced forward. layers: of a stage, by number, whose forwards are
    counted one by one; None for the forward of a whole model."""
    expected = _expected(model)
    counts: dict[nn.Module, _Count] = {}
    if layers is None:
        whole = _Count(model, expected)
        counts = {model: whole, model.base_model: whole}  # either may be called
    for index, layer in (layers or {}).items():
        counts[layer] = _Count(model, [number for number in expected if number in (index, None)])
    with ExitStack() as hooks:
        for entry, count in counts.items():
            hooks.enter_context(around_forward(entry, count.begin, count.end))
        yield


class _Count:
    """Compares the calls of forwards of a model, or of one of its layers, with its trial."""

    def __init__(self, model: PreTrainedModel, expected: list[int | None]) -> None:
        """expected: numbers of the layers that call attention in a forward, one for each call."""
        self._model = model
        self._expected = expected
        self._running: list[Any] = []  # of forwards inside each other: the context, if it notes
        # of the last forward that was as expected
        self._modules: list[nn.Module] | None = None
        self._forwards: list[Any] = []

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Let the context of a planned forward note calls, unless an outer one does."""
        seq_ctx: Any = kwargs.get("seq_ctx")
        is_outermost = seq_ctx is not None and seq_ctx.calls is None
        if is_outermost:
            seq_ctx.calls = []
        self._running.append(seq_ctx if is_outermost else None)

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Check the calls of a planned forward, unless an error has ended it."""
        seq_ctx = self._running.pop() if self._running else None
        if seq_ctx is None:
            return
        modules, seq_ctx.calls = seq_ctx.calls, None
        is_as_before = modules == self._modules and self._forwards == forwards_of(modules)
        if outputs is None or is_as_before:
            return
        self._check(modules)
        # A copy: replays inside of a layer may add to the list.
        self._modules, self._forwards = list(modules), forwards_of(modules)

    def _check(self, modules: Sequence[nn.Module]) -> None:
        replaced = replaced_attention(self._model)
        if replaced is not None:
            raise NotImplementedError(replaced)
        called = [number_of(module) for module in modules]
        name = unsharded_class(self._model).__name__
        for number in dict.fromkeys((*self._expected, *called)):
            times, wanted = called.count(number), self._expected.count(number)
            if times != wanted:
                raise NotImplementedError(
                    f"{name}: layer {number} called attention {times} times in a forward, and "
                    f"{wanted} times when the model was tried; {self._reason(number)}"
                )

    def _reason(self, number: int | None) -> str:
        """Return what to change about the layer of a number."""
        config = self._model.config.get_text_config()
        for name, module in self._model.named_modules():
            own = getattr(module, "config", config)
            if attends(module) and number_of(module) == number and own is not config:
                return (
                    f"{name} has a configuration of its own, with attn_implementation="
                    f"{own._attn_implementation!r}: give it the model's, module.config = "
                    "model.config"
                )
        return OWN_ATTENTION


def _expected(model: PreTrainedModel) -> list[int | None]:
    """Return the numbers of the layers that call attention in a forward, one for each call: as the
    trial saw them, or the configuration says where the trial ended early."""
    trial = try_model(model)
    if trial.fault is None:
        return [call.asked.layer for call in trial.calls]
    layers = layers_of(model.config.get_text_config())
    return [number for number, layer in enumerate(layers) if layer.attention is not None]


def attends(module: nn.Module) -> bool:
    """Tell if a module knows the number of its layer, and is its attention by name."""
    return number_of(module) is not None and "Attention" in type(module).__name__


def replaced_attention(model: nn.Module) -> str | None:
    """Return that attention of a library runs another forward than its class's; None if none
    does."""
    for name, module in model.named_modules():
        forward = replaced_forward(module) if attends(module) else None
        if forward is not None:
            return f"{name} runs {forward}; {OWN_ATTENTION}"
    return None


def forwards_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the functions that modules run as forwards, on their own or their class."""
    return [module.__dict__.get("forward") or type(module).forward for module in modules]


def replaced_forward(module: nn.Module) -> str | None:
    """Return where the forward of a library's mixer comes from, in words, unless it is its class's
    own; None for modules of the user's, which are tried (`sum_trial.py` in hf/engine)."""
    if not is_known(type(module)):
        return None
    homes = {base.__module__ for base in type(module).__mro__}
    around = []  # code of others; a decorator of a known package runs what it stands around
    is_own = False
    pending: list[Any] = [vars(module).get("forward") or type(module).forward]
    while pending:
        code = pending.pop()
        inner = [getattr(code, name, None) for name in ("func", "__func__", "__wrapped__")]
        pending += [one for one in inner if one is not None]
        scope = getattr(code, "__globals__", None)  # of a function
        home = package(code) if scope is None else scope["__name__"]
        if home in homes:
            is_own = True
        elif scope is not None or not any(inner):
            around.append((home, code))
    for home, code in around:
        if not is_own or home.partition(".")[0] not in _AROUND:
            return f"{getattr(code, '__qualname__', code)} of {home} as its forward"
    return None
