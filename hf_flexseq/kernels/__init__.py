"""Attention kernels: one signature for packed sequences of different lengths, several
implementations.

    cpu_flash      torch's CPU flash kernel, sequence by sequence; windows and softcaps in pieces
    torch_varlen   the FlashAttention that is active in torch: -2, which it ships for CUDA, or -3
    flash_attn     FlashAttention-2 from its package, where it is installed
    cudnn_long     cuDNN, to which the two before it leave long sequences on Hopper
    flash_attn3    FlashAttention-3 from its package, where it is installed, on Hopper

They are compared with `tests/kernels/reference.py`, a plain softmax of each sequence. Each states
its guarantees for every call that it serves in `capabilities.KernelCapabilities`; `cuda_flash`
holds the common part of the CUDA builds. `choose.choose_kernel` picks one for a device, a dtype
and a head size, and says why the others do not serve; `kinds.choose_kernels` does so for a model
whose layers differ; `merge.merge_into` merges results over different keys. `fused_operations` has
the operations on rows and heads between kernel calls, in torch or as Triton kernels
(`triton_fused`). `chunked_loss` is the language model's head and loss; `products` adds up products
of 16-bit matrices in float32.

Notation: Tq query rows and Tk key rows of all sequences together, n query rows and m key rows of
one sequence; H query heads, Hkv heads of keys and values, D the head size.

Forward and backward are separate plain functions instead of one autograd function, because a
sequence shared by several ranks needs the log-sum-exp of each block to merge partial results (Ring
Attention, arXiv 2310.01889), and then a backward that takes the *merged* output and log-sum-exp:
with these every block's gradient is independent of the other blocks and is only summed
(FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

from typing import NamedTuple, Protocol

import torch

from hf_flexseq.kernels.segments import Segments


class KernelCall(NamedTuple):
    """Attention within each sequence of a packed batch.

    H query heads share Hkv key and value heads, H % Hkv == 0. Query head h reads key head
    h * Hkv // H, so callers repeat no heads.
    """

    q: torch.Tensor
    """Queries [Tq, H, D]."""
    k: torch.Tensor
    """Keys [Tk, Hkv, D]."""
    v: torch.Tensor
    """Values [Tk, Hkv, D]."""
    segments: Segments
    """Lengths of the sequences, and which keys a query reads."""
    scale: float
    """Factor of the scores."""
    softcap: float | None = None
    """Cap c of the scores: a scaled score s becomes c tanh(s / c); None caps nothing."""
    beside_transfers: bool = False
    """True if transfers of this rank are under way."""

    def part(self, rows: slice, keys: slice, segments: Segments) -> "KernelCall":
        """Return the call of some of the sequences, whose rows are adjacent: views."""
        q, k, v = self.q[rows], self.k[keys], self.v[keys]
        return self._replace(q=q, k=k, v=v, segments=segments)

    def check(self) -> None:
        """Assert that the tensors fit the lengths and each other."""
        self.segments.check(self.q, self.k, self.v)


class Kernel(Protocol):
    """Softmax attention. Without keys a query gets out = 0, lse = -inf and dq = 0."""

    name: str
    wide_gradients: bool
    """True if gradients of 16-bit inputs stay in float32, in which they are computed."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend: -> out [Tq, H, D] in q's dtype, lse [H, Tq] in `lse_dtype` of it.

        lse is the natural logarithm of the sum over keys of exp(score).
        """
        ...

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D], dk and dv
        [Tk, Hkv, D].

        Gradients are in q's dtype or, with `wide_gradients`, in `lse_dtype` of it: most of them
        are parts of a sum, and rounding can wait until that is complete. Where these keys are only
        some of the keys that the queries read, `out` and `lse` are the merged ones over all.
        """
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
