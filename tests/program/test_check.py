"""Programs of all ranks, played without tensors: random plans, many ranks, and planted faults."""

import random

import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.program import heads
from hf_flexseq.program.compile import BACKWARD
from hf_flexseq.program.instructions import LayerShape, RowShape
from tests.budget import examples, for_seeds
from tests.plans import random_blocks, random_plan
from tests.program.check import ProgramError, check
from tests.program.rank_programs import moved_bytes, programs_of, programs_of_group

SHAPE = LayerShape(query_heads=6, kv_heads=2, head_dim=8, dtype="bfloat16")
STRATEGIES = ["zigzag", "balanced", "ulysses", "hybrid"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Heads come in pieces across nodes."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)


@for_seeds(examples(40))
def test_random_plans_come_to_their_end(seed):
    rng = random.Random(seed)
    nodes, per_node = rng.choice(((1, 4), (2, 2), (2, 4), (3, 2), (4, 2), (1, 7)))
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    lengths = [rng.choice((1, 2, 5, 40, 131)) for _ in range(12)]
    plan = random_plan(lengths, topology.world_size, rng, nodes=nodes)
    reach = rng.choice((FULL, FULL, Reach(window=17), Reach(chunk=24)))
    shapes = [SHAPE._replace(sinks=rng.random() < 0.3, reach=reach)]
    if seed % 2:
        shapes.append(RowShape(columns=6, dtype="bfloat16", width=rng.choice((2, 4, 7))))
    if reach.chunk is None:
        shapes.append(shapes[0]._replace(both_ways=True))
    blocks = random_blocks(plan, rng)
    for micro_batch in plan.micro_batches:
        for shape in shapes:
            found = programs_of(micro_batch, plan.lengths, topology, shape, blocks=blocks)
            for programs in found.values():
                check(programs, shape)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_of_32_ranks_comes_to_its_end(strategy):
    for programs in programs_of_group(strategy, 32, (3200,), SHAPE, per_node=8).values():
        check(programs, SHAPE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_gets_few_rows_of_a_long_sequence(strategy):
    """Whatever the length: W - 1 rows for each of its segments, and a summary of each segment of
    another rank."""
    degree, width, row = 8, 4, 4  # a row has four bytes
    shape = RowShape(columns=1, dtype="float32", width=width)
    most = row if strategy in ("ulysses", "balanced") else 2 * row  # of all segments of a rank
    for length in (6400, 64000):
        programs = programs_of_group(strategy, degree, (length,), shape, per_node=4)
        halos, returned, *summaries = programs.values()
        for rank in range(degree):
            assert moved_bytes(halos[rank], shape) <= most * (width - 1)
            back = moved_bytes(returned[rank], shape)
            assert back == moved_bytes(halos[rank], shape, is_sent=True)
            for of_ranks in summaries:
                assert moved_bytes(of_ranks[rank], shape) <= most * (degree - 1)


# ---- planted faults


def ring_of_four():
    return programs_of_group("zigzag", 4, (64,), SHAPE)[BACKWARD]


def places_of(program, operation):
    return [i for i, one in enumerate(program.instructions) if one.operation == operation]


def without(program, operation, which=0):
    """The program without one of its instructions of a kind."""
    kept = list(program.instructions)
    del kept[places_of(program, operation)[which]]
    return program._replace(instructions=tuple(kept))


def swapped(program):
    """The program with its first two posts the other way round."""
    first, second, *_ = places_of(program, "post")
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
