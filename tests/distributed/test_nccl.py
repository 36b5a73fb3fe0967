"""The transport over NCCL against a stub of torch.distributed: which groups it makes, and how it
uses them first."""

import time

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.distributed import connect as connecting
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.planner.blocks import exchange_degrees
from tests.distributed.stub import StubDistributed, StubJob

CUDA = torch.device("cuda", 0)
PRESET = "llama-3.1-8b-h200"


@pytest.fixture(autouse=True)
def cuda_tensors_lie_on_the_cpu(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None: zeros(*sizes))
    monkeypatch.setattr(connecting, "reserve_descriptors", lambda sockets: None)


def rank_of(monkeypatch, topology, rank, *, bound=False):
    """The stub of a rank, and its communicator."""
    monkeypatch.setattr(connecting, "_transports", {})
    monkeypatch.setattr(connecting, "_job", None)
    job = StubJob(cuda="nccl", cpu="gloo")
    job.bound_device_id = CUDA if bound else None
    stub = StubDistributed(monkeypatch, rank=rank, world_size=topology.world_size, job=job)
    return stub, Communicator(topology, transport=connect(CUDA))


def lanes_of(stub):
    """The groups of the lanes, in the order in which they were opened."""
    return stub.by_backend("nccl")


def test_a_lane_is_a_communicator_of_its_ranks_made_by_them_alone(monkeypatch):
    stub, _ = rank_of(monkeypatch, Topology(nodes=3, ranks_per_node=4), 5)
    inside, across = lanes_of(stub)
    assert inside.ranks == (4, 5, 6, 7)
    assert inside.local
    assert across.ranks == tuple(range(12))


def test_all_ranks_use_a_communicator_before_some_of_them_do(monkeypatch):
    stub, communicator = rank_of(monkeypatch, Topology(nodes=2, ranks_per_node=4), 5)
    communicator.open_blocks([2, 8])
    for group in stub.by_backend("nccl"):
        assert group.ran[0] == "all_reduce", group


def test_pairs_are_connected_inside_the_node_and_along_rails(monkeypatch):
    stub, _ = rank_of(monkeypatch, Topology(nodes=3, ranks_per_node=4), 5)
    inside, across = lanes_of(stub)
    assert inside.ran[1:] == [[("recv", peer) for peer in (4, 6, 7)] + both_ways(4, 6, 7)]
    assert across.ran[1:] == [[("recv", peer) for peer in (1, 9)] + both_ways(1, 9)]


def both_ways(*peers):
    return [("send", peer) for peer in peers]


def test_who_connects_to_a_rank_is_connected_to_by_it(monkeypatch):
    topology = Topology(nodes=3, ranks_per_node=2)
    peers = {}
    for rank in range(topology.world_size):
        stub, _ = rank_of(monkeypatch, topology, rank)
        inside, across = lanes_of(stub)
        peers[rank] = {peer for lane in (inside, across) for _, peer in lane.ran[1]}
    assert all(rank in peers[peer] for rank, others in peers.items() for peer in others)


def test_a_single_message_is_a_batch(monkeypatch):
    stub, communicator = rank_of(monkeypatch, Topology(nodes=1, ranks_per_node=4), 1)
    (inside,) = lanes_of(stub)
    Transfers(communicator, sends=[(torch.ones(3), 2)], recvs=[]).wait()
    assert inside.ran[-1] == [("send", 2)]


@pytest.mark.parametrize("bound", [False, True])
def test_members_of_a_group_agree_on_its_name(monkeypatch, bound):
    """Ranks in the middle of a pipeline open more links than those at its ends."""
    topology = Topology(nodes=1, ranks_per_node=8)
    pipelines = [(0, 2, 4, 6), (1, 3, 5, 7)]
    calls, names = [], {}
    for rank in range(topology.world_size):
        stub, communicator = rank_of(monkeypatch, topology, rank, bound=bound)
        communicator.open_blocks([2, 4])
        Neighbours(communicator, pipelines)
        calls.append(len(stub.groups))
        for number, group in enumerate(stub.groups):
            names.setdefault((group.ranks, number), set()).add(group.name)
    # Under a device that is bound each call is a split of the world, which takes all ranks.
    assert len(set(calls)) == 1, calls
    assert all(len(of_members) == 1 for of_members in names.values()), names
    made = {(group, number) for group, number in names if len(group) > 1}
    for ranks, number in made:
        others = {group for group, other in names if other == number and group != ranks}
        assert all(not set(ranks) & set(group) for group in others), "parts must be disjoint"


# ---- the start of a large job


@pytest.mark.parametrize("strategy", ["auto", "hybrid"])
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_a_start_on_1024_ranks_makes_few_groups(monkeypatch, rank, strategy):
    topology = Topology(nodes=128, ranks_per_node=8)
    cost = load_cost_model(PRESET)
    began = time.process_time()
    stub, communicator = rank_of(monkeypatch, topology, rank)
    lanes = len(stub.groups)
    communicator.open_blocks(exchange_degrees(cost, topology, strategy=strategy, sp_degree=None))
    seconds = time.process_time() - began
    assert lanes == 3  # the CPU group, and two lanes
    assert 1 <= len(stub.groups) - lanes <= 16
    assert all(rank in ranks for ranks in (group.ranks for group in stub.groups))
    assert seconds < 2, seconds


def test_blocks_of_all_degrees_are_at_most_16_groups(monkeypatch):
    topology = Topology(nodes=128, ranks_per_node=8)
    stub, communicator = rank_of(monkeypatch, topology, 100)
    lanes = len(stub.groups)
    communicator.open_blocks(range(2, 1025))
    assert len(stub.groups) - lanes == 10
    assert len(communicator.blocks) == 10


def test_a_pipeline_of_8_stages_on_1024_ranks_makes_few_groups(monkeypatch):
    topology = Topology(nodes=128, ranks_per_node=8)
    pipelines = [tuple(range(first, 1024, 128)) for first in range(128)]
    began = time.process_time()
    stub, communicator = rank_of(monkeypatch, topology, 300)
    before = len(stub.groups)
    neighbours = Neighbours(communicator, pipelines)
    seconds = time.process_time() - began
    # a link is a lane; those between other stages are groups of this rank alone
    beside = [group for group in stub.groups[before:] if group.ranks != (300,)]
    assert len(beside) == 4 + 1  # two links to each side, and the replicas of the stage
    assert len(stub.groups) - before <= 16
    assert neighbours.replicas is not None
    assert seconds < 2, seconds


def test_degrees_beyond_the_heads_are_not_opened():
    topology = Topology(nodes=128, ranks_per_node=8)
    cost = load_cost_model(PRESET)
    degrees = exchange_degrees(cost, topology, strategy="auto", sp_degree=None)
    assert degrees == [2, 4, 8, 16, 32]
    assert cost.heads == 32
    assert exchange_degrees(cost, topology, strategy="zigzag", sp_degree=None) == []
    assert exchange_degrees(cost, topology, strategy="hybrid", sp_degree=None) == [2, 4, 8]
    assert exchange_degrees(cost, topology, strategy="ulysses", sp_degree=16) == [16]
