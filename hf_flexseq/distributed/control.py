"""Small exchanges of Python values over the control group; each is collective over the world."""

from typing import Any

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator


def gather_ints(communicator: Communicator, values: list[int]) -> list[list[int]]:
    """Return the list of every rank, by rank; the lists may differ in length."""
    if communicator.control is None:
        return [list(values)]
    world = range(communicator.world_size)
    # 1. all lengths: [1] -> one [1] per rank
    count = torch.tensor([len(values)])
    counts = [torch.empty_like(count) for _ in world]
    dist.all_gather(counts, count, group=communicator.control)
    # 2. all lists, padded to the longest: [width] -> one [width] per rank
    width = max(int(n) for n in counts)
    padded = torch.zeros(width, dtype=torch.int64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.int64)
    rows = [torch.empty_like(padded) for _ in world]
    dist.all_gather(rows, padded, group=communicator.control)
    # 3. without the padding
    return [row[: int(n)].tolist() for row, n in zip(rows, counts, strict=True)]


def gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Return the value of every rank, by rank; any value that can be pickled."""
    if communicator.control is None:
        return [value]
    values: list[Any] = [None] * communicator.world_size
    dist.all_gather_object(values, value, group=communicator.control)
    return values


def broadcast_object(communicator: Communicator, value: Any) -> Any:
    """Return the value of rank 0 on every rank; any value that can be pickled."""
    if communicator.control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=communicator.control)
    return box[0]
