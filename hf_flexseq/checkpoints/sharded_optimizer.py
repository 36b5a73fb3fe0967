"""The optimizer's state of a model whose parameters ranks share as DTensors: FSDP2, HSDP, experts.

Ranks share the writing. The state is divided into parts, each in a separate file. Rank r writes
the parts r, r + ranks, r + 2 ranks, ... In a round, of one part per rank:

1. All ranks gather the tensors of the round, one after the other. Only the rank that writes a
   tensor keeps it, on its host.
2. All ranks write their parts at the same time.

So a device holds one whole tensor besides its own shares, and a host a part for each of its ranks.

Rejected: that each rank writes its shares. A run on other ranks would need rules for every
placement to put them together again; a file of whole tensors needs none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_flexseq.checkpoints.optimizer import state_of, write_optimizer
from hf_flexseq.checkpoints.optimizer_files import TENSORS
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.distributed.communicator import Communicator

PART_BYTES = 2 * 2**30
"""The most bytes of a part with more than one tensor, which a rank keeps on its host to write."""


def save_sharded_optimizer(
    model: nn.Module, optimizer: Any, scheduler: Any, folder: str, communicator: Communicator
) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the optimizer's parameters are the sharded ones
    tensors, values = state_of(model, optimizer)
    sizes = {key: tensors[key].numel() * tensors[key].element_size() for key in sorted(tensors)}
    parts = divided(sizes, communicator.world_size)
    own_values = values if communicator.rank == 0 else {}
    own_parts = _gathered(parts, tensors, communicator)
    write_optimizer(folder, own_parts, own_values, scheduler, communicator)


def divided(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Return the keys of each part, in the order of `sizes`: about one part for each rank, or more
    of at most `PART_BYTES`. sizes: bytes of each tensor by key."""
    most = min(-(-sum(sizes.values()) // ranks), PART_BYTES)
    parts: list[list[str]] = []
    room = 0
    for key, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = most
        parts[-1].append(key)
        room -= size
    return parts


def _gathered(
    parts: Sequence[Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    communicator: Communicator,
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield, for each round, the file and the whole tensors of this rank's part, if it has one.
    Collective over the world."""
    ranks = communicator.world_size
    for first in range(0, len(parts), ranks):
        own: dict[str, torch.Tensor] = {}
        for rank, keys in enumerate(parts[first : first + ranks]):
            for key in keys:
                tensor = whole(tensors[key])  # [rows / ranks, ...] -> [rows, ...] where sharded
                if rank == communicator.rank:
                    own[key] = tensor.cpu()
        if own:
            number = first + communicator.rank + 1
            yield TENSORS.format(part=number, parts=len(parts)), own
