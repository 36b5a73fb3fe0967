"""Attention over units of rows with shared prefixes, against dense softmax attention of every row
by itself, in float64: every strategy, every kind of layer, trees of several depths."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Node, Unit
from tests.attention.dense import dense_attention
from tests.attention.group import largest_error, nodes_of, own_rows, qkv_and_dout
from tests.attention.test_sequence_parallel import KINDS, SIZE, gradient_of, options_of
from tests.device import DEVICE, own_kernel
from tests.ranks import join, run_ranks, run_threads

SHARED = [name for name in STRATEGIES if name != "local"]


def tree(*nodes, ends=None):
    """A unit of (parent, tokens); every leaf, and every node of `ends`, ends a row."""
    made = tuple(Node(*node) for node in nodes)
    leaves = set(range(len(made))) - {node.parent for node in made}
    last = sorted(leaves | set(ends or ()))
    return made, last


TREES = {
    "pair": tree((-1, 13), (0, 4), (0, 7)),
    "answers of one token": tree((-1, 9), *[(0, 1)] * 5),
    "equal rows": tree((-1, 11), ends=[0, 0]),
    "a row that ends inside": tree((-1, 6), (0, 5), ends=[0]),
    "three deep": tree((-1, 5), (0, 3), (1, 2), (2, 8), (2, 1), (1, 4), (0, 10), ends=[1]),
    "long answers": tree((-1, 2), (0, 19), (0, 23)),
}
PLAIN = (17, 1)
HEADS = (4, 2)


def units_of(names):
    """Units, tokens of every sequence of the plan by id (0 of rows inside of a unit), and the ids
    that are planned; plain sequences come last."""
    units = []
    lengths = []
    for name in names:
        nodes, ends = TREES[name]
        rows = tuple((len(lengths) + i, node) for i, node in enumerate(ends))
        unit = Unit(nodes, rows)
        unit.check()
        units.append(unit)
        lengths += [unit.tokens] + [0] * (len(rows) - 1)
    planned = [unit.sequence for unit in units] + [len(lengths), len(lengths) + 1]
    return tuple(units), [*lengths, *PLAIN], tuple(planned)


def group_of(names, ranks, strategy):
    units, lengths, planned = units_of(names)
    group = Group(ranks=tuple(ranks), sequences=planned, strategy=strategy, units=units)
    return MicroBatch(groups=(group,)), lengths


@functools.cache
def given(names, value_size):
    """By sequence id q, k, v, dout of what is held; None of rows inside of units."""
    _, lengths, _ = units_of(names)
    return [
        qkv_and_dout(i, n, *HEADS, SIZE, value_size) if n else None for i, n in enumerate(lengths)
    ]


@functools.cache
def wanted(kind, names):
    """By sequence id out, dq, dk, dv of what is held, from every row by itself; and the gradient
    of the sinks. A shared token's dout counts once for all rows: it is given to the first."""
    options = options_of(kind, HEADS[0])
    units, lengths, _ = units_of(names)
    by_id = {unit.sequence: unit for unit in units}
    found = []
    for sequence, tensors in enumerate(given(names, KINDS[kind][3])):
        if tensors is None:
            found.append(None)
            continue
        *qkv, dout = tensors
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = torch.zeros_like(dout)
        seen = torch.zeros(lengths[sequence], dtype=torch.bool)
        unit = by_id.get(sequence)
        paths = [torch.arange(lengths[sequence])]
        if unit is not None:
            layout = unit.layout
            paths = []
            for _, last in unit.rows:
                ranges = layout.ranges(last, 0, layout.ends[last])
                paths.append(torch.cat([torch.arange(*one) for one in ranges]))
        total = torch.zeros((), dtype=torch.float64)
        for path in paths:
            of_row = dense_attention(*(x[path] for x in qkv), **options)
            new = ~seen[path]
            seen[path] = True
            out[path[new]] = of_row[new].detach()
            total = total + (of_row[new] * dout[path[new]]).sum()
        assert seen.all()
        total.backward()
        found.append([out, *(x.grad for x in qkv)])
    return found, gradient_of(options["sinks"])


def run_case(rank, world_size, strategies, cases):
    communicator = join(nodes_of(world_size))
    found = {}
    for number, (kind, names) in enumerate(cases):
        for strategy in strategies:
            ranks = [rank] if strategy == "local" else range(world_size)
            micro_batch, lengths = group_of(names, ranks, strategy)
            shard = make_shard(micro_batch, lengths, rank)
            value_size = KINDS[kind][3]
            kernel = own_kernel(torch.float64, max(SIZE, value_size))
            seq_ctx = SequenceContext(shard, communicator, kernel, DEVICE)
            *qkv, dout = own_rows(given(names, value_size), shard)
            qkv = [x.requires_grad_() for x in qkv]
            options = options_of(kind, HEADS[0])

            def run(q, k, v, seq_ctx=seq_ctx, options=options):
                return sequence_parallel_attention(q * 1, k * 1, v * 1, seq_ctx, **options)

            if (number + world_size) % 2:
                out = checkpoint(run, *qkv, use_reentrant=False)
            else:
                out = run(*qkv)
            out.backward(dout)
            by_sequence, _ = wanted(kind, names)
            tensors = [out.detach(), *(x.grad for x in qkv)]
            error = largest_error(tensors, by_sequence, shard)
            found[strategy, kind, names] = (error, gradient_of(options["sinks"]))
    return found


def assert_exact(by_rank, *, alone=False):
    worst = {}
    for case in by_rank[0]:
        worst[case] = max(found[case][0] for found in by_rank)
        _, exact = wanted(*case[1:])
        if exact is not None:
            like = {"dtype": torch.float64}
            parts = torch.tensor([found[case][1] for found in by_rank], **like)
            total = parts[0] if alone else parts.sum(0)
            error = (total - torch.tensor(exact, **like)).abs().max()
            worst[case] = max(worst[case], float(error))
    assert {case: error for case, error in worst.items() if not error <= 1e-10} == {}


ALL = tuple(TREES)
ONE_BY_ONE = [("full", (name,)) for name in TREES]
CASES = [*ONE_BY_ONE, *((kind, ALL) for kind in KINDS)]


@pytest.mark.on_device
def test_units_are_exact_on_one_rank():
    assert_exact(run_threads(run_case, 1, ["local"], CASES), alone=True)


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.slow)],
)
def test_units_are_exact_under_every_strategy(world_size):
    assert_exact(run_threads(run_case, world_size, SHARED, CASES, seconds=100))


@pytest.mark.processes
def test_units_are_exact_on_processes():
    assert_exact(run_ranks(run_case, 2, SHARED, CASES[-len(KINDS) :: 3], seconds=100))
