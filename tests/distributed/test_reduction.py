"""Sums of many gradients in few collectives, against sums of one gradient after the other."""

import pytest
import torch

from hf_flexseq.distributed import reduction
from hf_flexseq.distributed.reduction import sum_gradients
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


def summed(rank, world_size, divisor):
    communicator = join()
    everyone = communicator.transport.open_group([range(world_size)])
    parameters = []
    for tensor in tensors_of(rank):
        parameter = torch.nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor
        parameters.append(parameter)
    if rank == 0:
        parameters[1].grad = None  # counts as zeros
    sum_gradients(parameters, everyone, divisor)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("divisor", [1, 3])
def test_every_gradient_becomes_its_sum(divisor, monkeypatch):
    inputs = [tensors_of(rank) for rank in range(3)]
    inputs[0][1].zero_()
    for bucket_bytes in (1, 100, 2**20):
        monkeypatch.setattr(reduction, "BUCKET_BYTES", bucket_bytes)
        for found in run_threads(summed, 3, divisor):
            for index, tensor in enumerate(found):
                wanted = sum(of_rank[index] for of_rank in inputs) / divisor
                assert tensor.dtype == wanted.dtype
                torch.testing.assert_close(tensor, wanted)


def test_neighbours_of_one_dtype_share_a_bucket_until_it_is_full(monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 6, 1, 30, 2, 7)]
    tensors.append(torch.zeros(1, dtype=torch.float16))
    found = [[x.numel() for x in bucket] for bucket in reduction.buckets(tensors)]
    assert found == [[4, 6], [1], [30], [2, 7], [1]]
    assert list(reduction.buckets([])) == []
