"""Attention in which blocks of tokens see both ways, against dense softmax attention with a mask,
in float64: all kinds of layers that may ask for it, on one rank and on several. Blocks in some of
the groups of a plan are in `test_never_hangs.py`."""

import random
from functools import partial

import pytest
import torch

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.base.layers import Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Node, Unit
from hf_flexseq.program.compile import FORWARD, compile_program, parts_of
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.program.zones import Machine
from tests.attention.exact import (
    KINDS,
    Case,
    assert_exact,
    attend,
    context_on,
    group_of,
    run_cases,
    wanted,
)
from tests.attention.group import forward_backward, largest_error, nodes_of, qkv_and_dout
from tests.budget import others_slow
from tests.kernels.reference import Reference
from tests.plans import one_group
from tests.program.rank_programs import messages_of, programs_of_group
from tests.ranks import join, run_threads

ASKING = [name for name, (reach, *_) in KINDS.items() if reach.chunk is None]
HEADS = ((4, 4), (4, 2), (8, 1), (3, 1))

BY_HAND = (  # (length, blocks)
    (7, ((3, 4),)),  # one token
    (7, ((3, 5),)),  # two tokens
    (20, ((0, 6),)),  # at the start
    (20, ((13, 20),)),  # at the end
    (23, ((0, 23),)),  # a whole sequence
    (30, ((2, 9), (9, 10), (10, 12), (12, 25))),  # adjacent
    (9, ((0, 2), (2, 4), (7, 9))),  # pairs
    (11, ()),
)


def case_of(kind, heads, sequences, units=()):
    """sequences: (length, blocks) of each."""
    lengths, blocks = zip(*sequences, strict=True)
    return Case(kind, heads, lengths, units, tuple(enumerate(blocks)))


def drawn(seed):
    rng = random.Random(seed)
    lengths = tuple(rng.choice((1, 2, 3, 8, 21, 45)) for _ in range(rng.randint(1, 5)))
    sequences = []
    for length in lengths:
        ends = sorted(rng.choices(range(length + 1), k=rng.choice((0, 2, 4, 8))))
        pairs = zip(ends[::2], ends[1::2], strict=True)
        sequences.append((length, tuple((start, stop) for start, stop in pairs if start < stop)))
    return case_of(rng.choice(ASKING), rng.choice(HEADS), sequences)


CASES = (
    *(case_of(kind, HEADS[i % len(HEADS)], BY_HAND) for i, kind in enumerate(ASKING)),
    *map(drawn, range(20)),
)


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", others_slow([1, 2, 4], tried=[2]))
def test_blocks_are_exact(world_size):
    strategy = "local" if world_size == 1 else "ulysses"
    assert_exact(run_threads(run_cases, world_size, [strategy], CASES, seconds=100))


# ---- units

TREE = Unit(
    (Node(-1, 12), Node(0, 5), Node(1, 4), Node(1, 7), Node(0, 9)), ((0, 2), (1, 3), (2, 4))
)
TREE_BLOCKS = ((2, 8), (9, 12), (12, 16), (18, 21), (22, 27), (28, 37))
TREE_KINDS = ("full", "window with sinks", "wide window with a softcap", "small values")
WITH_TREE = ((TREE.tokens, TREE_BLOCKS), (0, ()), (0, ()), (17, ((1, 10),)))
OF_UNITS = [case_of(kind, (4, 2), WITH_TREE, (TREE,)) for kind in TREE_KINDS]


@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_blocks_of_units_are_exact(world_size):
    strategy = "local" if world_size == 1 else "ulysses"
    assert_exact(run_threads(run_cases, world_size, [strategy], OF_UNITS))


# ---- who asks


def asked_and_not(rank, world_size):
    """The differences of a layer that asks for both ways, and of one that does not, to a causal
    layer."""
    case = case_of("window with sinks", (4, 2), BY_HAND)
    seq_ctx = context_on(join(nodes_of(world_size)), group_of(case, [0], "local"), case)
    causal, _ = wanted(case._replace(blocks=None))
    found = []
    for both_ways in (True, False):
        (out, *_), _ = attend(seq_ctx, case, both_ways=both_ways)
        found.append(largest_error([out], [one[:1] for one in causal], seq_ctx.shard))
    return found


def test_a_layer_that_does_not_ask_stays_causal():
    ((asking, other),) = run_threads(asked_and_not, 1)
    assert other <= 1e-12
    assert asking > 0.1


SHAPE = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16")
MACHINE = Machine(
    topology=Topology(nodes=1, ranks_per_node=4), device="cuda", wide_gradients=False
)


def own_parts(strategy, lengths, blocks, *, ranks=range(4)):
    micro_batch = one_group([0] if strategy == "local" else ranks, len(lengths), strategy)
    return parts_of(make_shard(micro_batch, lengths, 0), MACHINE, blocks)


@pytest.mark.parametrize("strategy", ["local", "ulysses", "zigzag", "balanced", "hybrid"])
@pytest.mark.parametrize("blocks", [{}, {1: ((3, 4), (4, 5))}, {7: ((0, 9),)}])
def test_without_blocks_programs_are_those_of_causal_layers(strategy, blocks):
    lengths = (40, 9)
    asking = SHAPE._replace(both_ways=True)
    found = str(compile_program(own_parts(strategy, lengths, blocks), FORWARD, asking))
    assert found == str(compile_program(own_parts(strategy, lengths, {}), FORWARD, SHAPE))


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
        own_parts(strategy, (40, 9), {1: ((3, 6),)})


@pytest.mark.parametrize(
    "blocks", [((0, 41),), ((-1, 3),), ((5, 5),), ((5, 9), (8, 12)), ((20, 25), (3, 6))]
)
def test_blocks_that_do_not_fit_are_refused(blocks):
    with pytest.raises(ValueError, match="blocks of sequence 1 must ascend within its 40 tokens"):
        own_parts("local", (9, 40), {1: blocks})


def test_blocks_in_chunks_are_refused():
    parts = own_parts("ulysses", (40,), {0: ((3, 6),)})
    asking = SHAPE._replace(both_ways=True, reach=Reach(chunk=8))
    with pytest.raises(ValueError, match="chunks of 8 tokens"):
        compile_program(parts, FORWARD, asking)


@pytest.mark.parametrize("block", [(10, 13), (15, 18), (5, 30)])
def test_blocks_that_rows_share_in_part_are_refused(block):
    micro_batch = group_of(OF_UNITS[0], (0,), "local")
    shard = make_shard(micro_batch, OF_UNITS[0].lengths, 0)
    with pytest.raises(ValueError, match="rows share only some of them"):
        parts_of(shard, MACHINE, {0: (block,)})


# ---- precision


def bfloat16_errors(rank, world_size, kernel, both_ways):
    """Squared errors, and squares, of out, dq, dk and dv in bfloat16."""
    sequences = ((300, ((10, 200), (220, 290))), (120, ((0, 120),)))
    case = case_of("full", (4, 2), sequences)
    communicator = join(nodes_of(world_size))
    strategy = "local" if world_size == 1 else "ulysses"
    micro_batch = group_of(case, range(world_size), strategy)
    whole = [qkv_and_dout(i, n, *case.heads, 32) for i, n in enumerate(case.lengths)]
    found = {}
    for dtype, used in ((torch.float64, Reference()), (torch.bfloat16, kernel)):
        seq_ctx = context_on(communicator, micro_batch, case, kernel=used)
        given = [[x.bfloat16().to(dtype) for x in tensors] for tensors in whole]
        layer = partial(sequence_parallel_attention, seq_ctx=seq_ctx, both_ways=both_ways)
        found[dtype] = forward_backward(given, seq_ctx.shard, layer)
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
