"""All-to-all with uneven parts, over a contiguous range of ranks: by one collective where the
communicator has a group for the ranks, by messages elsewhere."""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Label, Lane, Message, Pending, unnamed
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
) -> list[Pending]:
    """Post the transfer of sent_counts[i] elements to `ranks[i]`, and of received_counts[i]
    elements from there; each of the results is waited for exactly once.

    ranks: contiguous global ranks, this one among them. sent: contiguous, flat [elements to all
    ranks], by rank; it may not change before the wait. received: contiguous, flat [elements from
    all ranks], by rank; it may be read after the wait. Nothing is posted for a rank without
    elements, as both sides expect.
    """
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    if block is not None:
        return [block.all_to_all(received, sent, received_counts, sent_counts, label=label)]

    # 1. the messages of each lane
    sends: dict[Lane, list[Message]] = {lane: [] for lane in communicator.lanes}
    recvs: dict[Lane, list[Message]] = {lane: [] for lane in communicator.lanes}
    # views: [elements of all ranks] -> [elements of one rank], by rank
    parts = zip(
        ranks, sent.split(list(sent_counts)), received.split(list(received_counts)), strict=True
    )
    for rank, part_out, part_in in parts:
        if rank == communicator.rank:
            part_in.copy_(part_out)
            continue
        lane = communicator.lane(rank)
        if part_out.numel():
            sends[lane].append(Message(part_out, rank, tag))
        if part_in.numel():
            recvs[lane].append(Message(part_in, rank, tag))

    # 2. one post for each; all ranks take the lanes in one order
    posts = []
    for lane in communicator.lanes:
        if sends[lane] or recvs[lane]:
            post = communicator.transport.post
            posts.append(post(lane, sends=sends[lane], recvs=recvs[lane], label=label))
    return posts
