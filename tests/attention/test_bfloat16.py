"""The error of bfloat16 attention over a group, against that of one bfloat16 kernel call, both
against float64.

Ulysses and the all-gather make one call per query, so they round an output once, as one rank does.
The rings merge partial results, rounded to 16 bits by the kernel, in float32. Gradients leave the
CPU kernel in float32; they are rounded when complete, and where a ring sends parts of them to
another rank. The all-gather, and Ulysses where several ranks share a KV head, send float32.
"""

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.topology import Topology
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


CPU, HEADS, KV_HEADS, HEAD_DIM = torch.device("cpu"), 4, 2, 32
LENGTHS = (384, 130)
ONE_ROUNDING, MERGED = 1.05, 1.3
MOST = {
    "ulysses": ONE_ROUNDING,
    "allgather": ONE_ROUNDING,
    "zigzag": MERGED,
    "balanced": MERGED,
    "hybrid": MERGED,
}


def tensors_of(sequence, dtype):
    generator = torch.Generator().manual_seed(sequence)
    shapes = [(LENGTHS[sequence], h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(s, generator=generator).bfloat16().to(dtype) for s in shapes]


def attend(group, dtype, communicator):
    """out, dq, dk, dv of this rank's shard."""
    shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, communicator.rank)
    seq_ctx = SequenceContext(shard, communicator, choose_kernel(CPU, dtype, HEAD_DIM), CPU)
    whole = [tensors_of(i, dtype) for i in range(len(LENGTHS))]
    q, k, v, dout = (
        torch.cat([whole[s.sequence][x][s.start : s.stop] for s in shard.slices]) for x in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    assert out.dtype == dtype
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def run_strategies(rank, world_size):
    """By strategy the squared norms of the errors over the group, and of one kernel call on the
    same rows."""
    nodes = 2 if world_size % 2 == 0 else 1
    communicator = Communicator(Topology(nodes=nodes, ranks_per_node=world_size // nodes))
    sequences = tuple(range(len(LENGTHS)))
    alone = Group(ranks=(rank,), sequences=sequences, strategy="local")
    exact, single = (
        attend(alone, torch.float64, communicator),
        attend(alone, torch.bfloat16, communicator),
    )
    found = {}
    for strategy in MOST:
        group = Group(ranks=tuple(range(world_size)), sequences=sequences, strategy=strategy)
        shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, rank)
        starts = (0, LENGTHS[0])
        mine = torch.cat(
            [torch.arange(s.start, s.stop) + starts[s.sequence] for s in shard.slices]
        )
        shared = attend(group, torch.bfloat16, communicator)
        found[strategy] = [
            [float((x.double() - y[mine]).square().sum()) for x in (x, z[mine])]
            for x, y, z in zip(shared, exact, single, strict=True)
        ]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_bfloat16_stays_close_to_one_kernel(world_size):
    by_rank = run_ranks(run_strategies, world_size)
    for strategy, most in MOST.items():
        found, single = torch.tensor([rank[strategy] for rank in by_rank]).sum(0).sqrt().unbind(1)
        ratios = (found / single).tolist()
        assert max(ratios) <= most, (strategy, ratios)  # of out, dq, dk, dv
