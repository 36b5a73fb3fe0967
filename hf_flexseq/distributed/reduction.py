"""Sum gradients over some ranks by few collectives.

1. Neighbouring gradients of one dtype form a bucket, up to `BUCKET_BYTES` together.
2. A bucket is copied into one flat tensor, summed over the ranks, and copied back. A gradient that
   fills a bucket alone is summed in place, which spares a copy of the largest ones.

All ranks must give parameters of the same shapes and dtypes in the same order: then they walk
through the same buckets.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_flexseq.distributed.transport import RankGroup

TensorT = TypeVar("TensorT", bound=torch.Tensor)

BUCKET_BYTES = 64 * 2**20  # per all-reduce: large messages, and little memory for a copy


def sum_gradients(
    parameters: Iterable[nn.Parameter], group: RankGroup | None, divisor: int = 1
) -> None:
    """Replace the gradient of each parameter by its sum over the group, divided by `divisor`.
    Collective over the group. group: None for this rank alone.

    A parameter without a gradient counts as zeros. Of a sharded one this rank's rows are summed:
    the ranks of the group must hold the same rows. Gradients are divided before the sum, so an
    average cannot overflow on its way.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    for bucket in buckets(gradients):
        is_alone = len(bucket) == 1 and bucket[0].is_contiguous()
        # tensors of any shapes -> [elements of all]
        flat = bucket[0] if is_alone else torch.cat([own.reshape(-1) for own in bucket])
        if divisor != 1:
            flat.mul_(1 / divisor)
        if group is not None:
            group.all_reduce(flat)
        if is_alone:
            continue
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, summed in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))  # [elements] -> the gradient's shape


@contextmanager
def averaged_gradients(
    parameters: Iterable[nn.Parameter], group: RankGroup | None, divisor: int
) -> Iterator[None]:
    """Surround backwards; afterwards the gradients that these have made are summed as by
    `sum_gradients`, and added to those from before. Collective over the group."""
    parameters = list(parameters)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    sum_gradients(parameters, group, divisor)
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad += gradient


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor, sharing its memory: [rows / ranks, ...] if sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Iterable[TensorT]) -> Iterator[list[TensorT]]:
    """Yield neighbouring tensors of one dtype, up to `BUCKET_BYTES` together."""
    bucket: list[TensorT] = []
    bucket_bytes = 0
    for tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        is_full = bucket_bytes + tensor_bytes > BUCKET_BYTES
        if bucket and (is_full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(tensor)
        bucket_bytes += tensor_bytes
    if bucket:
        yield bucket
