"""Transports against a stub of torch.distributed: which groups NCCL's makes, and how it uses them
first; what gloo's says of ranks that are gone."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.distributed import connect as connecting
from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.gloo import GlooTransport
from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.distributed.transport import Lane, LostRank, Message
from hf_flexseq.planner.blocks import exchange_degrees
from tests.distributed.stub import StubDistributed, StubJob

CUDA = torch.device("cuda", 0)
COST = load_cost_model("llama-3.1-8b-h200")
LARGE = Topology(nodes=128, ranks_per_node=8)


@pytest.fixture(autouse=True)
def cuda_tensors_lie_on_the_cpu(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None: zeros(*sizes))
    monkeypatch.setattr(connecting, "reserve_descriptors", lambda sockets: None)


def rank_of(monkeypatch, topology, rank, *, bound=False):
    """The stub of a rank, its communicator, and the groups of its lanes in order."""
    monkeypatch.setattr(connecting, "_transports", {})
    monkeypatch.setattr(connecting, "_job", None)
    job = StubJob(cuda="nccl", cpu="gloo")
    job.bound_device_id = CUDA if bound else None
    stub = StubDistributed(monkeypatch, rank=rank, world_size=topology.world_size, job=job)
    communicator = Communicator(topology, transport=connect(CUDA))
    return stub, communicator, stub.by_backend("nccl")


@pytest.mark.parametrize(
    ("rank", "node", "rail"), [(5, (4, 5, 6, 7), (1, 9)), (8, (8, 9, 10, 11), (0, 4))]
)
def test_lanes_are_made_by_their_ranks_alone_and_connect_pairs_of_a_node_and_along_rails(
    monkeypatch, rank, node, rail
):
    _, _, (inside, across) = rank_of(monkeypatch, Topology(nodes=3, ranks_per_node=4), rank)
    assert inside.ranks == node
    assert inside.local
    assert across.ranks == tuple(range(12))
    for lane, peers in ((inside, [peer for peer in node if peer != rank]), (across, rail)):
        assert lane.ran[1:] == [[(way, peer) for way in ("recv", "send") for peer in peers]]


def test_all_ranks_use_a_communicator_before_some_of_them_do_and_a_message_is_a_batch(monkeypatch):
    topology = Topology(nodes=2, ranks_per_node=4)
    stub, communicator, (inside, _) = rank_of(monkeypatch, topology, 5)
    communicator.open_blocks([2, 8])
    communicator.open_world()
    communicator.open_blocks([2, 8])  # nothing is done again
    firsts = [group.ran[0] for group in stub.by_backend("nccl")]
    assert firsts == ["all_reduce", "all_reduce", "all_to_all", "all_to_all"]
    # one communicator for exchanges and sums of all ranks
    assert [group.ran[1:] for group in stub.by_backend("nccl")[2:]] == [[], ["all_reduce"]]
    sends = [Message(torch.ones(3), 6, 0)]
    communicator.transport.post(communicator.lane(6), sends=sends, recvs=[]).wait()
    assert inside.ran[-1] == [("send", 6)]


def test_transfers_come_before_what_computes(monkeypatch):
    """And every communicator has options of its own, as torch writes into them."""
    topology = Topology(nodes=2, ranks_per_node=4)
    stub, communicator, _ = rank_of(monkeypatch, topology, 5)
    communicator.open_blocks([2, 8])
    of_groups = [group.options for group in stub.by_backend("nccl")]
    assert len({id(options) for options in of_groups}) == len(of_groups) == 4
    for options in of_groups:
        assert options.is_high_priority_stream
        assert options.config.cga_cluster_size == 1
        assert options._timeout == timedelta(seconds=1800)
    assert [group.options for group in stub.by_backend("gloo")] == [None]


@pytest.mark.parametrize("bound", [False, True])
def test_members_of_a_group_agree_on_its_name(monkeypatch, bound):
    """Ranks in the middle of a pipeline open more links than those at its ends."""
    topology = Topology(nodes=1, ranks_per_node=8)
    pipelines = [(0, 2, 4, 6), (1, 3, 5, 7)]
    calls, names = set(), {}
    for rank in range(topology.world_size):
        stub, communicator, _ = rank_of(monkeypatch, topology, rank, bound=bound)
        communicator.open_blocks([2, 4])
        Neighbours(communicator, pipelines)
        calls.add(len(stub.groups))
        for number, group in enumerate(stub.groups):
            names.setdefault((group.ranks, number), set()).add(group.name)
    # Under a device that is bound each call is a split of the world, which takes all ranks.
    assert len(calls) == 1, calls
    assert all(len(of_members) == 1 for of_members in names.values()), names
    made = {(group, number) for group, number in names if len(group) > 1}
    for ranks, number in made:
        others = {group for group, other in names if other == number and group != ranks}
        assert all(not set(ranks) & set(group) for group in others), "parts must be disjoint"


def test_what_a_post_on_nccl_could_not_do_is_named(monkeypatch):
    stub, communicator, _ = rank_of(monkeypatch, Topology(nodes=2, ranks_per_node=4), 5)
    stub.gone = (6,)
    with pytest.raises(
        LostRank, match="rank 5 could not receive from rank 7 .*, or send to rank 6"
    ):
        communicator.transport.post(
            communicator.lane(6),
            sends=[Message(torch.ones(3), 6, 0)],
            recvs=[Message(torch.ones(2), 7, 0)],
        )


def test_who_is_missing_from_an_all_to_all_is_named_once_the_collective_has_failed(monkeypatch):
    topology = Topology(nodes=1, ranks_per_node=4)
    _, communicator, _ = rank_of(monkeypatch, topology, 1)
    communicator.open_blocks([4])
    monkeypatch.setattr(GlooCpuGroup, "roll_call", lambda cpu_group, ranks: [3])

    def fails():
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(
        dist, "all_to_all_single", lambda *given, **options: SimpleNamespace(wait=fails)
    )
    sent, received = torch.ones(8), torch.empty(8)
    (pending,) = all_to_all(
        communicator,
        range(4),
        sent,
        received,
        [2] * 4,
        [2] * 4,
        label=lambda peer, sending: "heads of sequence 7",
    )
    words = r"rank 1 could not exchange with ranks \[3\] heads of sequence 7: NCCL communicator"
    with pytest.raises(LostRank, match=words):
        pending.wait()


# ---- the start of a large job


@pytest.mark.parametrize("nodes", [8, 128])
def test_a_rank_has_eight_communicators_whatever_the_number_of_nodes(monkeypatch, nodes):
    topology = Topology(nodes=nodes, ranks_per_node=8)
    stub, communicator, _ = rank_of(monkeypatch, topology, 9)
    communicator.open_blocks(exchange_degrees(COST, topology, strategy="auto", sp_degree=None))
    communicator.open_world()
    sizes = [len(group.ranks) for group in stub.by_backend("nccl")]
    assert sizes == [8, 8 * nodes, 2, 4, 8, 16, 32, 8 * nodes]


def test_a_pipeline_of_8_stages_on_1024_ranks_makes_few_groups(monkeypatch):
    pipelines = [tuple(range(first, 1024, 128)) for first in range(128)]
    began = time.process_time()
    stub, communicator, _ = rank_of(monkeypatch, LARGE, 300)
    before = len(stub.groups)
    neighbours = Neighbours(communicator, pipelines)
    seconds = time.process_time() - began
    # a link is a lane; those between other stages are groups of this rank alone
    beside = [group for group in stub.groups[before:] if group.ranks != (300,)]
    assert len(beside) == 4 + 1  # two links to each side, and the replicas of the stage
    assert len(stub.groups) - before <= 16
    assert neighbours.replicas is not None
    assert seconds < 2, seconds


# ---- gloo


def posted(monkeypatch, gone, *, sends, recvs):
    """What rank 0 of 4 posts to and from these peers, in order, while some are gone."""
    job = StubJob(cpu="gloo")
    stub = StubDistributed(monkeypatch, rank=0, world_size=4, job=job, gone=gone)
    transport = GlooTransport(timedelta(minutes=1), torch.device("cpu"))
    transport.post(
        Lane("ring", (0, 1, 2, 3)),
        sends=[Message(torch.ones(1), peer, 7) for peer in sends],
        recvs=[Message(torch.ones(1), peer, 7) for peer in recvs],
        label=lambda peer, sending: f"the words of rank {0 if sending else peer}",
    )
    return [message for group in stub.groups for batch in group.ran for message in batch]


def test_receives_are_posted_before_sends(monkeypatch):
    order = posted(monkeypatch, gone=(), sends=[1, 3], recvs=[3, 2])
    assert order == [("recv", 3), ("recv", 2), ("send", 1), ("send", 3)]


@pytest.mark.parametrize(
    ("sends", "recvs", "what"),
    [
        ([1, 2, 3], [1, 2, 3], "receive from rank 2 the words of rank 2"),
        ([1, 2, 3], [1, 3], "send to rank 2 the words of rank 0"),
        ([2], [], "send to rank 2 the words of rank 0"),
    ],
)
def test_only_the_peer_that_is_gone_is_named(monkeypatch, sends, recvs, what):
    with pytest.raises(LostRank) as raised:
        posted(monkeypatch, gone=(2,), sends=sends, recvs=recvs)
    assert str(raised.value).startswith(f"rank 0 could not {what}: [/gloo/")
