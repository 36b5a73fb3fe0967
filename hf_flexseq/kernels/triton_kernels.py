"""The Triton kernels that `triton_fused.py` launches.

A program of a kernel does one tile: some rows of some columns. Tensors of several dtypes and
shapes come as tuples, and the programs are shared out to them in turn: the first tensor has the
first programs. Row numbers are int64, since a tensor may have more than 2^31 elements.

Triton compiles a kernel anew for integers that are 1 or multiples of 16. Of sizes that change from
one micro-batch to the next that would be all combinations, and a stall for each. So those are left
out of it: by name, or in tuples, to whose members names do not reach, as odd numbers above 1
(`odd`).

It also compiles anew for pointers to multiples of 16 bytes. Row numbers and log-sum-exps gain
nothing by it and often begin elsewhere, so they are left out of that.
"""

import triton
import triton.language as tl

GATHER = tl.constexpr(0)
ADD = tl.constexpr(1)


# ---- integers in tuples


def odd(size: int) -> int:
    """Return an odd number above 1 that encodes a size, so Triton does not specialise on it."""
    return 2 * size + 3


@triton.jit
def _size(odd_number):
    """Return the size that `odd` has hidden."""
    return (odd_number - 3) // 2


# ---- parts of kernels


@triton.jit
def _row_numbers(index, start, j, count, HAS_INDEX: tl.constexpr):
    """Return the numbers of rows j of a selection: its index, or from `start` on."""
    if HAS_INDEX:
        return tl.load(index + j, mask=j < count, other=0).to(tl.int64)
    else:
        return j + start


@triton.jit
def _column_offsets(column, outer_stride, INNER: tl.constexpr, WIDTH: tl.constexpr):
    """Return where the columns of a row are: INNER that follow each other, outer_stride apart."""
    if INNER == WIDTH:
        return column.to(tl.int64)
    else:
        return (column // INNER) * outer_stride.to(tl.int64) + column % INNER


@triton.jit
def _move_rows(
    block,
    whole,
    part,
    index,
    start,
    count,
    whole_stride,
    part_stride,
    whole_outer,
    part_outer,
    HAS_INDEX: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE_INNER: tl.constexpr,
    PART_INNER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Do one tile of one pair of tensors."""
    blocks_across: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    j = (block // blocks_across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (block % blocks_across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (j < count)[:, None] & (column < WIDTH)[None, :]
    row = _row_numbers(index, start, j, count, HAS_INDEX)
    in_whole = _column_offsets(column, whole_outer, WHOLE_INNER, WIDTH)
    in_part = _column_offsets(column, part_outer, PART_INNER, WIDTH)
    whole_at = whole + row[:, None] * whole_stride + in_whole[None, :]
    part_at = part + j[:, None] * part_stride + in_part[None, :]
    if MODE == GATHER:
        tl.store(part_at, tl.load(whole_at, mask=mask), mask=mask)
    else:
        sums = tl.load(whole_at, mask=mask)
        sums += tl.load(part_at, mask=mask).to(sums.dtype)
        tl.store(whole_at, sums, mask=mask)


# ---- kernels


@triton.jit
def rows_kernel(
    wholes,
    parts,
    indices,
    starts,
    counts,
    blocks,
    whole_strides,
    part_strides,
    whole_outers,
    part_outers,
    HAS_INDEX: tl.constexpr,
    WHOLE_UNITS: tl.constexpr,
    PART_UNITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    WHOLE_INNERS: tl.constexpr,
    PART_INNERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """GATHER: part[j] = whole[row j]. ADD: whole[row j] += part[j]. All arguments but the last are
    tuples, by pair of a whole [t, ...] and a part [n, ...]; blocks: its programs. starts, counts,
    blocks and both _outers hold sizes as odd numbers (`odd`), these in units."""
    block = tl.program_id(0)
    for i in tl.static_range(len(wholes)):
        if (block >= 0) & (block < _size(blocks[i])):
            _move_rows(
                block,
                wholes[i],
                parts[i],
                indices[i],
                _size(starts[i]),
                _size(counts[i]),
                whole_strides[i],
                part_strides[i],
                _size(whole_outers[i]) * WHOLE_UNITS[i],
                _size(part_outers[i]) * PART_UNITS[i],
                HAS_INDEX[i],
                WIDTHS[i],
                WHOLE_INNERS[i],
                PART_INNERS[i],
                BLOCK_ROWS[i],
                BLOCK_COLUMNS[i],
                MODE,
            )
        block -= _size(blocks[i])


@triton.jit(
    do_not_specialize=[
        "start",
        "count",
        "lse_row",
        "lse_head",
        "part_lse_row",
        "part_lse_head",
    ],
    do_not_specialize_on_alignment=["lse", "part_lse", "index"],
)
def merge_kernel(
    out,
    lse,
    part_out,
    part_lse,
    index,
    start,
    count,
    out_row,
    out_head,
    part_row,
    part_head,
    lse_row,
    lse_head,
    part_lse_row,
    part_lse_head,
    HAS_INDEX: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Merge part_out [n, H, D] and part_lse [n, H] into rows of out [t, H, D] and lse [t, H], a
    head of some rows in each program. Arguments that end in _row or _head are strides."""
    head = tl.program_id(0) % HEADS
    j = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    is_row = j < count
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    row = _row_numbers(index, start, j, count, HAS_INDEX)
    head = head.to(tl.int64)

    # 1. the log-sum-exp of both: [rows]
    lse_at = lse + row * lse_row + head * lse_head
    ours = tl.load(lse_at, mask=is_row, other=0.0)
    theirs = tl.load(part_lse + j * part_lse_row + head * part_lse_head, mask=is_row, other=0.0)
    theirs = theirs.to(ours.dtype)
    most = tl.where(ours > theirs, ours, theirs)
    most = tl.where(most == -float("inf"), 0.0, most)  # no key read by either
    our_sum = tl.exp(ours - most)
    their_sum = tl.exp(theirs - most)
    both = our_sum + their_sum
    is_empty = both == 0.0
    both = tl.where(is_empty, 1.0, both)
    weight = their_sum / both
    merged_lse = tl.where(is_empty, -float("inf"), most + tl.log(both))

    # 2. the output: [rows, D]
    out_at = out + row[:, None] * out_row + head * out_head + d[None, :]
    part_at = part_out + j[:, None] * part_row + head * part_head + d[None, :]
    old = tl.load(out_at, mask=mask)
    new = tl.load(part_at, mask=mask).to(old.dtype)
    tl.store(out_at, old + (new - old) * weight[:, None], mask=mask)
    tl.store(lse_at, merged_lse, mask=is_row)
