"""Segments: lengths on the host, offsets on the device; and copies to a device."""

import pytest
import torch

from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


def test_offsets_totals_and_blocks_of_queries_that_have_keys():
    segments = Segments([3, 0, 5, 1], [2, 7, 0, 4], causal=False, device=CPU)
    assert segments.cu_seqlens_q.tolist() == [0, 3, 3, 8, 9]
    assert segments.cu_seqlens_k.tolist() == [0, 2, 9, 9, 13]
    assert segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    assert (segments.max_q, segments.max_k, segments.total_q, segments.total_k) == (5, 7, 9, 13)
    assert list(segments.blocks()) == [(slice(0, 3), slice(0, 2)), (slice(8, 9), slice(9, 13))]
    assert segments.has_work()
    assert segments.has_keyless()
    assert not Segments([0], [3], causal=False, device=CPU).has_keyless()


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "options", "message"),
    [
        ([3], [2], {"causal": True}, "at least as many keys as queries"),
        ([2], [3, 1], {"causal": False}, "1 query and 2 key"),
        ([-1], [1], {"causal": False}, "neg"),
        ([1], [1], {"causal": True, "window": 0}, "a window of 0"),
        ([1], [1], {"causal": False, "window": 2}, "a window of 2"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(q_lens, k_lens, options, message):
    with pytest.raises(AssertionError, match=message):
        Segments(q_lens, k_lens, device=CPU, **options)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((4, 2, 8), (3, 2, 8), (3, 2, 8), "query rows"),
        ((5, 2, 8), (4, 2, 8), (4, 2, 8), "key rows"),
        ((5, 2, 8), (3, 2, 8), (3, 1, 8), "do not fit"),
        ((5, 2, 6), (3, 2, 8), (3, 2, 8), "do not fit"),
        ((5, 3, 8), (3, 2, 8), (3, 2, 8), "cannot share"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(q, k, v, message):
    segments = Segments([5], [3], causal=False, device=CPU)
    with pytest.raises(AssertionError, match=message):
        segments.check(torch.empty(q), torch.empty(k), torch.empty(v))


@pytest.mark.parametrize(
    ("source", "target", "pinned"),
    [(CPU, CUDA, True), (CPU, CPU, False), (CPU, META, False), (META, CUDA, False)],
)
def test_a_copy_from_the_host_to_cuda_is_pinned_first_and_none_waits(
    source, target, pinned, monkeypatch
):
    calls = []

    def pin_memory(x):
        calls.append("pinned")
        return x

    def to(x, device, *, non_blocking=False):
        calls.append((device, non_blocking))
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(torch.empty(3, device=source), target)
    assert calls == ["pinned"] * pinned + [(target, True)]
