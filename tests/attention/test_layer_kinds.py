"""Windows, chunks, sinks, softcaps and values of another size, under every strategy, against dense
softmax attention of one process, in float64."""

import functools
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.attention.dense import dense_attention
from tests.plans import random_plan
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
SIZE = 8  # of a query head
SHARED = [name for name in STRATEGIES if name != "local"]
LENGTHS = (31, 1, 2, 17, 13, 29, 5)
HEADS = (3, 1)
SCALE = 0.3

# (reach, has sinks, softcap, size of a value head)
KINDS = {
    "window of one": (Reach(window=1), False, None, SIZE),
    "window": (Reach(window=5), False, None, SIZE),
    "window with sinks": (Reach(window=13), True, None, SIZE),
    "wide window with a softcap": (Reach(window=30), False, 2.0, SIZE),
    "chunk of one": (Reach(chunk=1), False, None, SIZE),
    "chunk": (Reach(chunk=7), False, None, SIZE),
    "large chunk with sinks": (Reach(chunk=29), True, None, SIZE),
    "sinks": (FULL, True, None, SIZE),
    "softcap": (FULL, False, 1.5, SIZE),
    "small values": (FULL, False, None, 5),
    "large values in a window": (Reach(window=4), True, None, 11),
}


@functools.cache
def tensors_of(sequence, length, heads, kv_heads, value_size):
    """q, k, v and dout of one sequence."""
    generator = torch.Generator().manual_seed(sequence)
    shapes = [(heads, SIZE), (kv_heads, SIZE), (kv_heads, value_size), (heads, value_size)]
    return [torch.randn(length, *s, generator=generator, dtype=torch.float64) for s in shapes]


def sinks_of(heads):
    return torch.linspace(-1.0, 2.0, heads, dtype=torch.float64)


@functools.cache
def wanted(kind, lengths, heads, kv_heads):
    """By sequence out, dq, dk, dv; and the gradient of all sinks."""
    reach, has_sinks, softcap, value_size = KINDS[kind]
    sinks = sinks_of(heads).requires_grad_() if has_sinks else None
    found = []
    for sequence, length in enumerate(lengths):
        *qkv, dout = tensors_of(sequence, length, heads, kv_heads, value_size)
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = dense_attention(*qkv, scale=SCALE, softcap=softcap, reach=reach, sinks=sinks)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in qkv)])
    return found, None if sinks is None else sinks.grad


def own_rows(by_sequence, slices):
    """By tensor the rows of some slices."""
    tensors = []
    for tensor in range(len(by_sequence[0])):
        rows = [by_sequence[0][tensor][:0]]
        rows += [by_sequence[part.sequence][tensor][part.start : part.stop] for part in slices]
        tensors.append(torch.cat(rows))
    return tensors


def attend(shard, communicator, kind, lengths, heads, kv_heads, *, checkpointed=False):
    """This rank's (found, wanted) of each tensor; the sinks' gradients are parts of a sum."""
    reach, has_sinks, softcap, value_size = KINDS[kind]
    seq_ctx = SequenceContext(shard, communicator, Reference(), CPU)
    slices = list(shard.slices)
    given = [tensors_of(i, n, heads, kv_heads, value_size) for i, n in enumerate(lengths)]
    *qkv, dout = own_rows(given, slices)
    qkv = [x.requires_grad_() for x in qkv]
    sinks = sinks_of(heads).requires_grad_() if has_sinks else None

    def run(q, k, v):
        # the layer is no identity, so that a replay has something to compute
        return sequence_parallel_attention(
            q * 1, k * 1, v * 1, seq_ctx, scale=SCALE, softcap=softcap, reach=reach, sinks=sinks
        )

    out = checkpoint(run, *qkv, use_reentrant=False) if checkpointed else run(*qkv)
    out.backward(dout)
    by_sequence, _ = wanted(kind, lengths, heads, kv_heads)
    found = [out.detach(), *(x.grad for x in qkv)]
    sink_grad = None if sinks is None else sinks.grad
    return list(zip(found, own_rows(by_sequence, slices), strict=True)), sink_grad


def errors_of_cases(by_rank, kinds, lengths, heads):
    """By case the relative error of the worst tensor, sinks included."""
    for case in by_rank[0]:
        results = [found[case] for found in by_rank if found[case] is not None]
        squares = torch.zeros(4, 2, dtype=torch.float64)
        for tensors, _ in results:
            for row, (x, y) in zip(squares, tensors, strict=True):
                row += torch.stack(((x - y).square().sum(), y.square().sum()))
        floor = 1e-3 * squares[:, 1].max()
        error = float((squares[:, 0] / squares[:, 1].clamp_min(floor)).sqrt().max())
        _, sink_grad = wanted(kinds(case), lengths(case), *heads(case))
        if sink_grad is not None:
            found = sum(grad for _, grad in results)
            error = max(error, float((found - sink_grad).norm() / sink_grad.norm()))
        yield case, error


def run_every_kind(rank, world_size, checkpointed):
    per_node = 1 if world_size % 2 else 2
    topology = Topology(nodes=world_size // per_node, ranks_per_node=per_node)
    communicator = join(topology, use_blocks=world_size % 3 != 0)
    found = {}
    for strategy in SHARED if world_size > 1 else ["local"]:
        group = Group(
            ranks=tuple(range(world_size)),
            sequences=tuple(range(len(LENGTHS))),
            strategy=strategy,
        )
        shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, rank)
        for kind in KINDS:
            found[strategy, kind] = attend(
                shard, communicator, kind, LENGTHS, *HEADS, checkpointed=checkpointed
            )
    return found


@pytest.mark.parametrize(
    ("world_size", "checkpointed"),
    [
        *((n, checkpointed) for n in range(1, 4) for checkpointed in (False, True)),
        *(pytest.param(n, n % 2 == 0, marks=pytest.mark.slow) for n in (4, 5, 8)),
        *(pytest.param(n, n % 2 == 0, marks=pytest.mark.nightly) for n in (6, 7)),
    ],
)
def test_every_strategy_computes_every_kind_exactly(world_size, checkpointed):
    by_rank = run_threads(run_every_kind, world_size, checkpointed, seconds=100)
    errors = dict(
        errors_of_cases(by_rank, lambda case: case[1], lambda case: LENGTHS, lambda case: HEADS)
    )
    assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


def random_cases(world_size, plans):
    """(lengths, heads, kind, micro-batch) of random plans, the same on every rank."""
    rng = random.Random(world_size)
    for n in range(plans):
        lengths = tuple(rng.choice([1, 2, 5, 17, 40]) for _ in range(8))
        heads = [(4, 2), (3, 1), (4, 4)][n % 3]
        kind = list(KINDS)[n % len(KINDS)]
        for micro_batch in random_plan(lengths, world_size, rng).micro_batches:
            yield lengths, heads, kind, micro_batch


def run_random_plans(rank, world_size, plans):
    communicator = join()
    found = {}
    for n, (lengths, heads, kind, micro_batch) in enumerate(random_cases(world_size, plans)):
        shard = make_shard(micro_batch, lengths, rank)
        if shard.zones:
            found[n] = attend(shard, communicator, kind, lengths, *heads)
        else:
            found[n] = None
    return found


@pytest.mark.parametrize("world_size", [3, 4])
def test_random_plans_compute_every_kind_exactly(world_size):
    plans = 2 * len(KINDS)
    by_rank = run_threads(run_random_plans, world_size, plans)
    cases = list(random_cases(world_size, plans))
    # a micro-batch has some of the sequences, and sinks' gradients are of all: leave these out
    for n, (_, _, kind, micro_batch) in enumerate(cases):
        held = sum(len(group.sequences) for group in micro_batch.groups)
        if KINDS[kind][1] and held < 8:
            for found in by_rank:
                if found[n] is not None:
                    found[n] = (found[n][0], torch.full((), torch.nan))
    errors = {}
    for case, error in errors_of_cases(
        by_rank, lambda n: cases[n][2], lambda n: cases[n][0], lambda n: cases[n][1]
    ):
        errors[case] = error
    assert {case: error for case, error in errors.items() if error > 1e-12} == {}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"window": 0}, "window of 0"),
        ({"chunk": -3}, "chunk of -3"),
        ({"window": 2, "chunk": 3}, "window of 2 and a chunk of 3"),
    ],
)
def test_a_reach_that_reads_nothing_or_two_things_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        Reach(**asked)
