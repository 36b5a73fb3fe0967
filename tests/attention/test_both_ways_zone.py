"""Attention in which blocks of tokens see both ways, against dense softmax attention with a mask,
in float64: all kinds of layers that may ask for it, on one rank and on several."""

import functools
import random
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Node, Unit
from hf_flexseq.program.compile import FORWARD, Machine, MicroBatchLayout, compile_program
from hf_flexseq.program.instructions import LayerShape
from tests.attention.dense import dense_attention
from tests.attention.group import largest_error, nodes_of, own_rows, qkv_and_dout
from tests.attention.test_sequence_parallel import KINDS, SIZE, gradient_of, options_of
from tests.budget import others_slow
from tests.device import DEVICE, own_kernel
from tests.kernels.reference import Reference
from tests.plans import group, one_group
from tests.program.rank_programs import messages_of, programs_of_group
from tests.ranks import join, run_ranks, run_threads

ASKING = [name for name, (reach, *_) in KINDS.items() if reach.chunk is None]
HEADS = ((4, 4), (4, 2), (8, 1), (3, 1))


class Case(NamedTuple):
    """Layers that attend to some sequences."""

    kind: str
    heads: tuple[int, int]
    lengths: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...]
    """By sequence."""


BY_HAND = (
    ("one token", 7, ((3, 4),)),
    ("two tokens", 7, ((3, 5),)),
    ("at the start", 20, ((0, 6),)),
    ("at the end", 20, ((13, 20),)),
    ("a whole sequence", 23, ((0, 23),)),
    ("adjacent", 30, ((2, 9), (9, 10), (10, 12), (12, 25))),
    ("pairs", 9, ((0, 2), (2, 4), (7, 9))),
    ("none", 11, ()),
)


def by_hand(kind, heads):
    return Case(kind, heads, tuple(n for _, n, _ in BY_HAND), tuple(b for *_, b in BY_HAND))


def drawn(seed):
    rng = random.Random(seed)
    lengths = tuple(rng.choice((1, 2, 3, 8, 21, 45)) for _ in range(rng.randint(1, 5)))
    blocks = []
    for length in lengths:
        ends = sorted(rng.choices(range(length + 1), k=rng.choice((0, 2, 4, 8))))
        pairs = zip(ends[::2], ends[1::2], strict=True)
        blocks.append(tuple((start, stop) for start, stop in pairs if start < stop))
    return Case(rng.choice(ASKING), rng.choice(HEADS), lengths, tuple(blocks))


CASES = (
    *(by_hand(kind, HEADS[i % len(HEADS)]) for i, kind in enumerate(ASKING)),
    *map(drawn, range(20)),
)


def given(case):
    value_size = KINDS[case.kind][3]
    return [qkv_and_dout(i, n, *case.heads, SIZE, value_size) for i, n in enumerate(case.lengths)]


@functools.cache
def wanted(case):
    """By sequence out, dq, dk, dv; and the gradient of all sinks."""
    options = options_of(case.kind, case.heads[0])
    found = []
    for tensors, blocks in zip(given(case), case.blocks, strict=True):
        *qkv, dout = tensors
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = dense_attention(*qkv, **options, blocks=blocks)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in qkv)])
    return found, gradient_of(options["sinks"])


def attend(seq_ctx, qkv, dout, kind, heads, *, checkpointed, both_ways=True):
    """Of a rank out, dq, dk and dv; and its part of the gradient of the sinks."""
    options = options_of(kind, heads[0])
    qkv = [x.clone().requires_grad_() for x in qkv]

    def run(q, k, v):
        # the layer is no identity, so that a replay has something to compute
        return sequence_parallel_attention(
            q * 1, k * 1, v * 1, seq_ctx, **options, both_ways=both_ways
        )

    out = checkpoint(run, *qkv, use_reentrant=False) if checkpointed else run(*qkv)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)], gradient_of(options["sinks"])


def context_on(communicator, micro_batch, lengths, blocks, **options):
    shard = make_shard(micro_batch, lengths, communicator.rank)
    kernel = options.pop("kernel", None) or own_kernel(torch.float64, 16)
    return SequenceContext(shard, communicator, kernel, DEVICE, blocks=blocks, **options)


def run_cases(rank, world_size, cases):
    communicator = join(nodes_of(world_size))
    found = []
    for number, case in enumerate(cases):
        strategy = "local" if world_size == 1 else "ulysses"
        micro_batch = one_group(range(world_size), len(case.lengths), strategy)
        blocks = dict(enumerate(case.blocks))
        keeps = number % 3 > 0  # of a checkpointed layer
        seq_ctx = context_on(
            communicator, micro_batch, case.lengths, blocks, save_attention_output=keeps
        )
        *qkv, dout = own_rows(given(case), seq_ctx.shard)
        checkpointed = (number + world_size) % 2 == 0
        tensors, sink_grad = attend(
            seq_ctx, qkv, dout, case.kind, case.heads, checkpointed=checkpointed
        )
        by_sequence, _ = wanted(case)
        found.append((errors_of(tensors, by_sequence, seq_ctx.shard), sink_grad))
    return found


def errors_of(tensors, by_sequence, shard):
    """The largest error of out, and that of all gradients."""
    of_out = largest_error(tensors[:1], [one[:1] for one in by_sequence], shard)
    return of_out, largest_error(tensors[1:], [one[1:] for one in by_sequence], shard)


def assert_exact(by_rank, sink_grads):
    """by_rank: ((error of out, of gradients), gradient of sinks) of each case; sink_grads: exact,
    of each case."""
    worst = {}
    for number, exact in enumerate(sink_grads):
        of_ranks = [found[number] for found in by_rank]
        of_out, of_grads = (max(errors) for errors in zip(*(e for e, _ in of_ranks), strict=True))
        if exact is not None:
            total = torch.tensor([grad for _, grad in of_ranks], dtype=torch.float64).sum(0)
            error = (total - torch.tensor(exact, dtype=torch.float64)).abs().max()
            of_grads = max(of_grads, float(error))
        if not (of_out <= 1e-12 and of_grads <= 1e-10):
            worst[number] = (of_out, of_grads)
    assert worst == {}


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", others_slow([1, 2, 4], tried=[2]))
def test_blocks_are_exact(world_size):
    by_rank = run_threads(run_cases, world_size, CASES, seconds=100)
    assert_exact(by_rank, [wanted(case)[1] for case in CASES])


@pytest.mark.processes
def test_blocks_are_exact_on_processes():
    cases = CASES[::4]
    assert_exact(run_ranks(run_cases, 2, cases, seconds=100), [wanted(case)[1] for case in cases])


# ---- several groups


def in_nested_groups(rank, world_size):
    """Errors of this rank where it works in a wide group with blocks, in a ring without any, and
    alone with blocks."""
    communicator = join(nodes_of(world_size))
    found = []
    for number, case in enumerate(NESTED):
        groups = (
            group(0, 4, 0, strategy="ulysses"),
            group(0, 4, 1, strategy="zigzag"),
            group(0, 2, 2, strategy="ulysses"),
            *(group(r, r + 1, 3 + r) for r in range(4)),
        )
        blocks = dict(enumerate(case.blocks))
        seq_ctx = context_on(communicator, MicroBatch(groups=groups), case.lengths, blocks)
        *qkv, dout = own_rows(given(case), seq_ctx.shard)
        tensors, sink_grad = attend(
            seq_ctx, qkv, dout, case.kind, case.heads, checkpointed=bool(number % 2)
        )
        by_sequence, _ = wanted(case)
        found.append((errors_of(tensors, by_sequence, seq_ctx.shard), sink_grad))
    return found


NESTED = [
    Case(
        kind,
        (4, 2),
        (37, 29, 18, 9, 1, 14, 6),
        (((3, 30),), (), ((0, 4), (5, 18)), ((1, 9),), (), ((0, 14),), ((2, 3),)),
    )
    for kind in ("full", "window with sinks")
]


def test_blocks_of_some_groups_beside_others_without():
    by_rank = run_threads(in_nested_groups, 4)
    assert_exact(by_rank, [wanted(case)[1] for case in NESTED])


# ---- units

TREE = Unit(
    (Node(-1, 12), Node(0, 5), Node(1, 4), Node(1, 7), Node(0, 9)), ((0, 2), (1, 3), (2, 4))
)
TREE_BLOCKS = ((2, 8), (9, 12), (12, 16), (18, 21), (22, 27), (28, 37))
TREE_KINDS = ("full", "window with sinks", "wide window with a softcap", "small values")


def unit_and_sequence(ranks):
    """A unit, and a plain sequence; tokens, and blocks, of both by id."""
    strategy = "local" if len(ranks) == 1 else "ulysses"
    shared = Group(ranks=tuple(ranks), sequences=(0, 3), strategy=strategy, units=(TREE,))
    blocks = {0: TREE_BLOCKS, 3: ((1, 10),)}
    return MicroBatch(groups=(shared,)), [TREE.tokens, 0, 0, 17], blocks


@functools.cache
def wanted_of_unit(kind):
    """By sequence out, dq, dk, dv; and the gradient of the sinks. Every row is computed by itself;
    a shared token's dout counts once."""
    _, lengths, blocks = unit_and_sequence((0,))
    options = options_of(kind, 4)
    layout = TREE.layout
    found = []
    for sequence, length in enumerate(lengths):
        *qkv, dout = qkv_and_dout(sequence, length, 4, 2, SIZE, KINDS[kind][3])
        qkv = [x.clone().requires_grad_() for x in qkv]
        paths = [torch.arange(length)]
        if sequence == 0:
            paths = [
                torch.cat([torch.arange(*one) for one in layout.ranges(end, 0, layout.ends[end])])
                for _, end in TREE.rows
            ]
        out = torch.zeros_like(dout)
        seen = torch.zeros(length, dtype=torch.bool)
        total = torch.zeros((), dtype=torch.float64)
        for path in paths:
            at = {token: position for position, token in enumerate(path.tolist())}
            on_path = [
                (at[start], at[stop - 1] + 1)
                for start, stop in blocks.get(sequence, ())
                if start in at
            ]
            of_row = dense_attention(*(x[path] for x in qkv), **options, blocks=on_path)
            new = ~seen[path]
            seen[path] = True
            out[path[new]] = of_row[new].detach()
            total = total + (of_row[new] * dout[path[new]]).sum()
        if length:
            total.backward()
        found.append([out, *(x.grad for x in qkv)])
    return found, gradient_of(options["sinks"])


def run_units(rank, world_size):
    communicator = join(nodes_of(world_size))
    micro_batch, lengths, blocks = unit_and_sequence(range(world_size))
    found = []
    for number, kind in enumerate(TREE_KINDS):
        seq_ctx = context_on(communicator, micro_batch, lengths, blocks)
        tensors = [qkv_and_dout(i, n, 4, 2, SIZE, KINDS[kind][3]) for i, n in enumerate(lengths)]
        *qkv, dout = own_rows(tensors, seq_ctx.shard)
        checkpointed = (number // 2 + world_size) % 2 == 0
        tensors, sink_grad = attend(seq_ctx, qkv, dout, kind, (4, 2), checkpointed=checkpointed)
        by_sequence, _ = wanted_of_unit(kind)
        found.append((errors_of(tensors, by_sequence, seq_ctx.shard), sink_grad))
    return found


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_of_units_are_exact(world_size):
    by_rank = run_threads(run_units, world_size)
    assert_exact(by_rank, [wanted_of_unit(kind)[1] for kind in TREE_KINDS])


# ---- who asks


def asked_and_not(rank, world_size):
    """The results of a layer that asks for both ways, and of one that does not."""
    case = by_hand("window with sinks", (4, 2))
    communicator = join(nodes_of(world_size))
    micro_batch = one_group([0], len(case.lengths), "local")
    seq_ctx = context_on(communicator, micro_batch, case.lengths, dict(enumerate(case.blocks)))
    *qkv, dout = own_rows(given(case), seq_ctx.shard)
    found = []
    for both_ways in (True, False):
        (out, *_), _ = attend(
            seq_ctx, qkv, dout, case.kind, case.heads, checkpointed=False, both_ways=both_ways
        )
        found.append(out)
    causal, _ = wanted(case._replace(blocks=((),) * len(case.lengths)))
    return [largest_error([out], [[one[0]] for one in causal], seq_ctx.shard) for out in found]


def test_a_layer_that_does_not_ask_stays_causal():
    ((asking, other),) = run_threads(asked_and_not, 1)
    assert other <= 1e-12
    assert asking > 0.1


SHAPE = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16")
MACHINE = Machine(
    topology=Topology(nodes=1, ranks_per_node=4), device="cuda", wide_gradients=False
)


def layout_of(strategy, lengths, blocks, *, ranks=range(4)):
    micro_batch = one_group([0] if strategy == "local" else ranks, len(lengths), strategy)
    return MicroBatchLayout(make_shard(micro_batch, lengths, 0), MACHINE, blocks)


@pytest.mark.parametrize("strategy", ["local", "ulysses", "zigzag", "balanced", "hybrid"])
@pytest.mark.parametrize("blocks", [{}, {1: ((3, 4), (4, 5))}, {7: ((0, 9),)}])
def test_without_blocks_programs_are_those_of_causal_layers(strategy, blocks):
    lengths = (40, 9)
    asking = SHAPE._replace(both_ways=True)
    found = str(compile_program(layout_of(strategy, lengths, blocks).parts, FORWARD, asking))
    assert found == str(compile_program(layout_of(strategy, lengths, {}).parts, FORWARD, SHAPE))


@pytest.mark.parametrize("strategy", ["local", "ulysses"])
def test_every_pair_is_computed_once(strategy):
    layout = layout_of(strategy, (40, 9, 5), {0: ((0, 10), (12, 13), (30, 40)), 2: ((1, 5),)})
    program = compile_program(layout.parts, FORWARD, SHAPE._replace(both_ways=True))
    calls = [one.constants[0].lengths for one in program.instructions if one.operation == "attend"]
    pairs = 0
    for call in calls:
        assert call.causal
        assert call.q_lens == call.k_lens
        pairs += sum(FULL.pairs(length) for length in call.q_lens)
    assert program.kernel_calls == 2  # a causal call, and one of blocks
    later = 45 + 45 + 6
    assert pairs == sum(map(FULL.pairs, (40, 9, 5))) + later


def test_blocks_change_no_message():
    for shape in (SHAPE, SHAPE._replace(query_heads=6, kv_heads=1)):
        posted = []
        for blocks in ({}, {0: ((3, 30),), 1: ((0, 9),)}):
            found = programs_of_group(
                "ulysses", 4, (40, 9), shape._replace(both_ways=True), blocks=blocks
            )
            of_ranks = []
            for by_rank in found.values():
                for rank, program in by_rank.items():
                    messages = [messages_of(one, program, shape) for one in program.instructions]
                    of_ranks.append((rank, [one for one in messages if one]))
            posted.append(of_ranks)
        assert posted[0] == posted[1]
        assert any(messages for _, messages in posted[0])


# ---- refusals


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "hybrid"])
def test_rings_refuse_blocks(strategy):
    with pytest.raises(ValueError, match=r"cannot compute tokens that see both ways.*'ulysses'"):
        layout_of(strategy, (40, 9), {1: ((3, 6),)})


@pytest.mark.parametrize(
    "blocks", [((0, 41),), ((-1, 3),), ((5, 5),), ((5, 9), (8, 12)), ((20, 25), (3, 6))]
)
def test_blocks_that_do_not_fit_are_refused(blocks):
    with pytest.raises(ValueError, match="blocks of sequence 1 must ascend within its 40 tokens"):
        layout_of("local", (9, 40), {1: blocks})


def test_blocks_in_chunks_are_refused():
    parts = layout_of("ulysses", (40,), {0: ((3, 6),)}).parts
    asking = SHAPE._replace(both_ways=True, reach=Reach(chunk=8))
    with pytest.raises(ValueError, match="chunks of 8 tokens"):
        compile_program(parts, FORWARD, asking)


@pytest.mark.parametrize("block", [(10, 13), (15, 18), (5, 30)])
def test_blocks_that_rows_share_in_part_are_refused(block):
    micro_batch, lengths, _ = unit_and_sequence((0,))
    with pytest.raises(ValueError, match="rows share only some of them"):
        MicroBatchLayout(make_shard(micro_batch, lengths, 0), MACHINE, {0: (block,)})


# ---- precision


def bfloat16_errors(rank, world_size, kernel, both_ways):
    """Squared errors, and squares, of out, dq, dk and dv in bfloat16."""
    lengths = (300, 120)
    blocks = {0: ((10, 200), (220, 290)), 1: ((0, 120),)}
    communicator = join(nodes_of(world_size))
    strategy = "local" if world_size == 1 else "ulysses"
    micro_batch = one_group(range(world_size), len(lengths), strategy)
    found = {}
    for dtype, used in ((torch.float64, Reference()), (torch.bfloat16, kernel)):
        seq_ctx = context_on(communicator, micro_batch, lengths, blocks, kernel=used)
        tensors = own_rows(
            [qkv_and_dout(i, n, 4, 2, 32) for i, n in enumerate(lengths)], seq_ctx.shard
        )
        q, k, v, dout = (x.bfloat16().to(dtype) for x in tensors)
        qkv = [x.requires_grad_() for x in (q, k, v)]
        out = sequence_parallel_attention(*qkv, seq_ctx, both_ways=both_ways)
        out.backward(dout)
        found[dtype] = [out.detach(), *(x.grad for x in qkv)]
    return [
        (float((x.double() - y).square().sum()), float(y.square().sum()))
        for x, y in zip(found[torch.bfloat16], found[torch.float64], strict=True)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_bfloat16_stays_close_to_causal_attention(world_size, kernel):
    relative = []
    for both_ways in (True, False):
        sums = torch.tensor(run_threads(bfloat16_errors, world_size, kernel, both_ways)).sum(0)
        relative.append((sums[:, 0] / sums[:, 1]).sqrt())
    ratios = (relative[0] / relative[1]).tolist()
    assert max(ratios) <= 1.5, ratios
