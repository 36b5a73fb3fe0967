"""Tensors that several ranks share as DTensors: the whole of one, and a rank's own part of it.

Experts are sharded over a mesh of two or three dimensions, which may interleave their rows. torch
says which rows a rank has (`distribute_tensor` of their numbers), so every placement that shards
the first dimension is read by rows, and only a rank's own ones.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows [rows, ...] of a tensor. Collective over the ranks that share it."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    if tensor.device.type != device:
        tensor = tensor.to(device)  # a share that is kept on the host
    return tensor.full_tensor()  # [rows / ranks, ...] -> [rows, ...]


def read_own(stored: Any, own: torch.Tensor) -> None:
    """Copy this rank's part of a stored tensor into `own`, which has the same whole shape.

    stored: a whole tensor, or the slice of a safetensors file that gives it by rows.
    """
    if not isinstance(own, DTensor):
        own.copy_(stored[...])
        return
    share = own.to_local()  # the memory of `own`
    if any(getattr(placement, "dim", 0) != 0 for placement in own.placements):
        share.copy_(_divided(stored[...], own).to_local())
        return
    done = 0
    for start, stop in _own_rows(own):
        rows = stop - start
        share[done : done + rows].copy_(stored[start:stop])  # [rows of this run, ...]
        done += rows


def _own_rows(tensor: DTensor) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of rows that this rank has, in the order of its share."""
    numbers = _divided(torch.arange(tensor.shape[0]), tensor).to_local().tolist()
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[start], numbers[index - 1] + 1
            start = index


def _divided(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Return a whole tensor [rows, ...], placed as `like` is. No rank sends anything."""
    mesh = like.device_mesh
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None
    )
