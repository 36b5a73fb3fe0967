"""Merging, adding and gathering of `fused_operations.py` in one launch each, on CUDA.

The host's part is small: strides, and how many programs a launch has. The kernels are in
`triton_kernels.py`; `fused_operations.Fused` defines their results. Their slow reference is
`fused_operations.TorchFused`. `tests/kernels/test_fused_operations.py` runs them under Triton's
interpreter, and compiles them for a GPU. They have not run on one yet, so the size of a tile is
not tuned.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from hf_flexseq.kernels.fused_operations import Fused, Result, Rows, Tensors
from hf_flexseq.kernels.triton_kernels import (
    ADD,
    GATHER,
    merge_kernel,
    odd,
    rows_kernel,
)

TILE = 2048  # elements that a program does, at least one row
MOST_COLUMNS = 1024  # of a tile
MOST_UNIT = 16  # elements: a multiple that Triton takes for aligned


class TritonFused(Fused):
    """The operations as Triton kernels."""

    name = "triton"

    def merge(self, total: Result, rows: Rows, part: Result) -> None:
        """See `Fused.merge`: total [t, ...], part [n, ...]."""
        out, lse = total
        part_out, part_lse = part
        count, heads, head_dim = part_out.shape
        if not part_out.numel():
            return
        assert out.stride(2) == part_out.stride(2) == 1, "heads lie together in memory"
        selection = _selection(rows, out)
        block_dim = _power_of_2(head_dim)
        block_rows = _rows_of_tile(block_dim)
        merge_kernel[(_blocks(count, block_rows) * heads,)](
            out,
            lse,
            part_out,
            part_lse,
            selection.index,
            selection.start,
            count,
            *out.stride()[:2],
            *part_out.stride()[:2],
            *lse.stride(),
            *part_lse.stride(),
            selection.has_index,
            heads,
            head_dim,
            block_rows,
            block_dim,
        )

    def add(self, totals: Tensors, rows: Sequence[Rows], parts: Tensors) -> None:
        """See `Fused.add`: totals [t, ...], parts [n, ...]."""
        _launch_rows(totals, rows, parts, ADD)

    def gather(self, sources: Tensors, rows: Sequence[Rows], targets: Tensors) -> None:
        """See `Fused.gather`: sources [t, ...], targets [n, ...]."""
        _launch_rows(sources, rows, targets, GATHER)


# ---- rows


class Selection(NamedTuple):
    """Some rows of a tensor, as a kernel is told."""

    index: torch.Tensor
    """int64 [n]; some tensor that is not read where the rows are a slice."""
    start: int
    """First row of a slice."""
    has_index: bool


def _selection(rows: Rows, x: torch.Tensor) -> Selection:
    """Return how a kernel is told these rows of x [t, ...]."""
    if isinstance(rows, torch.Tensor):
        return Selection(rows, 0, True)
    return Selection(x, rows.start or 0, False)


class RowStrides(NamedTuple):
    """Where a tensor [rows, ...] has the elements of its rows."""

    stride: int
    """From a row to the next one."""
    outer_stride: int
    """From one run of elements that follow each other to the next one, in a row."""
    outer_unit: int
    """Divides `outer_stride`. Kernels know it, and so move several elements at once."""
    inner: int
    """Elements of such a run."""


def _row_shape(x: torch.Tensor, width: int) -> RowStrides:
    """Return where x [rows, ...] has the `width` elements of its rows.

    All but the first and the second dimension must follow each other.
    """
    if x.is_contiguous():
        return RowStrides(width, 0, 1, width)
    inner = 1
    outer = x.dim()  # the first of the dimensions that follow each other
    while outer > 1 and (x.stride(outer - 1) == inner or x.shape[outer - 1] == 1):
        outer -= 1
        inner *= x.shape[outer]
    if outer == 1:
        return RowStrides(x.stride(0), 0, 1, inner)
    assert outer == 2, f"strides {x.stride()} of {tuple(x.shape)}: rows in more than two strides"
    unit = math.gcd(MOST_UNIT, x.shape[-1])  # the same for all numbers of rows and heads
    if x.stride(1) % unit:
        unit = 1
    return RowStrides(x.stride(0), x.stride(1), unit, inner)


def _launch_rows(
    wholes: Tensors, rows: Sequence[Rows], parts: Tensors, mode: tl.constexpr
) -> None:
    """Launch the kernel that moves rows, once: wholes [t, ...], parts [n, ...]."""
    all_blocks = 0
    arguments = []
    for whole, selected, part in zip(wholes, rows, parts, strict=True):
        elements = part.numel()
        if elements:
            count = part.shape[0]
            width = elements // count
            block_columns = min(_power_of_2(width), MOST_COLUMNS)
            block_rows = _rows_of_tile(block_columns)
            blocks = _blocks(count, block_rows) * _blocks(width, block_columns)
            all_blocks += blocks
            arguments.append(
                _pair(whole, selected, part, blocks, width) + (block_rows, block_columns)
            )
    if arguments:
        rows_kernel[(all_blocks,)](*zip(*arguments, strict=True), mode)


def _pair(
    whole: torch.Tensor, rows: Rows, part: torch.Tensor, blocks: int, width: int
) -> tuple[Any, ...]:
    """Return the arguments of `rows_kernel` for whole [t, ...] and part [n, ...], but for tiles.

    blocks: programs of the pair. width: elements of a row.
    """
    selection = _selection(rows, whole)
    whole_shape = _row_shape(whole, width)
    part_shape = _row_shape(part, width)
    return (
        whole,
        part,
        selection.index,
        odd(selection.start),
        odd(part.shape[0]),
        odd(blocks),
        whole_shape.stride,
        part_shape.stride,
        odd(whole_shape.outer_stride // whole_shape.outer_unit),
        odd(part_shape.outer_stride // part_shape.outer_unit),
        selection.has_index,
        whole_shape.outer_unit,
        part_shape.outer_unit,
        width,
        whole_shape.inner,
        part_shape.inner,
    )


# ---- sizes


def _rows_of_tile(columns: int) -> int:
    """Return the rows of a tile of so many columns, a power of 2."""
    return max(1, TILE // columns)


def _blocks(count: int, block: int) -> int:
    """Return how many blocks hold `count`."""
    return -(-count // block)


def _power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is not below `count`."""
    return 1 << (count - 1).bit_length()
