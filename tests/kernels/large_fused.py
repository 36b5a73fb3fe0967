"""What attention does between kernel calls, on the sizes of a ring of a large model, on small ones
that divide nothing, and on more elements than 32-bit numbers count. Copies and sums must be the
same bits by any implementation; what a merge gives may differ by the accuracy of float32.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from hf_flexseq.kernels.fused_operations import Fused, TorchFused
from tests.kernels.fused_cases import Work, added, gathered, merged, packed, unpacked

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


def works(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Work]]:
    """Return what makes the work of every operation, by name; it has the same numbers each time.

    dtype: of what kernels take and give.
    """
    random = torch.Generator(device).manual_seed(0)
    index = torch.randperm(sizes.rows, generator=random, device=device)[: sizes.moved]
    first = slice(0, sizes.moved)
    by_slice, by_index = ((rows, sizes.moved, sizes.rows) for rows in (first, index))
    common = {"dtype": dtype, "head_dim": sizes.head_dim, "device": device}
    keys = {"kv_heads": sizes.kv_heads, "keys": (first, sizes.moved)}
    pair = {"pair": (2, sizes.kv_heads, sizes.head_dim), "keys": index}
    ranges = head_ranges(sizes)
    return {
        "merge": partial(merged, by_slice, heads=sizes.heads, **common),
        "merge by index": partial(merged, by_index, heads=sizes.heads, **common),
        "add": partial(added, by_index, heads=sizes.heads, **keys, **common),
        "gather": partial(gathered, by_index, heads=sizes.heads, **pair, **common),
        "pack": partial(packed, ranges, tokens=sizes.moved, **common),
        "unpack": partial(unpacked, ranges, tokens=sizes.moved, **common),
    }


def head_ranges(sizes: Sizes) -> tuple[list[range], ...]:
    """Return the heads of q, k and v by rank, for an all-to-all."""
    queries, keys = [], []
    for rank in range(sizes.ranks):
        start = rank * sizes.heads // sizes.ranks
        stop = (rank + 1) * sizes.heads // sizes.ranks
        queries.append(range(start, stop))
        a_key = sizes.heads // sizes.kv_heads  # query heads that read one
        keys.append(range(start // a_key, (stop - 1) // a_key + 1))
    return queries, keys, keys


def largest_difference(fused: Fused, make: Callable[[], Work]) -> float:
    """Return the largest difference between what an implementation writes and what torch does;
    infinite where one has a NaN, or only one an infinity."""
    largest = 0.0
    for got, wanted in zip(make().by(fused), make().by(TorchFused()), strict=True):
        pieces = zip(got.split(COMPARED_ROWS), wanted.split(COMPARED_ROWS), strict=True)
        for my_piece, twins_piece in pieces:
            # Equal infinities have a difference of NaN: they are put aside.
            difference = (my_piece - twins_piece).abs()
            difference = torch.where(my_piece == twins_piece, 0.0, difference)
            largest = max(largest, difference.nan_to_num(nan=torch.inf).max().item())
    return largest
