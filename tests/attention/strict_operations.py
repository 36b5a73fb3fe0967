"""Operations between kernel calls that insist on what Triton's kernels rely on, and on what they
leave undefined, so that every test of attention on the CPU says whether a GPU could run it."""

import torch

from hf_flexseq.kernels.fused_operations import TorchFused


class StrictFused(TorchFused):
    """Does what `TorchFused` does, or fails."""

    def merge(self, total, rows, part):
        out, lse = total
        part_out, part_lse = part
        check_heads([out, part_out])
        check_rows(rows, out)
        assert out.dtype == lse.dtype == part_lse.dtype, "results are merged in one wide dtype"
        super().merge(total, rows, part)

    def add(self, totals, rows, parts):
        for total, selected in zip(totals, rows, strict=True):
            check_rows(selected, total)
        check_strides([*totals, *parts])
        super().add(totals, rows, parts)

    def gather(self, sources, rows, targets):
        for source, selected, target in zip(sources, rows, targets, strict=True):
            check_index(selected, source)
            assert source.dtype == target.dtype, "rows are copied as they are"
        check_strides([*sources, *targets])
        super().gather(sources, rows, targets)

    def pack(self, tensors, layout, flat):
        check_heads(tensors)
        assert all(x.shape[0] == layout.tokens for x in tensors), "all tensors have as many tokens"
        assert all(x.dtype == flat.dtype for x in tensors), "heads travel as they are"
        assert flat.is_contiguous(), "heads lie side by side"
        super().pack(tensors, layout, flat)

    def unpack(self, flat, layout, tensors):
        check_heads(tensors)
        assert flat.is_contiguous(), "heads lie side by side"
        # Only here do copies round, to the dtype of a tensor; so they are checked in the buffer's.
        wide = [x.to(flat.dtype) for x in tensors]
        super().unpack(flat, layout, wide)
        for x, found in zip(tensors, wide, strict=True):
            x.copy_(found)


def check_heads(tensors):
    """The numbers of a head follow each other in memory."""
    for x in tensors:
        assert x.stride(2) == 1 or not x.numel(), f"strides {x.stride()} of {tuple(x.shape)}"


def check_strides(tensors):
    """All but the first two dimensions follow each other in memory."""
    for x in tensors:
        if x.dim() > 2 and x.numel():
            assert x[0, 0].is_contiguous(), f"strides {x.stride()} of {tuple(x.shape)}"


def check_index(rows, x):
    """Rows are a slice without a step, or int64, and there."""
    if isinstance(rows, slice):
        assert rows.step is None
    else:
        assert (rows.dtype, rows.dim()) == (torch.int64, 1)
        assert not rows.numel() or 0 <= rows.min() <= rows.max() < x.shape[0]


def check_rows(rows, x):
    """No row is meant twice."""
    check_index(rows, x)
    if isinstance(rows, torch.Tensor):
        assert rows.unique().numel() == rows.numel(), "a row is meant twice"
