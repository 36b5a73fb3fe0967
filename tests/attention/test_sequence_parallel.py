"""Every strategy, on every degree up to 8, against dense softmax attention of one process, in
float64."""

import functools
import random

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan import attention_schedule as attention
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import ring_steps
from tests.attention.dense import dense_attention
from tests.plans import random_plan
from tests.ranks import join, run_ranks, run_threads

HEAD_DIM = 8
CPU = torch.device("cpu")
SHARED = [name for name in STRATEGIES if name != "local"]
MIXED = (31, 1, 2, 17, 13, 29)
PACKS = [(1,), (2,), (17,), (41,), MIXED]
HEADS = [(4, 4), (4, 2), (8, 2), (8, 1), (3, 1)]  # queries, keys and values


@functools.cache
def sequence_tensors(length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and dout of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


@functools.cache
def reference(length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of one sequence."""
    q, k, v, dout = sequence_tensors(length, heads, kv_heads, seed)
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = dense_attention(q, k, v)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def on_shard(tensors, which, shard):
    """Tensor `which` of every slice of the shard, in row order; a rank may work for a group and
    hold none of it."""
    return torch.cat(
        [
            tensors[0][which][:0],
            *(tensors[s.sequence][which][s.start : s.stop] for s in shard.slices),
        ]
    )


def squared_errors(communicator, micro_batch, lengths, heads, kv_heads):
    """Of out, dq, dk and dv: squared norms of this rank's error and of what it should have, in one
    micro-batch."""
    shard = make_shard(micro_batch, lengths, communicator.rank)
    if not shard.zones:
        return [[0.0, 0.0]] * 4
    kernel = choose_kernel(CPU, torch.float64, HEAD_DIM)
    seq_ctx = SequenceContext(shard, communicator, kernel, CPU)
    inputs = {i: sequence_tensors(n, heads, kv_heads, i) for i, n in enumerate(lengths)}
    expected = {i: reference(n, heads, kv_heads, i) for i, n in enumerate(lengths)}
    q, k, v, dout = (on_shard(inputs, x, shard) for x in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    wanted = [on_shard(expected, x, shard) for x in range(4)]
    found = (out.detach(), q.grad, k.grad, v.grad)
    return [
        [float((x - y).square().sum()), float(y.square().sum())]
        for x, y in zip(found, wanted, strict=True)
    ]


def relative_errors(by_rank):
    """From every rank's squared norms by case: ||found - wanted|| / ||wanted|| of the worst tensor
    of each case.

    The gradient of a query that reads one key is zero, so the norms of all four tensors together
    are the floor."""
    for case in by_rank[0]:
        total = torch.tensor([found[case] for found in by_rank], dtype=torch.float64).sum(0)
        yield (
            case,
            float((total[:, 0] / total[:, 1].clamp_min(1e-3 * total[:, 1].max())).sqrt().max()),
        )


def run_every_case(rank, world_size):
    per_node = 1 if world_size % 2 else 2
    topology = Topology(nodes=world_size // per_node, ranks_per_node=per_node)
    communicator = join(topology, use_blocks=world_size % 3 != 0)
    found = {}
    for strategy in SHARED if world_size > 1 else ["local"]:
        for lengths in PACKS:
            group = Group(
                ranks=tuple(range(world_size)),
                sequences=tuple(range(len(lengths))),
                strategy=strategy,
            )
            for heads in HEADS if lengths == MIXED else HEADS[1:2]:
                case = strategy, lengths, heads
                found[case] = squared_errors(
                    communicator, MicroBatch(groups=(group,)), lengths, *heads
                )
    return found


@pytest.mark.parametrize(
    ("start", "world_size"),
    [
        *((run_threads, world_size) for world_size in range(1, 4)),
        *(pytest.param(run_threads, n, marks=pytest.mark.slow) for n in (4, 5, 8)),
        *(pytest.param(run_threads, n, marks=pytest.mark.nightly) for n in (6, 7)),
        *(pytest.param(run_ranks, n, marks=pytest.mark.processes) for n in (2, 4)),
    ],
)
def test_every_strategy_is_exact(start, world_size):
    errors = dict(relative_errors(start(run_every_case, world_size, seconds=100)))
    assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


def run_random_plans(rank, world_size, plans):
    communicator = join()
    rng = random.Random(world_size)
    found = {}
    for n in range(plans):
        lengths = tuple(rng.choice([1, 2, 5, 17, 40]) for _ in range(8))
        for m, micro_batch in enumerate(random_plan(lengths, world_size, rng).micro_batches):
            found[n, m] = squared_errors(
                communicator, micro_batch, lengths, *HEADS[n % len(HEADS)]
            )
    return found


@pytest.mark.parametrize(
    ("large", "worthy_pairs"),
    [(1, 1), (1024, 1), (1024, 30), (1024, 10**9)],
    ids=["chunk by chunk", "together", "some steps joined", "all steps joined"],
)
@pytest.mark.parametrize("world_size", [3, 4])
def test_random_plans_are_exact(world_size, large, worthy_pairs, monkeypatch):
    # of these short sequences chunks travel together otherwise, and all steps
    monkeypatch.setitem(attention.LARGE, "cpu", large)
    monkeypatch.setitem(ring_steps.WORTHY_PAIRS, "cpu", worthy_pairs)
    errors = dict(relative_errors(run_threads(run_random_plans, world_size, 15)))
    assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


def run_on_nodes(rank, world_size, per_node):
    communicator = join(Topology(nodes=world_size // per_node, ranks_per_node=per_node))
    group = Group(
        ranks=tuple(range(world_size)), sequences=tuple(range(len(MIXED))), strategy="hybrid"
    )
    return {
        heads: squared_errors(communicator, MicroBatch(groups=(group,)), MIXED, *heads)
        for heads in [*HEADS, (2, 1)]
    }


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 3), (2, 4)])
def test_hybrid_is_exact_on_wider_nodes(nodes, per_node):
    errors = dict(relative_errors(run_threads(run_on_nodes, nodes * per_node, per_node)))
    assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}
