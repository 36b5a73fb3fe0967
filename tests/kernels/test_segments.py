"""Segments: lengths on the host, offsets on the device; and copies to a device."""

import pytest
import torch

from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device
from tests.kernels.reference import blocks

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


def test_offsets_totals_and_blocks_of_queries_that_have_keys():
    segments = Segments([3, 0, 5, 1], [2, 7, 0, 4], causal=False, device=CPU)
    assert segments.cu_seqlens_q.tolist() == [0, 3, 3, 8, 9]
    assert segments.cu_seqlens_k.tolist() == [0, 2, 9, 9, 13]
    assert segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    assert (segments.max_q, segments.max_k, segments.total_q, segments.total_k) == (5, 7, 9, 13)
    assert list(blocks(segments)) == [(slice(0, 3), slice(0, 2)), (slice(8, 9), slice(9, 13))]
    assert segments.has_work()
    assert segments.has_keyless()
    assert not Segments([0], [3], causal=False, device=CPU).has_keyless()


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
