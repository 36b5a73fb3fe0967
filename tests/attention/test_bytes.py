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
FORWARD, BACKWARD = 0, 1
CASES = {  # (heads, key and value heads, tokens of the sequences for one rank)
    "MHA": (2, 2, (CHUNK,)),
    "GQA": (4, 1, (CHUNK,)),
    "two sequences": (4, 1, (CHUNK // 2, CHUNK // 2)),
}


class Counter:
    """Bytes sent and received by this rank since the last `read`, on its transport."""

    def __init__(self, transport):
        self._transport = transport
        self._bytes = [0, 0]

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, lane, *, sends, recvs, label):
        for way, messages in enumerate((sends, recvs)):
            self._bytes[way] += sum(message.tensor.nbytes for message in messages)
        return self._transport.post(lane, sends=sends, recvs=recvs, label=label)

    def read(self):
        found, self._bytes = self._bytes, [0, 0]
        return torch.tensor(found)


def run_cases(rank, world_size, strategy, topology):
    """By case and phase the units that are sent and received."""
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
        out = sequence_parallel_attention(q, k, v, seq_ctx)
        found[case, FORWARD] = counter.read() / unit
        out.sum().backward()
        found[case, BACKWARD] = counter.read() / unit
    return found


def units(strategy, world_size, topology=None):
    """By case and phase the units of a rank: on average, and the most that any one sends or
    receives."""
    by_rank = run_threads(run_cases, world_size, strategy, topology)
    found = {}
    for case in by_rank[0]:
        moved = torch.stack([rank[case] for rank in by_rank])  # [ranks, ways]
        sent, received = moved.mean(0).tolist()
        assert sent == received
        found[case] = sent, moved.max().item()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_keys_are_fetched_by_need(world_size):
    found = units("zigzag", world_size)
    for case, (heads, kv_heads, _) in CASES.items():
        of_others = (world_size - 1) * kv_heads / heads
        busy = 1.5 if case == "two sequences" else 2
        assert found[case, FORWARD] == pytest.approx((1.5 * of_others, busy * of_others))
        mean, busiest = found[case, BACKWARD]
        assert mean == pytest.approx(2 * 1.5 * of_others)
        assert busiest <= 2 * 2 * of_others


def test_helpers_at_eight_ranks():
    found = units("balanced", 8)
    mean, busiest = found["MHA", FORWARD]
    assert mean <= 7.02
    assert busiest <= 11.1
    # the rest are log-sum-exps
    assert found["MHA", BACKWARD] == pytest.approx((14.0, 17.0), rel=5e-3)
    assert found["two sequences", FORWARD][1] < 0.85 * found["GQA", FORWARD][1]


def test_ulysses_moves_a_share_of_four_tensors():
    found = units("ulysses", 2)
    for phase in (FORWARD, BACKWARD):
        assert found["MHA", phase][0] == pytest.approx(4 * (1 / 2) * 1)


def test_a_hybrid_moves_one_share_of_the_keys_across_nodes():
    """Four ranks: q, k, v and out between the two of a node, and then half of the KV heads between
    two nodes."""
    found = units("hybrid", 4, Topology(nodes=2, ranks_per_node=2))
    # a node's tokens are two ranks', each has half of the heads
    inside, across = 4 / 2, 1.5 * (2 - 1)
    assert found["MHA", FORWARD][0] == pytest.approx(inside + across)
