"""Recurrent layers over units of rows with shared prefixes, against the recurrence of every row by
itself, token by token, in float64: every kind, every strategy, trees of several depths."""

import functools

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Unit
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.tables import Tables
from tests.attention.exact import SHARED, Case, group_of, row_by_row
from tests.attention.group import forward_backward, largest_error, nodes_of
from tests.attention.recurrent import stepwise
from tests.attention.trees import TREES, tree, units_of
from tests.device import DEVICE, own_kernel
from tests.ranks import join, run_threads

HEADS, KEY_HEADS, KEYS, VALUES = 4, 2, 5, 3
CHANNELS = 6
ALL = {
    **TREES,
    "chunks of 64": tree((-1, 70), (0, 1), (0, 130), (2, 3), (2, 65)),
    "short nodes": tree((-1, 1), (0, 1), (1, 2), (2, 1), (2, 1), (1, 1), (0, 2), ends=[0, 3, 3]),
    "one branch after another": tree(*[(i - 1, 4) for i in range(5)], (0, 1), ends=range(5)),
}
# by kind: what every token has, what all tokens share
KINDS = {
    "convolution": ({"x": (CHANNELS,)}, {"weight": (CHANNELS, 4), "bias": (CHANNELS,)}),
    "wide convolution": ({"x": (CHANNELS,)}, {"weight": (CHANNELS, 9)}),
    "gated delta": (
        {
            "q": (KEY_HEADS, KEYS),
            "k": (KEY_HEADS, KEYS),
            "v": (HEADS, VALUES),
            "g": (HEADS,),
            "beta": (HEADS,),
        },
        {},
    ),
    "kimi delta": (
        {
            "q": (HEADS, KEYS),
            "k": (HEADS, KEYS),
            "v": (HEADS, VALUES),
            "g": (HEADS, KEYS),
            "beta": (HEADS,),
        },
        {},
    ),
    "mamba2": (
        {"x": (HEADS, VALUES), "dt": (HEADS,), "B": (KEY_HEADS, KEYS), "C": (KEY_HEADS, KEYS)},
        {"A": (HEADS,), "D": (HEADS,), "dt_bias": (HEADS,)},
    ),
}


def drawn(seed, shapes, tokens=()):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(*tokens, *shape, **options).to(DEVICE) for shape in shapes.values()]


def computed(kind, tensors, shared, seq_ctx=None):
    """The output [tokens, ...] of a layer across ranks, or token by token without a context."""
    of_tokens, of_all = KINDS[kind]
    x = dict(zip(of_tokens, tensors, strict=True))
    x |= zip(of_all, shared, strict=True)
    if "convolution" in kind:
        return stepwise.layer("convolution", seq_ctx, x["x"], x["weight"], x.get("bias"))
    if kind == "mamba2":
        given = [x["x"], x["dt"], -x["A"].exp(), x["B"], x["C"]]
        options = {"dt_bias": x["dt_bias"], "dt_softplus": True, "dt_limit": (0.01, 2.0)}
        return stepwise.layer(kind, seq_ctx, *given, D=x["D"], **options)
    given = [x["q"], x["k"], x["v"], -0.3 * x["g"].exp(), x["beta"].sigmoid()]
    return stepwise.layer(kind, seq_ctx, *given, l2norm=True)


def out_shape(kind):
    return (CHANNELS,) if "convolution" in kind else (HEADS, VALUES)


@functools.cache
def given(kind, trees):
    """By sequence id what is held, dout last."""
    shapes = {**KINDS[kind][0], "dout": out_shape(kind)}
    return [drawn(i, shapes, (n,)) for i, n in enumerate(units_of(trees)[1])]


@functools.cache
def wanted(kind, trees):
    """By sequence id the output and the gradients of what is held, from every row by itself; and
    the gradients of what all tokens share."""
    units = {unit.sequence: unit for unit in units_of(trees)[0]}
    shared = [x.requires_grad_() for x in drawn(99, KINDS[kind][1])]
    found = []
    for sequence, tensors in enumerate(given(kind, trees)):
        if len(tensors[-1]):

            def compute(own, path):
                return computed(kind, own, shared)

            found.append(row_by_row(compute, tensors, units.get(sequence)))
        else:  # a row inside of a unit
            found.append([tensors[-1], *tensors[:-1]])
    return found, [x.grad for x in shared]


def run_case(rank, world_size, strategies, cases):
    communicator = join(nodes_of(world_size))
    found = {}
    for number, (kind, trees) in enumerate(cases):
        units, lengths = units_of(trees)
        for place, strategy in enumerate(strategies):
            ranks = [rank] if strategy == "local" else range(world_size)
            micro_batch = group_of(Case("full", (1, 1), lengths, units), ranks, strategy)
            shard = make_shard(micro_batch, lengths, rank)
            kernel = own_kernel(torch.float64, KEYS)
            keeps = (number + place) % 3 > 0
            seq_ctx = SequenceContext(
                shard, communicator, kernel, DEVICE, save_attention_output=keeps
            )
            shared = [x.requires_grad_() for x in drawn(99, KINDS[kind][1])]

            def compute(*tensors, kind=kind, shared=shared, seq_ctx=seq_ctx):
                return computed(kind, tensors, shared, seq_ctx)

            checkpointed = (number + place) % 2 > 0
            results = forward_backward(
                given(kind, trees), shard, compute, checkpointed=checkpointed
            )
            by_sequence, _ = wanted(kind, trees)
            error = largest_error(results, by_sequence, shard)
            found[strategy, kind, trees] = (error, [x.grad.tolist() for x in shared])
    return found


def assert_exact(by_rank):
    worst = {}
    for case in by_rank[0]:
        errors = [found[case][0] for found in by_rank]
        for number, exact in enumerate(wanted(*case[1:])[1]):
            parts = [
                torch.tensor(found[case][1][number], dtype=torch.float64) for found in by_rank
            ]
            errors.append(float((sum(parts) - exact.cpu()).abs().max()))
        worst[case] = max(errors)
    assert {case: error for case, error in worst.items() if not error <= 1e-10} == {}


TOGETHER = tuple(ALL.values())
CASES = [(kind, TOGETHER) for kind in KINDS]
ONE_BY_ONE = [(kind, (one,)) for kind in ("convolution", "gated delta") for one in TOGETHER]


@pytest.mark.slow
@pytest.mark.on_device
def test_units_are_exact_on_one_rank():
    cases = [*CASES, *ONE_BY_ONE]
    assert_exact(run_threads(run_case, 1, ["local"], cases, seconds=100))


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3, 4])
def test_units_are_exact_under_every_strategy(world_size):
    cases = [*CASES, *ONE_BY_ONE[world_size::3]]
    assert_exact(run_threads(run_case, world_size, SHARED, cases, seconds=200))


# ---- what is exchanged


@pytest.mark.parametrize(("strategy", "most"), [("ulysses", 9), ("balanced", 9), ("zigzag", 18)])
def test_ranks_receive_sums_of_many_branches(strategy, most):
    nodes = [(-1, 300), *[(0, 10)] * 60]
    unit = Unit.of(nodes, [(row, row + 1) for row in range(60)])
    group = Group(ranks=tuple(range(4)), sequences=(0,), strategy=strategy, units=(unit,))
    received = {False: [], True: []}
    for rank in range(4):
        shard = make_shard(MicroBatch(groups=(group,)), [unit.tokens, *[0] * 59], rank)
        segments = RankSegments(shard.zones, Tables())
        for after, rows in received.items():
            rows.append(segments.neighbours(after=after).received_rows)
    assert 0 < max(received[False]) <= most
    assert 0 < max(received[True]) <= most


def test_a_plain_sequence_on_one_rank_sums_nothing_up():
    group = Group(ranks=(0,), sequences=(0, 1), strategy="local")
    segments = RankSegments(make_shard(MicroBatch(groups=(group,)), [9, 5], 0).zones, Tables())
    for after in (False, True):
        found = segments.neighbours(after=after)
        assert not found.summarised
        assert not found.messages
