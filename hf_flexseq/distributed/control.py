"""Small exchanges of Python values over the control group; all of them collective over the
world."""

from typing import Any

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator


def gather_ints(communicator: Communicator, values: list[int]) -> list[list[int]]:
    """Every rank's list, by rank; the lists may differ in length."""
    if communicator.control is None:
        return [list(values)]
    count = torch.tensor([len(values)])
    counts = [torch.empty_like(count) for _ in range(communicator.world_size)]
    dist.all_gather(counts, count, group=communicator.control)
    width = max(int(c) for c in counts)
    padded = torch.zeros(width, dtype=torch.int64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.int64)
    rows = [torch.empty_like(padded) for _ in range(communicator.world_size)]
    dist.all_gather(rows, padded, group=communicator.control)
    return [row[: int(n)].tolist() for row, n in zip(rows, counts, strict=True)]


def gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    if communicator.control is None:
        return [value]
    values: list[Any] = [None] * communicator.world_size
    dist.all_gather_object(values, value, group=communicator.control)
    return values


def broadcast_object(communicator: Communicator, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if communicator.control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=communicator.control)
    return box[0]
