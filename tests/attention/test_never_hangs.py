"""Random plans on 4 ranks that wait at random: every one of them comes to its end. HANG_PLANS=1000
runs them all."""

import os
import random
import time

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan.shard import make_shard, remapped
from hf_flexseq.schedule.routing import NicFigures
from hf_flexseq.topology import Topology
from tests.plans import random_plan
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


PLANS = int(os.environ.get("HANG_PLANS", "200"))  # of all kinds together
LAYERS = 2
PAUSES_S = (0, 0, 0, 0.002)  # one of them before every layer
CPU = torch.device("cpu")
# Over these every transfer that leaves a NIC idle is routed.
LINKS = NicFigures(
    ranks_per_node=2, nics_per_node=2, inside_s=1e-15, across_s=1e-9, transfer_s=0.0
)
KINDS = {
    "one node": (1, True, None),
    "two nodes": (2, True, None),
    "no collectives": (2, False, None),
    "routed": (2, False, LINKS),
}  # nodes, process groups of blocks, links


def run_plans(rank, world_size, kind, plans, pauses_s=PAUSES_S):
    nodes, use_blocks, links = KINDS[kind]
    communicator = Communicator(
        Topology(nodes=nodes, ranks_per_node=world_size // nodes), use_blocks=use_blocks
    )
    shared, own = random.Random(kind), random.Random(rank)
    calls = 0
    for _ in range(plans):
        lengths = [shared.choice((1, 2, 3, 5, 8, 13, 60)) for _ in range(shared.randint(1, 9))]
        plan = random_plan(lengths, world_size, shared, nodes=nodes)
        for micro_batch in plan.micro_batches:
            shard = make_shard(micro_batch, plan.lengths, rank)
            if micro_batch.remap:
                shard = remapped(shard, micro_batch, plan.lengths, communicator.topology)
            if shard.zones or shard.linear_tokens:
                calls += run_layers(shard, communicator, own, pauses_s, links)
    return calls


def run_layers(shard, communicator, own, pauses_s, links):
    """Forward and backward of a few layers with pauses of this rank's own; the number of attention
    calls."""
    seq_ctx = SequenceContext(
        shard, communicator, choose_kernel(CPU, torch.float32, 4), CPU, links=links
    )
    x = torch.randn(shard.linear_tokens, 4, 4, requires_grad=True)
    y = x
    for _ in range(LAYERS):
        time.sleep(own.choice(pauses_s))
        y = sequence_parallel_attention(y, y, y, seq_ctx)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    return LAYERS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(60 + PLANS)
def test_random_plans_never_hang(kind):
    plans = -(-PLANS // len(KINDS))
    calls = run_ranks(run_plans, 4, kind, plans, seconds=50 + PLANS)
    assert all(count > plans for count in calls)


# ---- transfers between two ranks without tags, and a rank's batches one after the other


def posted_transfers(rank, world_size, kind, plans):
    """Every batch of transfers in the order of posting: its sends and receives, (peer, elements)
    each."""
    posted, post = [], Transfers.__init__

    def record(transfers, communicator, *, sends, recvs, **options):
        sent = [(peer, x.numel()) for x, peer in sends if x.numel()]
        received = [(peer, x.numel()) for x, peer in recvs if x.numel()]
        posted.append([sent, received])
        post(transfers, communicator, sends=sends, recvs=recvs, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Transfers, "__init__", record)
        run_plans(rank, world_size, kind, plans, pauses_s=(0,))
    return posted


def first_to(batch, peer):
    return next((message for message in batch if message[0] == peer), None)


@pytest.mark.parametrize("kind", ["no collectives", "routed"])
def test_what_ranks_post_ends_in_order_and_without_tags(kind):
    by_rank = run_ranks(posted_transfers, 4, kind, 40)
    assert sum(map(len, by_rank)) > 1000
    moved = True
    while moved:
        moved = False
        for queue in by_rank:
            while queue and not any(queue[0]):
                queue.pop(0)
                moved = True
        for source, target in (
            (a, b) for a in range(4) for b in range(4) if by_rank[a] and by_rank[b]
        ):
            sends, recvs = by_rank[source][0][0], by_rank[target][0][1]
            sent, received = first_to(sends, target), first_to(recvs, source)
            if sent is not None and received is not None:
                assert sent[1] == received[1], (
                    f"{source} sends {sent[1]} elements, {target} expects {received[1]}"
                )
                sends.remove(sent)
                recvs.remove(received)
                moved = True
    assert not any(by_rank), [queue[:1] for queue in by_rank]
