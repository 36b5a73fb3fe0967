"""Partial results over different keys merge into the result over all keys."""

import pytest
import torch

from hf_flexseq.kernels.merge import merge_into


def attend(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [heads, queries, keys], v [heads, keys, D] -> out [heads, queries, D], lse [heads,
    queries]."""
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def random_scores_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    """scores [3, 5, 11] of which some are very large, v [3, 11, 7]."""
    random = torch.Generator().manual_seed(0)
    scores = 300 * torch.randn(3, 5, 11, dtype=torch.float64, generator=random)
    return scores, torch.randn(3, 11, 7, dtype=torch.float64, generator=random)


def merged_partials(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over the keys of both."""
    out, lse = out_a.to(lse_a.dtype, copy=True), lse_a.clone()
    merge_into(out, lse, out_b, lse_b)
    return out, lse


@pytest.mark.parametrize("keys", [1, 4, 10])
def test_two_partial_results_make_the_whole(keys: int) -> None:
    scores, v = random_scores_and_values()
    first = attend(scores[..., :keys], v[:, :keys])
    second = attend(scores[..., keys:], v[:, keys:])
    out, lse = merged_partials(*first, *second)
    wanted_out, wanted_lse = attend(scores, v)
    torch.testing.assert_close(out, wanted_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)


def test_a_partial_result_over_no_keys_changes_nothing() -> None:
    out, lse = attend(*random_scores_and_values())
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merged_partials(out, lse, *nothing), merged_partials(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def test_16_bit_results_are_merged_in_the_dtype_of_lse() -> None:
    out, lse = attend(*random_scores_and_values())
    merged_out, merged_lse = merged_partials(
        out.bfloat16(), lse.float(), out.bfloat16(), lse.float()
    )
    assert merged_out.dtype == torch.float32
    assert merged_lse.dtype == torch.float32
