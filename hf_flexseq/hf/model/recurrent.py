"""Let the recurrent layers of an unmodified model run on the tokens of a micro-batch.

A recurrent mixer of transformers calls functions of its own module: a causal convolution, and
then a scan. A *dispatcher* replaces each of them:

    causal_conv1d_fn                     recurrent.causal_convolution, and the activation
    torch_chunk_gated_delta_rule         recurrent.gated_delta_rule
    chunk_kimi_delta_attention           recurrent.kimi_delta_rule
    mamba2_chunk_scan                    recurrent.mamba2_scan
    mamba2_split_conv1d_scan_combined    None: the mixer then calls convolution and scan

A dispatcher looks at the keyword `seq_ctx`, which the model passes on from its own call. Without
it, in `generate` or a plain forward, a dispatcher is the function that it stands for.

The functions belong to a module of transformers, so all its models share them: they are replaced
when the first of these is attached or tried, and stay so, since nothing else sees a difference.

Rejected: registering kernels for the functions. The wrapper around them drops the keywords that a
kernel does not name, and models are kernelized by name, not one by one. Rejected: other mixers in
place of the model's, which age.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_flexseq.attention.recurrent import (
    causal_convolution,
    gated_delta_rule,
    kimi_delta_rule,
    mamba2_scan,
)
from hf_flexseq.attention.recurrent.rows import RecurrentContext
from hf_flexseq.base.layers import RecurrentShape

Function = Callable[..., Any]


class UnsupportedRecurrence(NotImplementedError):
    """A recurrent layer asks for something that `flexseq` does not compute."""


@runtime_checkable
class NotesCalls(Protocol):
    """Replaces the context in a trial, which only notes the calls of a model's layers
    (`trial.py`)."""

    def note_recurrent(self, call: RecurrentShape) -> None:
        """Note the sizes of a call, without computing anything."""


# ---- which functions a model has


class Mixer(NamedTuple):
    """A module that calls recurrent functions."""

    name: str
    """Its name in the model."""
    module: nn.Module
    functions: tuple[tuple[dict[str, Any], str], ...]
    """(globals of its code, name of the function in them)."""


def mixers(model: nn.Module) -> Iterator[Mixer]:
    """Yield the modules of `model` whose code calls one of the functions above."""
    known: dict[type, tuple[tuple[dict[str, Any], str], ...]] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = _functions_of(kind)
        if known[kind]:
            yield Mixer(name, module, known[kind])


def _functions_of(kind: type) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return (globals, name) of the recurrent functions that the methods of a class call."""
    found = {}
    for cls in kind.__mro__:
        if cls is nn.Module:
            break
        for member in vars(cls).values():
            code = inspect.unwrap(member) if callable(member) else None
            if not inspect.isfunction(code):
                continue
            for name in sorted(_DISPATCHED.keys() & set(code.__code__.co_names)):
                if name in code.__globals__:
                    found[id(code.__globals__), name] = (code.__globals__, name)
    return tuple(found.values())


# ---- attaching


def attach_recurrent(model: nn.Module) -> None:
    """Replace the functions that the recurrent layers of a model call, unless they are replaced
    already. Ranks may be threads: of two that do so at once, either's dispatcher serves both."""
    for mixer in mixers(model):
        for scope, name in mixer.functions:
            function = scope[name]
            if not isinstance(function, _Dispatcher):
                scope[name] = _Dispatcher(name, function)


def without_dispatcher(code: Any) -> Any:
    """Return the function that a dispatcher stands for; other code as it is."""
    return code.original if isinstance(code, _Dispatcher) else code


class _Dispatcher:
    """Stands for a function of a module of transformers, for all models."""

    def __init__(self, name: str, original: Function) -> None:
        self.original = original
        self._compute = _DISPATCHED[name]
        # The function may be a module of the `kernels` package, with attributes not to be copied.
        self.__name__ = self.__qualname__ = name
        self.__doc__ = original.__doc__

    def __call__(self, *args: Any, seq_ctx: Any = None, **kwargs: Any) -> Any:
        """Compute the function on a micro-batch, or call the original without `seq_ctx`."""
        if seq_ctx is None:
            return self.original(*args, **kwargs)
        return self._compute(*args, seq_ctx=seq_ctx, **kwargs)


# ---- what dispatchers compute


def _convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_ctx: RecurrentContext | NotesCalls,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve hidden_states [1, channels, tokens], each channel by itself, with weight [channels,
    W] and bias [channels] -> the same shape."""
    _refuse_states(CONVOLUTION, kwargs)
    channels, width = weight.shape
    if isinstance(seq_ctx, NotesCalls):
        seq_ctx.note_recurrent(RecurrentShape(kind="convolution", width=width, channels=channels))
        return torch.empty_like(hidden_states)
    given = hidden_states.dtype
    dtype = _convolution_dtype(hidden_states, weight)
    if bias is not None:
        bias = bias.to(dtype)
    with _without_autocast(hidden_states):
        rows = hidden_states.squeeze(0).t().to(dtype)  # -> [tokens, channels]
        out = causal_convolution(rows, weight.to(dtype), bias, seq_ctx)
        if activation is not None:
            out = ACT2FN[activation](out)
    return out.to(given).t().unsqueeze(0)  # -> [1, channels, tokens]


def _scan(kind: str, keys: torch.Tensor, values: torch.Tensor) -> RecurrentShape:
    """Return the sizes of a scan; a convolution before it has its own. keys, values: each
    [1, tokens, heads, size]."""
    return RecurrentShape(
        kind=kind,
        key_heads=keys.shape[2],
        value_heads=values.shape[2],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        width=0,
        channels=0,
    )


def _convolution_dtype(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which transformers convolves: autocast's, else the weight's."""
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


# by kind: what computes a delta rule
DELTA_RULES: dict[str, Function] = {
    "gated_delta": gated_delta_rule,
    "kimi_delta": kimi_delta_rule,
}


def _delta(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int | None = None,  # of transformers' own way; results do not depend on it
    seq_ctx: RecurrentContext | NotesCalls,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run a delta rule (`recurrent.delta_rule`): query and key [1, tokens, key_heads, K], value
    [1, tokens, heads, V], g and beta -> [1, tokens, heads, V] and None for the final state."""
    _refuse_states(kind.replace("_", " "), kwargs)
    if isinstance(seq_ctx, NotesCalls):
        seq_ctx.note_recurrent(_scan(kind, key, value))
        return torch.empty_like(value), None
    with _without_autocast(query):
        # [1, tokens, ...] -> [tokens, ...]
        rows = [x.squeeze(0) for x in (query, key, value, g, beta)]
        out = DELTA_RULES[kind](*rows, seq_ctx, l2norm=use_qk_l2norm_in_kernel)
    return out.to(query.dtype).unsqueeze(0), None


def _mamba2(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None = None,  # of transformers' own way; results do not depend on it
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_ctx: RecurrentContext | NotesCalls,
    **kwargs: Any,
) -> torch.Tensor:
    """Run Mamba 2's scan: hidden_states [1, tokens, heads, P], dt [1, tokens, heads], A, D and
    dt_bias [heads], B and C [1, tokens, groups, N] -> [1, tokens, heads, P]."""
    _refuse_states("mamba2_chunk_scan", {"z": z, **kwargs})
    if isinstance(seq_ctx, NotesCalls):
        seq_ctx.note_recurrent(_scan("mamba2", B, hidden_states))
        return torch.empty_like(hidden_states)
    with _without_autocast(hidden_states):
        out = mamba2_scan(
            hidden_states.squeeze(0),
            dt.squeeze(0),
            A,
            B.squeeze(0),
            C.squeeze(0),
            seq_ctx,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )  # [tokens, heads, P]
    return out.unsqueeze(0)


def _mamba2_in_one(*args: Any, seq_ctx: Any, **kwargs: Any) -> None:
    """Return None, as where no kernel does the whole mixer in one call."""
    return


CONVOLUTION = "causal_conv1d_fn"
"""Name of the function that a scan comes after; some layers have it alone."""

_DISPATCHED: dict[str, Function] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": partial(_delta, "gated_delta"),
    "chunk_kimi_delta_attention": partial(_delta, "kimi_delta"),
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _mamba2_in_one,
}

# Keywords with which a layer asks for something else: each of them changes the result.
_REFUSED_KEYWORDS = (
    *("initial_state", "initial_states", "output_final_state", "return_final_states"),
    *("seq_idx", "cu_seqlens", "z", "scale"),
)


def _refuse_states(function: str, keywords: dict[str, Any]) -> None:
    """Raise UnsupportedRecurrence for keywords of a call that hf_flexseq does not compute."""
    for name in _REFUSED_KEYWORDS:
        value = keywords.get(name)
        if value is not None and value is not False:
            raise UnsupportedRecurrence(
                f"a recurrent layer calls {function} with {name}; hf_flexseq runs layers from the "
                "start of every sequence to its end (use_cache=False)"
            )


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast: states are in float32 at least."""
    return torch.autocast(x.device.type, enabled=False)
