"""Pipeline planners: legal, within memory, deterministic, near the optimum, and refusing what
cannot be."""

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_flexseq.base.registry import PIPELINE_SCHEDULES
from hf_flexseq.pipeline.planning.cuts import TILE, UNEVEN, CutWork, cut, on_tiles
from hf_flexseq.pipeline.planning.orders import one_forward_one_backward
from hf_flexseq.pipeline.planning.plan import text
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.walk import check, check_memory, makespan_ns
from hf_flexseq.plan import PlanInfeasible
from tests.budget import examples, for_seeds
from tests.pipeline.exact_orders import shortest
from tests.pipelines import (
    costs_of,
    even_cost,
    peak_bytes,
    pipelined,
    plan_of,
    relaxed,
    stage_cost,
)

LENGTHS = st.lists(st.one_of(st.integers(1, 50), st.integers(1, 20_000)), max_size=12)


def price(stages, **changed):
    return PipelineCost.even(stages, stage_cost(**changed))


@settings(max_examples=examples(30), deadline=None)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.sampled_from(list(PIPELINE_SCHEDULES)),
    st.sampled_from([None, 1, 3]),
)
def test_every_plan_is_legal_and_says_what_it_takes(lengths, stages, schedule, chunks):
    assume(schedule != "1f1b" or chunks in (None, 1))
    assume(schedule != "seq1f1b-i" or stages % 2 == 0)
    cost = price(stages)
    options = {"schedule": schedule, "chunks": chunks}
    plan = pipelined(lengths, cost, **options)
    check(plan)
    # By a twin that knows neither the planner's play nor `walk`: pulled until nothing moves.
    assert max(relaxed(plan, cost).values(), default=0) / 1e9 == plan.objective_s
    assert plan.digest() == pipelined(lengths, cost, **options).digest()


@settings(max_examples=examples(25), deadline=None)
@given(
    LENGTHS.filter(bool),
    st.integers(1, 4),
    st.integers(3, 40),
    st.sampled_from(["auto", "infinipipe"]),
)
def test_plans_stay_within_their_room(lengths, stages, tenths, schedule):
    cost = price(stages)
    limit = (tenths * max(lengths) * 38 // 10,) * stages
    try:
        plan = pipelined(lengths, cost, schedule=schedule, memory_limit=limit, chunks=2)
    except PlanInfeasible as error:
        # all of a sequence and its carries are 38 bytes a token, and InfiniPipe's window may ask
        # for more
        if "sequence" not in str(error) or (tenths >= 20 and schedule == "auto"):
            raise
        return
    check(plan)
    check_memory(plan, cost, limit)


@settings(max_examples=examples(15), deadline=None)
@given(
    LENGTHS.filter(bool), st.integers(1, 500), st.sampled_from(["auto", "seq1f1b", "infinipipe"])
)
def test_no_chunk_exceeds_its_tokens(lengths, most, schedule):
    assume(sum(lengths) / most < 150)
    plan = pipelined(lengths, price(2), schedule=schedule, max_tokens=most, chunks=2)
    assert max(chunk.tokens for chunk in plan.chunks) <= most


@pytest.mark.parametrize("schedule", ["auto", "seq1f1b", "infinipipe"])
def test_chunks_are_those_of_the_longest_sequences(schedule):
    plan = pipelined([9000, 4000, 9000, 100], price(2), schedule=schedule, chunks=6)
    parts = [part.sequence for chunk in plan.chunks for part in chunk.slices]
    assert [parts.count(sequence) for sequence in range(4)] == [6, 2, 6, 1]


# ---- cuts and packs


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 40), st.sampled_from([0.0, 0.05, 1.0]))
def test_cuts_are_equal_but_for_rounding_and_nearly_equal_on_tiles(length, count, square):
    work = CutWork(linear=1.0, square=square)
    equal = cut(length, count, work)
    assert (equal[0], equal[-1], len(equal)) == (0, length, min(count, length) + 1)
    shares = [work.between(a, b) for a, b in itertools.pairwise(equal)]
    one_token = work.between(length - 1, length)
    assert max(shares) - min(shares) <= 2 * one_token * (1 + 1e-9)
    sizes = [b - a for a, b in itertools.pairwise(equal)]
    assert min(sizes) >= 1
    assert max(sizes) <= sizes[0] + 2  # the first, which sees least, is longest
    places = on_tiles(equal, work)
    assert (places[0], places[-1]) == (0, length)
    if places != equal:
        assert all(place % TILE == 0 for place in places[:-1])
        most = work.between(0, length) / (len(equal) - 1) * (1 + UNEVEN)
        assert all(0 < work.between(a, b) <= most for a, b in itertools.pairwise(places))


# ---- order


@pytest.mark.slow
def test_auto_is_close_to_the_exact_order_of_few_chunks():
    rng, gaps = random.Random(1), []
    while len(gaps) < 30:
        stages = rng.choice([2, 2, 3])
        cost = price(
            stages, attention_ns=rng.choice([0.0, 0.3, 1.0]), chunk_ns=rng.choice([1e4, 3e5])
        )
        lengths = [rng.choice([300, 1000, 1500, 2500]) for _ in range(rng.randint(2, 3))]
        memory_limit = (int(max(lengths) * 38 * rng.uniform(1.05, 2.5)),) * stages
        plan = pipelined(lengths, cost, chunks=2, memory_limit=memory_limit)
        if len(plan.chunks) > (5 if stages == 2 else 4):
            continue
        units = [chunk.unit for chunk in plan.chunks]
        sizes = [units.count(unit) for unit in range(max(units) + 1)]
        exact = shortest(sizes, costs_of(plan, cost), memory_limit)
        gaps.append(plan.objective_s * 1e9 / exact - 1)
    assert -1e-9 <= min(gaps) <= max(gaps) <= 0.06
    assert sum(gaps) / len(gaps) <= 0.015


def test_auto_checkpoints_what_does_not_fit_and_names_what_never_does():
    cost = price(2)
    lengths = [100, 10_000, 200]
    free = pipelined(lengths, cost, chunks=8)
    tight = pipelined(lengths, cost, chunks=8, memory_limit=(300_000,) * 2)
    assert not free.checkpointed
    assert any(map(any, tight.checkpointed))
    assert tight.objective_s > free.objective_s
    check_memory(tight, cost, (300_000,) * 2)
    with pytest.raises(PlanInfeasible, match="sequence 1 .* the limit is 50000"):
        pipelined(lengths, cost, chunks=8, memory_limit=(50_000,) * 2)


@pytest.mark.parametrize("stages, chunks", [(2, 1), (2, 4), (4, 2)])
def test_auto_beats_seq1f1b_on_equal_lengths_in_its_memory(stages, chunks):
    cost, lengths = price(stages, attention_ns=0.02), [8192] * 12
    plain = pipelined(lengths, cost, schedule="seq1f1b", chunks=chunks)
    memory_limit = (max(peak_bytes(plain, cost)),) * stages
    found = pipelined(lengths, cost, chunks=chunks, memory_limit=memory_limit)
    assert found.objective_s <= plain.objective_s


@pytest.mark.parametrize("owed_bytes", [5.0, 29.0])
@for_seeds(examples(6))
def test_what_backwards_owe_fits_the_room(seed, owed_bytes):
    """Also where some layers are checkpointed, whose inputs are less than what a backward owes:
    those stay whole."""
    rng = random.Random(seed)
    lengths = [rng.randint(100, 4000) for _ in range(rng.randint(3, 12))]
    cost = price(3, token_bytes=30.0, kv_bytes=1.0, owed_bytes=owed_bytes)
    tight = tuple(rng.randint(20, 40) * max(lengths) for _ in range(3))
    plan = pipelined(lengths, cost, memory_limit=tight)
    check(plan)
    check_memory(plan, cost, tight)
    places = plan.places()
    for action in (a for actions in plan.actions for a in actions if a.kind == "I"):
        checkpointed = plan.layers_checkpointed(action.stage, places[action.unit, action.chunk])
        assert not checkpointed or owed_bytes == 5.0


def test_checkpointing_fits_to_the_byte():
    """A layer less leaves 7.5 bytes of each chunk's 10, which round to 8: five of them are 40, not
    37.5."""
    cost = price(2, token_bytes=10.0, kv_bytes=0.0, input_bytes=0.0, layers=4)
    plan = pipelined([5], cost, chunks=5, memory_limit=(38, 38))
    check_memory(plan, cost, (38, 38))
    assert plan.checkpointed == ((2,) * 5,) * 2


# ---- what is refused


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"schedule": "gpipe"}, "schedule must be one of auto, 1f1b, .*; got 'gpipe'"),
        ({"max_tokens": 0}, "max_tokens=0: give at least 1"),
        ({"schedule": "seq1f1b-i", "stages": 3}, "3 stages cannot be spread evenly, 2 on each"),
        ({"memory_limit": (1, 2)}, "give the positive bytes of each of 4 ranks"),
        ({"lengths": [5, 0]}, "sequence 1 has length 0: every sequence needs"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments, problem):
    cost = price(arguments.pop("stages", 4))
    with pytest.raises(ValueError, match=problem):
        pipelined(arguments.pop("lengths", [100]), cost, **arguments)


def test_fixed_schedules_say_that_they_do_not_fit():
    problem = "schedule seq1f1b: 0F0.* Take pipeline_schedule='auto', which"
    with pytest.raises(PlanInfeasible, match=problem):
        pipelined([1000] * 4, price(2), schedule="seq1f1b", memory_limit=(1000, 1000))
    with pytest.raises(PlanInfeasible, match="sequence 1 has 1000 tokens, a chunk may have 999"):
        pipelined([5, 1000], price(2), schedule="1f1b", max_tokens=999)
    check(pipelined([5, 1000], price(2), schedule="1f1b", max_tokens=1000))


# ---- published warm-ups, bubbles and memory of 1F1B, Seq1F1B and its interleaving


def warm_up(actions):
    return next(place for place, action in enumerate(actions) if action.kind == "B") - 1


def test_backwards_are_first_in_first_out_over_sequences_and_last_in_first_out_inside():
    first, last = one_forward_one_backward([1, 1, 1], 2)
    assert text(first) == "0F0.0 0F1.0 0B0.0 0F2.0 0B1.0 0B2.0"
    assert text(last) == "1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0"
    (only,) = one_forward_one_backward([3, 2], 1)
    assert text(a for a in only if a.kind == "B") == "0B0.2 0B0.1 0B0.0 0B1.1 0B1.0"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_warm_up_bubble_and_memory_are_the_published_ones(ranks):
    for k, sequences in itertools.product((1, 2, 3, 4), (1, 4, 8)):
        plan = plan_of(one_forward_one_backward([k] * sequences, ranks), sizes=[k] * sequences)
        check(plan)
        chunks = k * sequences
        for rank, actions in enumerate(plan.actions):
            assert warm_up(actions) == min(ranks - rank - 2 + k, chunks - 1)
        # bubble (P - 1) / k M
        assert makespan_ns(plan, even_cost(ranks)) == 3000 * (chunks + ranks - 1)
        in_flight = [min(ranks - rank - 1 + k, chunks) for rank in range(ranks)]
        assert peak_bytes(plan, even_cost(ranks)) == tuple(8 * count for count in in_flight)


@pytest.mark.parametrize("ranks, k", [(2, 1), (2, 2), (4, 1), (4, 4), (8, 4)])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_interleaved_warm_up_and_bubble(ranks, k, stages_per_rank):
    sequences, stages = 8, ranks * stages_per_rank
    actions = one_forward_one_backward([k] * sequences, ranks, stages_per_rank)
    plan = plan_of(actions, sizes=[k] * sequences, stages=stages)
    check(plan)
    for rank, own in enumerate(actions):
        count = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1) + k - 1
        assert warm_up(own) == min(count, stages_per_rank * k * sequences - 1)
    work = 3000 * stages_per_rank * k * sequences
    # bubble (P - 1) / V k M
    assert makespan_ns(plan, even_cost(stages)) == work + 3000 * (ranks - 1)


@for_seeds(examples(100))
def test_units_of_any_sizes_take_turns(seed):
    """Also where k does not divide P, and where too few chunks are left for a turn of their
    own."""
    rng = random.Random(seed)
    ranks, stages_per_rank, most = rng.randint(1, 8), rng.randint(1, 4), rng.choice([1, 2, 3, 20])
    sizes = [rng.randint(1, most) for _ in range(rng.randint(1, 14))]
    actions = one_forward_one_backward(sizes, ranks, stages_per_rank)
    check(plan_of(actions, sizes=sizes, stages=ranks * stages_per_rank))
