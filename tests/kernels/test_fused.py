"""torch's version of the fused operations, against loops over rows and heads."""

import pytest
import torch

from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES, ROWS, added, gathered, merged, normal

FUSED = TorchFused()
DOUBLE = torch.float64


def logsumexp_merge(out, lse, part_out, part_lse):
    """Merge two rows by their weights: out [H, D], lse [H]."""
    total = torch.logaddexp(lse, part_lse)
    some = total > -torch.inf
    weights = [torch.where(some, (x - total).exp(), 0.0)[:, None] for x in (lse, part_lse)]
    return out * weights[0] + part_out * weights[1], total


@pytest.mark.parametrize("selection", ROWS)
def test_a_part_is_merged_into_its_rows(selection):
    class Wanted:
        def merge(self, out, lse, rows, part_out, part_lse):
            for j, row in enumerate(torch.arange(len(out))[rows].tolist()):
                out[row], lse[row] = logsumexp_merge(out[row], lse[row], part_out[j], part_lse[j])

    got_out, got_lse = merged(FUSED, selection, dtype=DOUBLE)
    out, lse = merged(Wanted(), selection, dtype=DOUBLE)
    torch.testing.assert_close(got_out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_lse, lse, rtol=1e-12, atol=1e-12)


def test_a_result_over_no_keys_stays_one_when_another_is_merged():
    out, lse = merged(FUSED, "all rows", dtype=DOUBLE)
    nothing, nothing_lse = torch.zeros(1, 3, 7), torch.full((1, 3), -torch.inf)
    FUSED.merge(nothing, nothing_lse, slice(None), nothing.clone(), nothing_lse.clone())
    assert (nothing == 0).all()
    assert (nothing_lse == -torch.inf).all()
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("selection", ROWS)
def test_parts_are_added_to_their_rows(selection):
    class Wanted:
        def add(self, totals, rows, parts):
            for total, of_total, part in zip(totals, rows, parts, strict=True):
                for j, row in enumerate(torch.arange(len(total))[of_total].tolist()):
                    total[row] += part[j]

    for got, wanted in zip(
        added(FUSED, selection, dtype=DOUBLE),
        added(Wanted(), selection, dtype=DOUBLE),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("selection", ROWS)
def test_rows_are_gathered_into_one_buffer(selection):
    class Wanted:
        def gather(self, sources, rows, targets):
            for source, of_source, target in zip(sources, rows, targets, strict=True):
                for j, row in enumerate(torch.arange(len(source))[of_source].tolist()):
                    target[j] = source[row]

    for got, wanted in zip(
        gathered(FUSED, selection, dtype=DOUBLE),
        gathered(Wanted(), selection, dtype=DOUBLE),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("case", HEAD_RANGES)
def test_each_part_of_the_buffer_has_its_heads_of_all_tensors(case):
    head_ranges = HEAD_RANGES[case]
    layout = HeadLayout(head_ranges, 5)
    tensors = [normal(i, (5, heads, 4), DOUBLE) for i, heads in enumerate(layout.heads)]
    flat = torch.empty(sum(layout.slots) * 4, dtype=DOUBLE)
    FUSED.pack(tensors, layout, torch.from_numpy(layout.numbers), flat)
    parts = []
    for ranges in zip(*head_ranges, strict=True):
        heads = [x[:, one] for x, one in zip(tensors, ranges, strict=True)]
        parts.append(torch.cat(heads, dim=1).reshape(-1))
    assert torch.equal(flat, torch.cat(parts))


@pytest.mark.parametrize("case", HEAD_RANGES)
def test_unpacking_sums_what_packing_repeats(case):
    layout = HeadLayout(HEAD_RANGES[case], 5)
    tensors = [normal(i, (5, heads, 4), DOUBLE) for i, heads in enumerate(layout.heads)]
    flat = torch.empty(sum(layout.slots) * 4, dtype=DOUBLE)
    table = torch.from_numpy(layout.numbers)
    FUSED.pack(tensors, layout, table, flat)
    got = [torch.full_like(x, 9.0) for x in tensors]
    FUSED.unpack(flat, layout, table, got)
    for x, total, ranges in zip(tensors, got, HEAD_RANGES[case], strict=True):
        for head in range(x.shape[1]):
            repeats = sum(head in range(one.start, one.stop) for one in ranges)
            assert torch.allclose(total[:, head], repeats * x[:, head], rtol=1e-14)


def test_heads_that_ranks_share_are_summed_in_float32_and_rounded_once():
    layout = HeadLayout([[slice(0, 1)] * 8], 1)
    flat = normal(0, (8 * 3,), torch.bfloat16)
    (got,) = (torch.empty(1, 1, 3, dtype=torch.bfloat16),)
    FUSED.unpack(flat, layout, torch.from_numpy(layout.numbers), (got,))
    assert torch.equal(got[0, 0], flat.float().view(8, 3).sum(0).bfloat16())


def test_heads_that_divide_are_one_copy_for_each_tensor():
    layout = HeadLayout(HEAD_RANGES["heads that divide"], 5)
    assert len(layout.runs) == 3
