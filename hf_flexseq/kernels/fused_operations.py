"""Operations on rows and heads between kernel calls of attention.

    merge     a partial result goes into the running result, by its log-sum-exp
    add       parts of gradients are added to their rows, of several tensors at once
    gather    rows of several tensors are copied, for a message or a kernel call
    pack      heads of several tensors are laid side by side, for an all-to-all
    unpack    and taken apart again where they arrive; heads that several ranks had are summed

There are two implementations. `TorchFused` is written in torch's operations, and serves every
device. `triton_fused.TritonFused` does each in a single launch, on CUDA; `tests/kernels/
test_fused_operations.py` holds it against this one. `choose.choose_fused` picks one.

All write into tensors that exist, and nothing waits for the device. Sums of 16-bit parts are taken
in float32.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.merge import merge_into
from hf_flexseq.plan.head_layout import HeadLayout, HeadRun

# Some rows of a tensor: a slice without a step, or int64 [n] on the tensor's device.
Rows: TypeAlias = slice | torch.Tensor

Tensors: TypeAlias = Sequence[torch.Tensor]

# (out [n, H, D], lse [n, H]) of attention over some keys.
Result: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Fused(Protocol):
    """The operations, over t rows of which n are meant, H heads, D the head dimension."""

    name: str

    def merge(self, total: Result, rows: Rows, part: Result) -> None:
        """Merge a partial result into these rows of a running one.

        total: (out [t, H, D], lse [t, H]) in float32 or float64; each row is in `rows` once at
        most. part: (out [n, H, D] in any floating dtype, lse [n, H] in the total's dtype). A
        result over no keys has out = 0 and lse = -inf, and changes nothing. Log-sum-exps may have
        any strides, outputs any but the last.
        """
        ...

    def add(self, totals: Tensors, rows: Sequence[Rows], parts: Tensors) -> None:
        """Add each part [n, ...] to n different rows of a total [t, ...], in its dtype."""
        ...

    def gather(self, sources: Tensors, rows: Sequence[Rows], targets: Tensors) -> None:
        """Copy rows of each source [t, ...] to a target [n, ...] of its dtype.

        Targets may be views of one buffer, and have other strides than their sources.
        """
        ...

    def pack(
        self, tensors: Tensors, layout: HeadLayout, table: torch.Tensor, flat: torch.Tensor
    ) -> None:
        """Write each tensor [tokens, heads, D] to its slots of the buffer [slots x D].

        layout: of all tensors. table: `layout.numbers` on the device. The dtype of `flat` is that
        of the tensors, or a wider one.
        """
        ...

    def unpack(
        self, flat: torch.Tensor, layout: HeadLayout, table: torch.Tensor, tensors: Tensors
    ) -> None:
        """Write the slots of the buffer [slots x D] to the tensors [tokens, heads, D]: the
        transpose of `pack`.

        A head that several parts of the buffer have becomes their sum, taken in float32 (float64
        for float64) in the order of the parts and then rounded to the dtype of the tensor.
        """
        ...


class TorchFused:
    """The operations as torch has them: several launches each."""

    name = "torch"

    def merge(self, total: Result, rows: Rows, part: Result) -> None:
        """See `Fused.merge`: total [t, ...], part [n, ...]."""
        out, lse = total
        row_out = out[rows]  # [t, H, D] -> [n, H, D], a view where the rows are a slice
        row_lse = lse[rows]  # [t, H] -> [n, H]
        merge_into(row_out, row_lse, *part)
        if isinstance(rows, torch.Tensor):
            out[rows] = row_out
            lse[rows] = row_lse

    def add(self, totals: Tensors, rows: Sequence[Rows], parts: Tensors) -> None:
        """See `Fused.add`: totals [t, ...], parts [n, ...]."""
        for total, of_total, part in zip(totals, rows, parts, strict=True):
            if isinstance(of_total, torch.Tensor):
                total.index_add_(0, of_total, part.to(total.dtype))
            else:
                total[of_total].add_(part)

    def gather(self, sources: Tensors, rows: Sequence[Rows], targets: Tensors) -> None:
        """See `Fused.gather`: sources [t, ...], targets [n, ...]."""
        for source, of_source, target in zip(sources, rows, targets, strict=True):
            if isinstance(of_source, torch.Tensor):
                torch.index_select(source, 0, of_source, out=target)
            else:
                target.copy_(source[of_source])

    def pack(
        self, tensors: Tensors, layout: HeadLayout, table: torch.Tensor, flat: torch.Tensor
    ) -> None:
        """See `Fused.pack`: tensors [tokens, heads, D] -> flat [slots x D]."""
        for run in layout.runs:
            x = tensors[run.tensor]
            _slots(flat, run, layout.tokens, x.shape[2]).copy_(_heads(x, run))

    def unpack(
        self, flat: torch.Tensor, layout: HeadLayout, table: torch.Tensor, tensors: Tensors
    ) -> None:
        """See `Fused.unpack`: flat [slots x D] -> tensors [tokens, heads, D]."""
        wide = lse_dtype(flat.dtype)
        sums = []
        for x, is_shared in zip(tensors, layout.shared, strict=True):
            sums.append(torch.zeros_like(x, dtype=wide) if is_shared else x)
        for run in layout.runs:
            x = sums[run.tensor]
            heads = _heads(x, run)
            slots = _slots(flat, run, layout.tokens, x.shape[2])
            if layout.shared[run.tensor]:
                heads.add_(slots)
            else:
                heads.copy_(slots)
        for x, total in zip(tensors, sums, strict=True):
            if total is not x:
                x.copy_(total)


def _heads(x: torch.Tensor, run: HeadRun) -> torch.Tensor:
    """Return the heads of a run, a view: x [tokens, heads, D] -> [tokens, parts, run.heads, D]."""
    tokens, _, head_dim = x.shape
    token_stride, head_stride, stride = x.stride()
    return x.as_strided(
        (tokens, run.parts, run.heads, head_dim),
        (token_stride, run.head_step * head_stride, head_stride, stride),
        x.storage_offset() + run.head * head_stride,
    )


def _slots(flat: torch.Tensor, run: HeadRun, tokens: int, head_dim: int) -> torch.Tensor:
    """Return the slots of a run, a view: flat [slots x D] -> [tokens, parts, run.heads, D]."""
    return flat.as_strided(
        (tokens, run.parts, run.heads, head_dim),
        (run.stride * head_dim, run.slot_step * head_dim, head_dim, 1),
        flat.storage_offset() + run.slot * head_dim,
    )
