"""Operations of `Fused` on random tensors: what runs each of them, and what it writes to. The
numbers are the same ones each time."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.fused_operations import Fused
from hf_flexseq.plan.head_layout import HeadLayout

UNWRITTEN = 9.0  # in what an operation is to write
ROWS = {  # a selection of 11 rows, and how many it has
    "a slice": (slice(3, 9), 6),
    "all rows": (slice(None), 11),
    "an index": (torch.tensor([7, 0, 10, 3, 4]), 5),
    "one row": (torch.tensor([6]), 1),
    "no row": (slice(4, 4), 0),
    "an index of no row": (torch.tensor([], dtype=torch.int64), 0),
}
# by tensor, by part, the heads of a part
HEAD_RANGES = {
    "heads that divide": [
        [range(0, 2), range(2, 4), range(4, 6)],
        [range(0, 1), range(1, 2), range(2, 3)],
        [range(0, 1), range(1, 2), range(2, 3)],
    ],
    "heads that do not divide": [
        [range(0, 1), range(1, 3), range(3, 5)],
        [range(0, 1), range(1, 2), range(2, 3)],
    ],
    "shared heads": [
        [range(0, 1), range(1, 2), range(2, 3), range(3, 4)],
        [range(0, 1), range(0, 1), range(1, 2), range(1, 2)],
    ],
    "overlapping heads": [
        [range(0, 2), range(2, 4), range(4, 6)],
        [range(0, 2), range(1, 3), range(2, 4)],
    ],
    "a part without heads": [
        [range(0, 1), range(1, 1), range(1, 2)],
        [range(0, 1), range(0, 0), range(0, 1)],
    ],
    "one part": [[range(0, 3)], [range(0, 1)]],
}


class Work(NamedTuple):
    """An operation on some tensors."""

    run: Callable[[Fused], None]

    written: list[torch.Tensor]
    """What `run` writes to."""

    def by(self, fused: Fused) -> list[torch.Tensor]:
        """Return what an implementation writes."""
        self.run(fused)
        return self.written


def rows_of(selection, shift=0):
    """A selection of `ROWS` or the first rows by an index, how many it has, and how many rows
    there are.

    shift: numbers in memory before the index.
    """
    if isinstance(selection, str):
        return *ROWS[selection], 11
    if isinstance(selection, int):
        return torch.arange(-shift, selection)[shift:], selection, 11 + selection
    return selection


def normal(seed, shape, dtype, device="cpu"):
    """Normal numbers of this shape and dtype."""
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=random, device=device)


def merged(selection, *, dtype, heads=3, head_dim=7, shift=0, device="cpu"):
    """A partial result is merged into out [total, H, D] and lse [total, H]; some rows lack keys on
    one side or both.

    dtype: of the part. Log-sum-exps are [H, rows] in memory, as kernels leave them, or behind
    `shift` others.
    """
    rows, count, total = rows_of(selection, shift)
    wide = lse_dtype(dtype)
    out = normal(0, (total, heads, head_dim), wide, device)
    lse = (300 * normal(1, (heads, shift + total), wide, device)).t()[shift:]
    part_out = normal(2, (count, heads, head_dim), dtype, device)
    part_lse = (300 * normal(3, (heads, shift + count), wide, device)).t()[shift:]
    for values, log_sum_exps, first in ((out, lse, 0), (part_out, part_lse, 1)):
        values[first::3] = 0
        log_sum_exps[first::3] = -torch.inf
    return Work(lambda fused: fused.merge((out, lse), rows, (part_out, part_lse)), [out, lse])


def added(selection, *, dtype, heads=5, kv_heads=2, head_dim=7, keys=None, device="cpu"):
    """Parts are added to dq [total, H, D], and to dk and dv, views of one tensor. keys: the rows
    of these, and how many."""
    rows, count, total = rows_of(selection)
    key_rows, key_count = keys or (slice(2, 6), 4)
    wide = lse_dtype(dtype)
    dq = normal(0, (total, heads, head_dim), wide, device)
    dkv = normal(1, (total, 2, kv_heads, head_dim), wide, device)
    shapes = [(count, heads, head_dim), *[(key_count, kv_heads, head_dim)] * 2]
    parts = [normal(2 + i, shape, dtype, device) for i, shape in enumerate(shapes)]
    every_row = (rows, key_rows, key_rows)
    return Work(lambda fused: fused.add((dq, *dkv.unbind(1)), every_row, parts), [dq, dkv])


def gathered(selection, *, dtype, heads=3, head_dim=7, pair=(2, 1, 40), keys=None, device="cpu"):
    """Rows of q [total, H, D], kv [total, *pair] and lse [total, H] are copied, the first two into
    one buffer. keys: the rows of kv."""
    rows, count, total = rows_of(selection)
    keys = torch.tensor([9, 8, 1, 1], device=device) if keys is None else keys
    q = normal(0, (total, heads, head_dim), dtype, device)
    kv = normal(1, (total, *pair), dtype, device)
    lse = normal(2, (heads, total), lse_dtype(dtype), device).t()
    size = len(keys) * kv[0].numel()
    buffer = q.new_full((size + count * heads * head_dim,), UNWRITTEN)
    kv_rows, q_rows = buffer[:size].view(-1, *pair), buffer[size:].view(count, heads, head_dim)
    lse_rows = lse.new_full((heads, count), UNWRITTEN).t()
    given = (q, kv, lse), (rows, keys, rows), (q_rows, kv_rows, lse_rows)
    return Work(lambda fused: fused.gather(*given), [buffer, lse_rows])


def packed(case, *, dtype, head_dim=7, tokens=5, device="cpu", back=False):
    """Heads of tensors are laid into the buffer of a layout, [slots x D]; back: from it into the
    tensors. case: of `HEAD_RANGES`, or such ranges."""
    layout = HeadLayout(HEAD_RANGES[case] if isinstance(case, str) else case, tokens)
    # one head more, for strides that are not those of a tensor of its own
    shapes = [(tokens, heads + 1, head_dim) for heads in layout.heads]
    tensors = [normal(i, shape, dtype, device)[:, 1:] for i, shape in enumerate(shapes)]
    flat = normal(9, (sum(layout.slots) * head_dim,), dtype, device)
    if back:
        return Work(lambda fused: fused.unpack(flat, layout, tensors), tensors)
    return Work(lambda fused: fused.pack(tensors, layout, flat), [flat])


def unpacked(case, **options):
    """The way back of `packed`."""
    return packed(case, back=True, **options)
