"""What attention does between kernel calls, on the sizes of a ring of a large model, on small ones
that divide nothing, and on more elements than 32-bit numbers count. Copies and sums must be the
same bits by any implementation; what a merge gives may differ by the accuracy of float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_flexseq.kernels.fused_operations import Fused, TorchFused
from hf_flexseq.plan.head_layout import HeadLayout

MERGE_ERROR = 1e-5  # of an output or a log-sum-exp, relative to what is about 1


class Sizes(NamedTuple):
    """Shapes of the tensors of a rank."""

    rows: int
    moved: int  # of these rows
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int  # to which heads are dealt; more than kv_heads share some


class Case(NamedTuple):
    """What a row of the table is about."""

    name: str
    sizes: Sizes
    dtype: torch.dtype


BF16, FP32 = torch.bfloat16, torch.float32
CASES = (
    Case("a ring's", Sizes(8192, 4096, 32, 8, 128, 8), BF16),
    Case("a ring's", Sizes(8192, 4096, 32, 8, 128, 8), FP32),
    Case("shared KV heads", Sizes(8192, 4096, 32, 4, 128, 8), BF16),
    Case("sizes that divide nothing", Sizes(1001, 333, 9, 3, 80, 4), BF16),
    Case("one row", Sizes(1, 1, 4, 1, 96, 2), BF16),
    Case("rows behind 2^31 elements", Sizes(600_000, 4096, 32, 8, 128, 8), BF16),  # 20 GiB
)
# Triton's interpreter cuts bfloat16 sums off, where a GPU rounds them.
SMALL_CASES = (Case("sizes that divide nothing", Sizes(23, 7, 9, 3, 80, 4), FP32),)
COMPARED_ROWS = 1 << 16  # at once
UNWRITTEN = 99.0  # in what an operation is to write


class Work(NamedTuple):
    """An operation on some tensors."""

    run: Callable[[Fused], None]

    written: list[torch.Tensor]
    """What `run` writes to."""


def works(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Work]]:
    """Return what makes the work of every operation, by name; it has the same numbers each time.

    dtype: of what kernels take and give.
    """
    common = (sizes, device, dtype)
    return {
        "merge": functools.partial(merge_work, *common, by_index=False),
        "merge by index": functools.partial(merge_work, *common, by_index=True),
        "add": functools.partial(add_work, *common),
        "gather": functools.partial(gather_work, *common),
        "pack": functools.partial(pack_work, *common),
        "unpack": functools.partial(unpack_work, *common),
    }


class Numbers:
    """Makes normal numbers on a device, the same ones each time."""

    def __init__(self, device: torch.device) -> None:
        self._make = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, generator=self._make, device=self._make.device)

    def some_rows(self, sizes: Sizes) -> torch.Tensor:
        """Return different rows in no order, int64 [moved]."""
        every = torch.randperm(sizes.rows, generator=self._make, device=self._make.device)
        return every[: sizes.moved]


def merge_work(sizes: Sizes, device: torch.device, dtype: torch.dtype, *, by_index: bool) -> Work:
    """A partial result is merged into some rows; a few rows have read no key on either side."""
    numbers = Numbers(device)
    out = numbers(sizes.rows, sizes.heads, sizes.head_dim)
    lse = 10 * numbers(sizes.heads, sizes.rows).t()  # [rows, heads]
    part_out = numbers(sizes.moved, sizes.heads, sizes.head_dim, dtype=dtype)
    part_lse = 10 * numbers(sizes.heads, sizes.moved).t()
    for unread_out, unread_lse, every in ((out, lse, 5), (part_out, part_lse, 7)):
        unread_out[3::every] = 0
        unread_lse[3::every] = -torch.inf
    rows = numbers.some_rows(sizes) if by_index else slice(0, sizes.moved)
    return Work(lambda fused: fused.merge((out, lse), rows, (part_out, part_lse)), [out, lse])


def add_work(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Work:
    """Parts of dq, dk and dv are added, dk and dv in one tensor of totals."""
    numbers = Numbers(device)
    dq = numbers(sizes.rows, sizes.heads, sizes.head_dim)
    dkv = numbers(sizes.rows, 2, sizes.kv_heads, sizes.head_dim)
    part_q = numbers(sizes.moved, sizes.heads, sizes.head_dim, dtype=dtype)
    part_k = numbers(sizes.moved, sizes.kv_heads, sizes.head_dim, dtype=dtype)
    part_v = numbers(sizes.moved, sizes.kv_heads, sizes.head_dim, dtype=dtype)
    rows = (numbers.some_rows(sizes), slice(0, sizes.moved), slice(0, sizes.moved))
    totals = (dq, *dkv.unbind(1))
    return Work(lambda fused: fused.add(totals, rows, (part_q, part_k, part_v)), [dq, dkv])


def gather_work(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Work:
    """Rows of q, out, dout, lse and kv are copied, as a ring's backward sends them."""
    numbers = Numbers(device)
    q, out, dout = (numbers(sizes.rows, sizes.heads, sizes.head_dim, dtype=dtype) for _ in "123")
    lse = numbers(sizes.heads, sizes.rows).t()  # [rows, heads]
    kv = numbers(sizes.rows, 2, sizes.kv_heads, sizes.head_dim, dtype=dtype)
    rows = numbers.some_rows(sizes)
    sources = (q, out, dout, lse, kv)
    targets = [x.new_full((sizes.moved, *x.shape[1:]), UNWRITTEN) for x in (q, out, dout)]
    targets.append(lse.new_full((sizes.heads, sizes.moved), UNWRITTEN).t())
    targets.append(kv.new_full((sizes.moved, *kv.shape[1:]), UNWRITTEN))
    return Work(lambda fused: fused.gather(sources, [rows] * 5, targets), targets)


def head_layout(sizes: Sizes) -> HeadLayout:
    """Return the layout of q, k and v for an all-to-all."""
    queries, keys = [], []
    for rank in range(sizes.ranks):
        start = rank * sizes.heads // sizes.ranks
        stop = (rank + 1) * sizes.heads // sizes.ranks
        queries.append(range(start, stop))
        a_key = sizes.heads // sizes.kv_heads  # query heads that read one
        keys.append(range(start // a_key, (stop - 1) // a_key + 1))
    return HeadLayout((queries, keys, keys), sizes.moved)


def pack_work(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Work:
    """q, k and v are laid side by side for every rank."""
    numbers = Numbers(device)
    layout = head_layout(sizes)
    numbers_of_layout = torch.from_numpy(layout.numbers).to(device)
    tensors = [numbers(sizes.moved, heads, sizes.head_dim, dtype=dtype) for heads in layout.heads]
    flat = tensors[0].new_full((sum(layout.slots) * sizes.head_dim,), UNWRITTEN)
    return Work(lambda fused: fused.pack(tensors, layout, numbers_of_layout, flat), [flat])


def unpack_work(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Work:
    """dq, dk and dv are taken from what every rank has sent; shared KV heads are summed."""
    numbers = Numbers(device)
    layout = head_layout(sizes)
    numbers_of_layout = torch.from_numpy(layout.numbers).to(device)
    flat = numbers(sum(layout.slots) * sizes.head_dim, dtype=dtype)
    tensors = []
    for heads in layout.heads:
        tensors.append(flat.new_full((sizes.moved, heads, sizes.head_dim), UNWRITTEN))
    return Work(lambda fused: fused.unpack(flat, layout, numbers_of_layout, tensors), tensors)


# ---- compared


def largest_difference(fused: Fused, make: Callable[[], Work]) -> float:
    """Return the largest difference between what an implementation writes and what torch does;
    infinite where one has a NaN, or only one an infinity."""
    mine = written_by(fused, make)
    twins = written_by(TorchFused(), make)
    largest = 0.0
    for got, wanted in zip(mine, twins, strict=True):
        pieces = zip(got.split(COMPARED_ROWS), wanted.split(COMPARED_ROWS), strict=True)
        for my_piece, twins_piece in pieces:
            # Equal infinities have a difference of NaN: they are put aside.
            difference = (my_piece - twins_piece).abs()
            difference = torch.where(my_piece == twins_piece, 0.0, difference)
            largest = max(largest, difference.nan_to_num(nan=torch.inf).max().item())
    return largest


def written_by(fused: Fused, make: Callable[[], Work]) -> list[torch.Tensor]:
    """Return what an implementation writes; what it reads is given up."""
    work = make()
    work.run(fused)
    return work.written
