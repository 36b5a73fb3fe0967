"""Programs of all ranks, played without tensors: random plans, many ranks, and planted faults."""

import random

import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import heads, ring_steps
from hf_flexseq.program.compile import (
    HALO,
    HALO_RETURN,
    SUMMARIES_AFTER,
    SUMMARIES_BEFORE,
    Machine,
    MicroBatchLayout,
    backward,
    backward_of_rows,
    forward,
    of_rows,
)
from hf_flexseq.program.instructions import LayerShape, RowShape
from tests.budget import for_seeds
from tests.plans import random_plan
from tests.program.check import ProgramError, check

SHAPE = LayerShape(query_heads=6, kv_heads=2, head_dim=8, dtype="bfloat16")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Heads come and go in pieces, and steps of rings are not joined."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setitem(ring_steps.WORTHY_PAIRS, "cuda", 1)


def programs_of(micro_batch, lengths, topology, shape=SHAPE, **options):
    """The programs of all ranks by direction, and by rank."""
    machine = Machine(topology=topology, device="cuda", wide_gradients=False, **options)
    directions = ({}, {}, {})
    for rank in range(topology.world_size):
        shard = make_shard(micro_batch, lengths, rank)
        parts = MicroBatchLayout(shard, machine).parts
        directions[0][rank] = forward(parts, shape)
        saved = directions[0][rank].saved
        directions[1][rank] = backward(parts, shape, saved)
        directions[2][rank] = backward_of_rows(parts, shape, saved)
    return directions


@for_seeds(40)
def test_random_plans_come_to_their_end(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setitem(ring_steps.WORTHY_PAIRS, "cuda", rng.choice((1, 100, 10**9)))
    nodes, per_node = rng.choice(((1, 4), (2, 2), (2, 4), (3, 2), (4, 2), (1, 7)))
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    lengths = [rng.choice((1, 2, 5, 40, 131)) for _ in range(12)]
    plan = random_plan(lengths, topology.world_size, rng, nodes=nodes)
    options = {}
    shape = SHAPE._replace(sinks=rng.random() < 0.3)
    shape = shape._replace(reach=rng.choice((FULL, FULL, Reach(window=17), Reach(chunk=24))))
    for micro_batch in plan.micro_batches:
        for programs in programs_of(micro_batch, plan.lengths, topology, shape, **options):
            check(programs, shape)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "ulysses", "hybrid"])
def test_a_group_of_64_ranks_comes_to_its_end(strategy):
    topology = Topology(nodes=8, ranks_per_node=8)
    group = Group(ranks=tuple(range(64)), sequences=(0,), strategy=strategy)
    for programs in programs_of(MicroBatch(groups=(group,)), (6400,), topology):
        check(programs, SHAPE)


def recurrent_programs(micro_batch, lengths, topology, shape, **options):
    """What recurrent layers exchange: by direction, the programs by rank."""
    machine = Machine(topology=topology, device="cuda", wide_gradients=False, **options)
    directions = {}
    for rank in range(topology.world_size):
        shard = make_shard(micro_batch, lengths, rank)
        parts = MicroBatchLayout(shard, machine).parts
        for what in (HALO, HALO_RETURN, SUMMARIES_BEFORE, SUMMARIES_AFTER):
            directions.setdefault(what, {})[rank] = of_rows(parts, what, shape)
    return directions.values()


@for_seeds(20)
def test_what_recurrent_layers_exchange_comes_to_its_end(seed):
    rng = random.Random(seed)
    nodes, per_node = rng.choice(((1, 4), (2, 2), (2, 4), (3, 2), (4, 2), (1, 7)))
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    lengths = [rng.choice((1, 2, 5, 40, 131)) for _ in range(12)]
    plan = random_plan(lengths, topology.world_size, rng, nodes=nodes)
    shape = RowShape(columns=6, dtype="bfloat16", width=rng.choice((2, 4, 7)))
    for micro_batch in plan.micro_batches:
        for programs in recurrent_programs(micro_batch, plan.lengths, topology, shape):
            check(programs, shape)


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "ulysses", "hybrid"])
def test_a_rank_gets_few_rows_of_a_long_sequence(strategy):
    """Whatever the length: W - 1 rows for each of its segments, and a summary of each segment of
    another rank."""
    degree, width = 8, 4
    topology = Topology(nodes=2, ranks_per_node=4)
    group = Group(ranks=tuple(range(degree)), sequences=(0,), strategy=strategy)
    shape = RowShape(columns=1, dtype="float32", width=width)
    segments_a_rank = 1 if strategy in ("ulysses", "balanced") else 2
    for length in (6400, 64000):
        halos, returned, before, after = recurrent_programs(
            MicroBatch(groups=(group,)), (length,), topology, shape
        )
        for rank in range(degree):
            assert received_rows(halos[rank]) <= segments_a_rank * (width - 1)
            assert received_rows(before[rank]) <= segments_a_rank * (degree - 1)
            assert received_rows(after[rank]) <= segments_a_rank * (degree - 1)
            sent = sum(halos[rank].all_values[m.value].rows for m in sends(halos[rank]))
            assert received_rows(returned[rank]) == sent


def received_rows(program):
    """The rows that the posts of a program bring."""
    rows = 0
    for one in program.instructions:
        if one.operation == "post":
            rows += sum(program.all_values[m.value].rows for m in one.constants[1].recvs)
    return rows


def sends(program):
    """The messages that a program sends."""
    for one in program.instructions:
        if one.operation == "post":
            yield from one.constants[1].sends


# ---- planted faults


def ring_of_four():
    topology = Topology(nodes=1, ranks_per_node=4)
    group = Group(ranks=(0, 1, 2, 3), sequences=(0,), strategy="zigzag")
    return programs_of(MicroBatch(groups=(group,)), (64,), topology)[1]


def without(program, operation, which=0):
    """The program without one of its instructions of a kind."""
    places = [i for i, one in enumerate(program.instructions) if one.operation == operation]
    kept = list(program.instructions)
    del kept[places[which]]
    return program._replace(instructions=tuple(kept))


def swapped(program):
    """The program with its first two posts the other way round."""
    first, second, *_ = [
        i for i, one in enumerate(program.instructions) if one.operation == "post"
    ]
    changed = list(program.instructions)
    changed[first], changed[second] = changed[second], changed[first]
    return program._replace(instructions=tuple(changed))


FAULTS = {
    "a wait left out": (lambda p: without(p, "wait"), "reads before it waits"),
    "the last wait left out": (lambda p: without(p, "wait", -1), "reads before|never waits"),
    "a post left out": (lambda p: without(p, "post"), "does not exist yet|has not posted"),
    "what is made left out": (lambda p: without(p, "pair"), "does not exist yet"),
    "two posts swapped": (swapped, "cannot go on"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    change, words = FAULTS[fault]
    programs = ring_of_four()
    check(programs, SHAPE)
    programs[1] = change(programs[1])
    with pytest.raises(ProgramError, match=words):
        check(programs, SHAPE)


def test_a_rank_without_its_peer_is_found():
    programs = ring_of_four()
    del programs[2]
    with pytest.raises(ProgramError, match="rank 2, which has nothing"):
        check(programs, SHAPE)


def test_a_program_reads_like_a_list():
    lines = str(ring_of_four()[0]).splitlines()
    assert lines[0].startswith("inputs  v0, v1")
    assert lines[-1].startswith("outputs ")
    assert any("gradients" in line and "queries x" in line for line in lines)
    assert any("to rank 1" in line and "from rank 3" in line for line in lines)
