"""Segments: lengths on the host, offsets on the device."""

import pytest
import torch

from hf_flexseq.kernels.segments import Segments

CPU = torch.device("cpu")


def test_offsets_and_totals():
    segments = Segments([3, 0, 5], [2, 7, 0], causal=False, device=CPU)
    assert segments.cu_seqlens_q.tolist() == [0, 3, 3, 8]
    assert segments.cu_seqlens_k.tolist() == [0, 2, 9, 9]
    assert segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    assert (segments.max_q, segments.max_k, segments.total_q, segments.total_k) == (5, 7, 8, 9)


def test_offsets_are_made_once_and_shared():
    segments = Segments([3, 1], [3, 1], causal=True, device=CPU)
    assert segments.cu_seqlens_q is segments.cu_seqlens_q is segments.cu_seqlens_k


def test_blocks_skip_sequences_without_queries_or_keys():
    segments = Segments([3, 0, 5, 1], [2, 7, 0, 4], causal=False, device=CPU)
    assert list(segments.blocks()) == [(slice(0, 3), slice(0, 2)), (slice(8, 9), slice(9, 13))]
    assert segments.has_work()
    assert segments.has_keyless()


def test_no_sequences_at_all():
    segments = Segments([], [], causal=True, device=CPU)
    assert segments.cu_seqlens_q.tolist() == [0]
    assert segments.max_q == segments.total_k == 0
    assert not list(segments.blocks())
    assert not segments.has_work()
    assert not segments.has_keyless()


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal", "message"),
    [
        ([3], [2], True, "at least as many keys as queries"),
        ([2], [3, 1], False, "1 query and 2 key"),
        ([-1], [1], False, "neg"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(q_lens, k_lens, causal, message):
    with pytest.raises(AssertionError, match=message):
        Segments(q_lens, k_lens, causal=causal, device=CPU)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((4, 2, 8), (3, 2, 8), (3, 2, 8), "query rows"),
        ((5, 2, 8), (4, 2, 8), (4, 2, 8), "key rows"),
        ((5, 2, 8), (3, 2, 8), (3, 1, 8), "do not fit"),
        ((5, 3, 8), (3, 2, 8), (3, 2, 8), "cannot share"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(q, k, v, message):
    segments = Segments([5], [3], causal=False, device=CPU)
    with pytest.raises(AssertionError, match=message):
        segments.check(torch.empty(q), torch.empty(k), torch.empty(v))
