"""All-to-all with uneven parts, over a contiguous range of ranks: by one collective where the
communicator has a group for the ranks, by messages elsewhere."""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.distributed.transport import Label, Pending, unnamed
from hf_flexseq.program.tags import UNTAGGED


def all_to_all(
    communicator: Communicator,
    ranks: Sequence[int],
    sent: torch.Tensor,
    received: torch.Tensor,
    sent_counts: Sequence[int],
    received_counts: Sequence[int],
    *,
    tag: int = UNTAGGED,
    label: Label = unnamed,
) -> Pending:
    """Post the transfer of sent_counts[i] elements to `ranks[i]`, and of received_counts[i]
    elements from there; the result is waited for exactly once.

    ranks: contiguous global ranks, this one among them. sent: contiguous, flat [elements to all
    ranks], by rank; it may not change before the wait. received: contiguous, flat [elements from
    all ranks], by rank; it may be read after the wait.
    """
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    if block is not None:
        return block.all_to_all(received, sent, received_counts, sent_counts, label=label)

    own = communicator.rank - ranks[0]
    sends = []
    recvs = []
    # views: [elements of all ranks] -> [elements of one rank], by rank
    parts_out = sent.split(list(sent_counts))
    parts_in = received.split(list(received_counts))
    for index, rank in enumerate(ranks):
        if index == own:
            parts_in[own].copy_(parts_out[own])
        else:
            sends.append((parts_out[index], rank))
            recvs.append((parts_in[index], rank))
    return Transfers(communicator, sends=sends, recvs=recvs, tag=tag, label=label)
