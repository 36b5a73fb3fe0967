"""Sums of many tensors in few collectives, against sums of one tensor after the other."""

import pytest
import torch

from hf_flexseq.distributed import reduction
from hf_flexseq.distributed.reduction import sum_over
from tests.ranks import join, run_threads

SHAPES = [(3,), (2, 5), (), (7, 1, 2), (0,), (40,), (4, 4)]
DTYPES = [torch.float64, torch.float64, torch.float64, torch.float32, torch.float32]


def tensors_of(rank):
    generator = torch.Generator().manual_seed(rank)
    tensors = []
    for index, shape in enumerate(SHAPES * 2):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors.append(x.to(DTYPES[index % len(DTYPES)]))
    transposed = torch.randn(6, 2, generator=generator, dtype=torch.float64).T
    assert not transposed.is_contiguous()
    return [*tensors, transposed]


def summed(rank, world_size, factor):
    communicator = join()
    everyone = communicator.transport.open_group([range(world_size)])
    tensors = tensors_of(rank)
    sum_over(everyone, tensors, factor=factor)
    return tensors


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_every_tensor_becomes_its_sum(bucket_bytes, factor, monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", bucket_bytes)
    for found in run_threads(summed, 3, factor):
        inputs = [tensors_of(rank) for rank in range(3)]
        for index, tensor in enumerate(found):
            wanted = sum(of_rank[index] for of_rank in inputs) * factor
            assert tensor.dtype == wanted.dtype
            torch.testing.assert_close(tensor, wanted)


def test_buckets_are_full_of_one_dtype(monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 32)
    sizes = [(2, torch.float64), (2, torch.float64), (1, torch.float64), (1, torch.float32)]
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    assert [len(bucket) for bucket in reduction.buckets(tensors)] == [2, 1, 1]


def sizes_of(found):
    return [[tensor.numel() for tensor in bucket] for bucket in found]


def test_neighbours_share_a_bucket_until_it_is_full(monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 6, 1, 30, 2, 8)]
    assert sizes_of(reduction.buckets(tensors)) == [[4, 6], [1], [30], [2, 8]]


def test_nothing_is_no_bucket():
    assert list(reduction.buckets([])) == []
