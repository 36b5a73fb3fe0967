"""Operations of `Fused` on random tensors: each returns what an implementation writes."""

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.plan.head_layout import HeadLayout

ROWS = {  # a selection of 11 rows, and how many it has
    "a slice": (slice(3, 9), 6),
    "all rows": (slice(None), 11),
    "an index": (torch.tensor([7, 0, 10, 3, 4]), 5),
    "one row": (torch.tensor([6]), 1),
    "no row": (slice(4, 4), 0),
    "an index of no row": (torch.tensor([], dtype=torch.int64), 0),
}


def rows_of(selection, shift=0):
    """A selection or the first rows by an index, how many it has, and how many rows there are.

    shift: numbers in memory before the index.
    """
    if isinstance(selection, str):
        return *ROWS[selection], 11
    return torch.arange(-shift, selection)[shift:], selection, 11 + selection


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


def normal(seed, shape, dtype):
    """Normal numbers of this shape and dtype."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=random).to(dtype)


def merged(fused, selection, *, dtype, heads=3, head_dim=7, shift=0):
    """out [total, H, D] and lse [total, H] after a merge; some rows lack keys on one side or both.

    dtype: of the part. Log-sum-exps are [H, rows] in memory, as kernels leave them, or behind
    `shift` others.
    """
    rows, count, total = rows_of(selection, shift)
    wide = lse_dtype(dtype)
    out = normal(0, (total, heads, head_dim), wide)
    lse = (300 * normal(1, (heads, shift + total), wide)).t()[shift:]
    part_out = normal(2, (count, heads, head_dim), dtype)
    part_lse = (300 * normal(3, (heads, shift + count), wide)).t()[shift:]
    for values, log_sum_exps, keyless in ((out, lse, [0, 3]), (part_out, part_lse, [1, 4])):
        for row in keyless:
            log_sum_exps[row : row + 1] = -torch.inf
            values[row : row + 1] = 0
    fused.merge((out, lse), rows, (part_out, part_lse))
    return out, lse


def added(fused, selection, *, dtype, head_dim=7):
    """dq [total, 5, D], dk and dv [total, 2, D] after parts were added; dk and dv are views."""
    rows, count, total = rows_of(selection)
    wide = lse_dtype(dtype)
    dq, dkv = normal(0, (total, 5, head_dim), wide), normal(1, (total, 2, 2, head_dim), wide)
    shapes = [(count, 5, head_dim), (4, 2, head_dim), (4, 2, head_dim)]
    parts = [normal(2 + i, shape, dtype) for i, shape in enumerate(shapes)]
    fused.add((dq, *dkv.unbind(1)), (rows, slice(2, 6), slice(2, 6)), parts)
    return [dq, dkv]


def gathered(fused, selection, *, dtype, head_dim=7):
    """q [n, 3, D], kv [4, 2, 1, 40] and lse [n, 3], in one buffer where dtypes allow."""
    rows, count, total = rows_of(selection)
    q, kv = normal(0, (total, 3, head_dim), dtype), normal(1, (total, 2, 1, 40), dtype)
    lse = normal(2, (3, total), lse_dtype(dtype)).t()
    buffer = torch.full((320 + count * 3 * head_dim,), 9.0, dtype=dtype)
    kv_rows, q_rows = buffer[:320].view(4, 2, 1, 40), buffer[320:].view(count, 3, head_dim)
    lse_rows = torch.full((3, count), 9.0, dtype=lse.dtype).t()
    keys = torch.tensor([9, 8, 1, 1])
    fused.gather((q, kv, lse), (rows, keys, rows), (q_rows, kv_rows, lse_rows))
    return [buffer, lse_rows]


def packed(fused, case, *, dtype, head_dim=7, tokens=5, shift=0):
    """The buffer of a layout, [slots x D], and the tensors that are unpacked from such a one.

    shift: numbers in memory before the layout's table.
    """
    layout = HeadLayout(HEAD_RANGES[case], tokens)
    before = torch.zeros(shift, dtype=torch.int64)
    table = torch.cat([before, torch.from_numpy(layout.numbers)])[shift:]
    # one head more, for strides that are not those of a tensor of its own
    shapes = [(tokens, heads + 1, head_dim) for heads in layout.heads]
    tensors = [normal(number, shape, dtype)[:, 1:] for number, shape in enumerate(shapes)]
    targets = [torch.full(x.shape, 9.0, dtype=dtype) for x in tensors]
    elements = sum(layout.slots) * head_dim
    flat = torch.full((elements,), 9.0, dtype=dtype)
    fused.pack(tensors, layout, table, flat)
    fused.unpack(normal(9, (elements,), dtype), layout, table, targets)
    return [flat, *targets]
