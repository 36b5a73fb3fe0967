"""Serve a model whose attention layers differ in head size, windows and softcaps.

Gemma 4 has heads of 256 in its sliding layers and of 512 in its full ones, and a kernel may take
only some of them. `choose_kernels` asks for a kernel for each kind of layer. Where one kernel
serves all, that is returned as it is; else one that calls, each time, the kernel of the kind.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.base.values import in_errors
from hf_flexseq.kernels import Kernel, KernelCall
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.cuda_flash import CudaFlash
from hf_flexseq.kernels.cudnn_long import Heads


class LayerCalls(NamedTuple):
    """Layers of a model whose calls are of one kind."""

    name: str
    """One of these layers, for messages."""
    head_dim: int
    """Head size of the calls: the larger one if queries and values differ."""
    window: bool = False
    """True if queries do not read keys that are too far before them."""
    softcap: bool = False
    """True if scores are capped."""
    heads: frozenset[tuple[int, int]] = frozenset()
    """(query heads, KV heads) of the calls that are to be expected."""


class _CallProperties(NamedTuple):
    """Properties of a call that decide its kernel."""

    head_dim: int
    window: bool
    softcap: bool


def choose_kernels(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerCalls]
) -> Kernel:
    """Return a kernel that serves all kinds of layers, on inputs of `dtype` on `device`, and find
    out to which of their calls cuDNN may come.

    Raises ValueError, naming the layer, its head size and every kernel's reason, where no
    kernel serves a kind, and where the kernels of two kinds have gradients of different dtypes.
    """
    assert kinds, "a model without attention layers needs no kernel"
    chosen: dict[_CallProperties, Kernel] = {}
    for kind in kinds:
        for key in _keys(kind):
            if key not in chosen:
                with in_errors(kind.name):
                    chosen[key] = choose_kernel(
                        device, dtype, key.head_dim, window=key.window, softcap=key.softcap
                    )
            kernel = chosen[key]
            if isinstance(kernel, CudaFlash) and not (key.window or key.softcap):
                own = [Heads(*heads, kind.head_dim, dtype) for heads in sorted(kind.heads)]
                kernel.try_cudnn(own, device)
    first, *others = chosen.values()
    if all(kernel is first for kernel in others):
        return first
    for kernel in others:
        if kernel.wide_gradients != first.wide_gradients:
            raise ValueError(
                f"the attention kernels {first.name} and {kernel.name}, which this model's layers "
                "need, have gradients of different dtypes"
            )
    return KernelOfKinds(chosen)


class KernelOfKinds:
    """Attention that each call's own kernel computes."""

    def __init__(self, kernels: Mapping[_CallProperties, Kernel]) -> None:
        """kernels: by kind of call, at least one; all have the same `wide_gradients`."""
        self._kernels = dict(kernels)
        names = {kernel.name: None for kernel in kernels.values()}  # in order, each once
        self.name = " and ".join(names)
        self.wide_gradients = next(iter(kernels.values())).wide_gradients

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: -> out [Tq, H, D], lse [H, Tq]."""
        return self._kernel(call).forward(call)

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout, out [Tq, H, D], lse [H, Tq] -> dq, dk, dv as q, k, v."""
        return self._kernel(call).backward(call, dout, out, lse)

    def _kernel(self, call: KernelCall) -> Kernel:
        """Return the kernel of a call."""
        key = _CallProperties(
            call.q.shape[2], call.segments.window is not None, call.softcap is not None
        )
        assert key in self._kernels, f"no kernel was chosen for calls of {key}"
        return self._kernels[key]


def _keys(kind: LayerCalls) -> list[_CallProperties]:
    """Return the kinds of a layer's calls; a window may hold all keys of a call."""
    whole = _CallProperties(kind.head_dim, False, kind.softcap)
    if not kind.window:
        return [whole]
    return [_CallProperties(kind.head_dim, True, kind.softcap), whole]
