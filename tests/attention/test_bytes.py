"""What every rank sends and receives, counted where messages are posted, in bfloat16.

A unit is one [tokens / ranks, heads, head_dim] tensor; g is the share of heads that are key and
value heads.
"""

import pytest
import torch

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from tests.attention.group import context_of
from tests.ranks import join, run_threads

HEAD_DIM, CHUNK = 128, 16
CASES = {  # (heads, key and value heads, tokens of the sequences for one rank)
    "MHA": (2, 2, (CHUNK,)),
    "GQA": (4, 1, (CHUNK,)),
    "two sequences": (4, 1, (CHUNK // 2, CHUNK // 2)),
}


class Counter:
    """Bytes sent and received by this rank since the last `read`, on its transport."""

    def __init__(self, transport):
        self._transport = transport
        self.sent = self.received = 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, lane, *, sends, recvs, label):
        self.sent += sum(message.tensor.nbytes for message in sends)
        self.received += sum(message.tensor.nbytes for message in recvs)
        return self._transport.post(lane, sends=sends, recvs=recvs, label=label)

    def read(self):
        found, self.sent, self.received = (self.sent, self.received), 0, 0
        return found


def run_cases(rank, world_size, strategy, topology):
    """{case: [(sent, received) in the forward, in the backward]} in units."""
    found = {}
    world = join(topology, use_blocks=False)
    counter = world.transport = Counter(world.transport)
    for case, (heads, kv_heads, shares) in CASES.items():
        lengths = tuple(share * world_size for share in shares)
        seq_ctx = context_of(world, strategy, lengths, dtype=torch.bfloat16, head_dim=HEAD_DIM)
        q, k, v = (
            torch.ones(seq_ctx.tokens, h, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        )
        unit = 2 * CHUNK * heads * HEAD_DIM
        counter.read()
        out = sequence_parallel_attention(q, k, v, seq_ctx)
        forward = [x / unit for x in counter.read()]
        out.sum().backward()
        found[case] = [forward, [x / unit for x in counter.read()]]
    return found


def units(strategy, world_size, topology=None):
    """By case and phase the units of a rank: on average, and the most that any one sends or
    receives."""
    by_rank = run_threads(run_cases, world_size, strategy, topology)
    found = {}
    for case in CASES:
        for phase in (0, 1):
            both = [rank[case][phase] for rank in by_rank]
            assert sum(sent for sent, _ in both) == sum(received for _, received in both)
            mean = sum(sent for sent, _ in both) / world_size
            found[case, phase] = mean, max(map(max, both))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_keys_are_fetched_by_need(world_size):
    found = units("zigzag", world_size)
    others = world_size - 1
    for case, (heads, kv_heads, _) in CASES.items():
        g = kv_heads / heads
        mean, busiest = found[case, 0]
        assert mean == pytest.approx(1.5 * others * g)
        assert busiest == pytest.approx((1.5 if case == "two sequences" else 2) * others * g)
        mean, busiest = found[case, 1]
        assert mean == pytest.approx(2 * 1.5 * others * g)
        assert busiest <= 2 * 2 * others * g


def test_helpers_at_eight_ranks():
    found = units("balanced", 8)
    mean, busiest = found["MHA", 0]
    assert mean <= 7.02
    assert busiest <= 11.1
    assert found["MHA", 1] == pytest.approx((14.0, 17.0), rel=5e-3)  # the rest are log-sum-exps
    assert found["two sequences", 0][1] < 0.85 * found["GQA", 0][1]


def test_ulysses_moves_a_share_of_four_tensors():
    found = units("ulysses", 2)
    for phase in (0, 1):
        assert found["MHA", phase][0] == pytest.approx(4 * (1 / 2) * 1)


def test_a_hybrid_moves_one_share_of_the_keys_across_nodes():
    """Four ranks: q, k, v and out between the two of a node, and then half of the KV heads between
    two nodes."""
    found = units("hybrid", 4, Topology(nodes=2, ranks_per_node=2))
    # a node's tokens are two ranks', each has half of the heads
    inside, across = 4 / 2, 1.5 * (2 - 1)
    assert found["MHA", 0][0] == pytest.approx(inside + across)
