"""Sum many tensors over some ranks by few collectives.

1. Neighbouring tensors of one dtype form a bucket, up to `BUCKET_BYTES` together.
2. A bucket is copied into one flat tensor, summed over the ranks, and copied back. A tensor that
   fills a bucket alone is summed in place, which spares a copy of the largest ones.

All ranks must give tensors of the same shapes and dtypes in the same order: then they walk through
the same buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from hf_flexseq.distributed.transport import RankGroup

TensorT = TypeVar("TensorT", bound=torch.Tensor)

BUCKET_BYTES = 64 * 2**20  # per all-reduce: large messages, and little memory for a copy


def sum_over(group: RankGroup, tensors: Sequence[torch.Tensor], *, factor: float = 1.0) -> None:
    """Replace each tensor, of any shape, by `factor` times its sum over the group. Collective over
    the group.

    The factor is applied before the sum, so that an average cannot overflow on its way.
    """
    for bucket in buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            _sum_scaled(group, bucket[0], factor)
            continue
        # tensors of any shapes -> [elements of all]
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        _sum_scaled(group, flat, factor)
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, summed in zip(bucket, flat.split(sizes), strict=True):
            tensor.copy_(summed.view_as(tensor))  # [elements] -> the tensor's shape


def _sum_scaled(group: RankGroup, tensor: torch.Tensor, factor: float) -> None:
    """Replace a contiguous tensor of any shape by `factor` times its sum over the group."""
    if factor != 1.0:
        tensor.mul_(factor)
    group.all_reduce(tensor)


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
