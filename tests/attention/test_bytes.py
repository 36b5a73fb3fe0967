"""What every rank sends and receives, counted where messages are posted, in bfloat16.

A unit is one [tokens / ranks, heads, head_dim] tensor; g is the share of heads that are key and
value heads.
"""

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.ranks import join, run_threads

CPU, HEAD_DIM, CHUNK = torch.device("cpu"), 128, 16
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


def run_cases(rank, world_size, strategies, topology=None):
    """{(strategy, case): [(sent, received) in the forward, in the backward]} in units."""
    found = {}
    world = join(topology, use_blocks=False)
    counter = world.transport = Counter(world.transport)
    for strategy in strategies:
        for case, (heads, kv_heads, shares) in CASES.items():
            lengths = tuple(share * world_size for share in shares)
            group = Group(
                ranks=tuple(range(world_size)),
                sequences=tuple(range(len(lengths))),
                strategy=strategy,
            )
            shard = make_shard(MicroBatch(groups=(group,)), lengths, rank)
            kernel = choose_kernel(CPU, torch.bfloat16, HEAD_DIM)
            seq_ctx = SequenceContext(shard, world, kernel, CPU)
            q, k, v = (
                torch.ones(shard.tokens, h, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
                for h in (heads, kv_heads, kv_heads)
            )
            unit = 2 * CHUNK * heads * HEAD_DIM
            counter.read()
            out = sequence_parallel_attention(q, k, v, seq_ctx)
            forward = [x / unit for x in counter.read()]
            out.sum().backward()
            found[strategy, case] = [forward, [x / unit for x in counter.read()]]
    return found


def mean_and_busiest(by_rank, strategy, case, phase):
    """Units per rank: on average, and the most that any rank sends or receives."""
    found = [rank[strategy, case][phase] for rank in by_rank]
    assert sum(sent for sent, _ in found) == sum(received for _, received in found)
    return sum(sent for sent, _ in found) / len(found), max(map(max, found))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_keys_are_fetched_by_need(world_size):
    by_rank = run_threads(run_cases, world_size, ["zigzag"])
    others = world_size - 1
    for case, (heads, kv_heads, _) in CASES.items():
        g = kv_heads / heads
        mean, busiest = mean_and_busiest(by_rank, "zigzag", case, 0)
        assert mean == pytest.approx(1.5 * others * g)
        assert busiest == pytest.approx((1.5 if case == "two sequences" else 2) * others * g)
        mean, busiest = mean_and_busiest(by_rank, "zigzag", case, 1)
        assert mean == pytest.approx(2 * 1.5 * others * g)
        assert busiest <= 2 * 2 * others * g


def test_helpers_at_eight_ranks():
    by_rank = run_threads(run_cases, 8, ["balanced"])
    mean, busiest = mean_and_busiest(by_rank, "balanced", "MHA", 0)
    assert mean <= 7.02
    assert busiest <= 11.1
    mean, busiest = mean_and_busiest(by_rank, "balanced", "MHA", 1)
    assert (mean, busiest) == pytest.approx((14.0, 17.0), rel=5e-3)  # the rest are log-sum-exps
    _, of_two = mean_and_busiest(by_rank, "balanced", "two sequences", 0)
    _, of_one = mean_and_busiest(by_rank, "balanced", "GQA", 0)
    assert of_two < 0.85 * of_one


def test_ulysses_moves_a_share_of_four_tensors():
    by_rank = run_threads(run_cases, 2, ["ulysses"])
    for phase in (0, 1):
        mean, _ = mean_and_busiest(by_rank, "ulysses", "MHA", phase)
        assert mean == pytest.approx(4 * (1 / 2) * 1)


def test_a_hybrid_moves_one_share_of_the_keys_across_nodes():
    """Four ranks: q, k, v and out between the two of a node, and then half of the KV heads between
    two nodes."""
    by_rank = run_threads(run_cases, 4, ["hybrid"], Topology(nodes=2, ranks_per_node=2))
    mean, _ = mean_and_busiest(by_rank, "hybrid", "MHA", 0)
    # a node's tokens are two ranks', each has half of the heads
    inside, across = 4 / 2, 1.5 * (2 - 1)
    assert mean == pytest.approx(inside + across)
