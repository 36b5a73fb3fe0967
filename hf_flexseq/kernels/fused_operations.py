"""Operations on rows and heads between kernel calls of attention.

    merge     a partial result goes into the running result, by its log-sum-exp
    add       parts of gradients are added to their rows, of several tensors at once
    gather    rows of several tensors are copied, for a message or a kernel call
    pack      heads of several tensors are laid side by side, for an all-to-all
    unpack    and taken apart again where they arrive; heads that several ranks had are summed

Heads are rows with two strides, so the last two are made of the others: one `gather`, and for
heads that are summed zeros, an `add` for every round of parts that have no head in common, and a
copy that rounds.

There are two implementations. `TorchFused` is written in torch's operations, and serves every
device. `triton_fused.TritonFused` does each of the first three in a single launch, on CUDA;
`tests/kernels/test_fused_operations.py` holds it against this one. `choose.choose_fused` picks
one.

All write into tensors that exist, and nothing waits for the device. Sums of 16-bit parts are taken
in float32.
"""

import abc
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.merge import merge_into
from hf_flexseq.plan.head_layout import HeadLayout, HeadRun

# Some rows of a tensor: a slice without a step, or int64 [n] on the tensor's device.
Rows: TypeAlias = slice | torch.Tensor
EVERY = slice(None)

Tensors: TypeAlias = Sequence[torch.Tensor]

# (out [n, H, D], lse [n, H]) of attention over some keys.
Result: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Fused(abc.ABC):
    """The operations, over t rows of which n are meant, H heads, D the head dimension."""

    name: str

    @abc.abstractmethod
    def merge(self, total: Result, rows: Rows, part: Result) -> None:
        """Merge a partial result into these rows of a running one.

        total: (out [t, H, D], lse [t, H]) in float32 or float64; each row is in `rows` once at
        most. part: (out [n, H, D] in any floating dtype, lse [n, H] in the total's dtype). A
        result over no keys has out = 0 and lse = -inf, and changes nothing. Log-sum-exps may have
        any strides, outputs any but the last.
        """

    @abc.abstractmethod
    def add(self, totals: Tensors, rows: Sequence[Rows], parts: Tensors) -> None:
        """Add each part [n, ...] to n different rows of a total [t, ...], in its dtype."""

    @abc.abstractmethod
    def gather(self, sources: Tensors, rows: Sequence[Rows], targets: Tensors) -> None:
        """Copy rows of each source [t, ...] to a target [n, ...] of its dtype. Rows given as a
        slice may change their dtype.

        Targets may be views of one buffer, and have other strides than their sources.
        """

    def pack(self, tensors: Tensors, layout: HeadLayout, flat: torch.Tensor) -> None:
        """Write each tensor [tokens, heads, D] to its slots of the buffer [slots x D].

        layout: of all tensors. The dtype of `flat` is that of the tensors, or a wider one.
        """
        if not flat.numel():
            return
        head_dim = tensors[0].shape[2]
        laid_out = [x if x.stride(1) == head_dim else x.contiguous() for x in tensors]
        heads = [_heads(laid_out[run.tensor], run) for run in layout.runs]
        slots = [_slots(flat, run, layout.tokens, head_dim) for run in layout.runs]
        self.gather(heads, [EVERY] * len(heads), slots)

    def unpack(self, flat: torch.Tensor, layout: HeadLayout, tensors: Tensors) -> None:
        """Write the slots of the buffer [slots x D] to the tensors [tokens, heads, D]: the
        transpose of `pack`.

        A head that several parts of the buffer have becomes their sum, taken in float32 (float64
        for float64) in the order of `layout.runs` and then rounded to the dtype of the tensor.
        """
        if not flat.numel():
            return
        wide = lse_dtype(flat.dtype)
        sums = [
            torch.zeros_like(x, dtype=wide) if is_shared else x
            for x, is_shared in zip(tensors, layout.shared, strict=True)
        ]
        alone = []  # (slots, heads) to copy
        # By round, (slots, heads) to add: runs of one tensor may have heads in common.
        rounds: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        seen: Counter[int] = Counter()  # runs of each tensor
        for run in layout.runs:
            x = sums[run.tensor]
            pair = _slots(flat, run, layout.tokens, x.shape[2]), _heads(x, run)
            if layout.shared[run.tensor]:
                rounds[seen[run.tensor]].append(pair)
                seen[run.tensor] += 1
            else:
                alone.append(pair)
        if alone:
            slots, heads = zip(*alone, strict=True)
            self.gather(slots, [EVERY] * len(alone), heads)
        for pairs in rounds.values():
            parts, totals = zip(*pairs, strict=True)
            self.add(totals, [EVERY] * len(pairs), parts)
        for x, total in zip(tensors, sums, strict=True):
            if total is not x:
                x.copy_(total)


class TorchFused(Fused):
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
