"""Block schedules as data: each covers the causal triangle exactly once, and every rank gets what
it needs."""

from itertools import product

import pytest

from hf_flexseq.plan.attention_schedule import calls_of_rank
from tests.plan.schedules import Schedule, check, schedule_of, work_of

DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16]

every_schedule = pytest.mark.parametrize("strategy", ["zigzag", "balanced"])


@every_schedule
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("chunk_by_chunk", [False, True])
def test_blocks_are_computed_once_and_a_rank_finds_its_own_calls(
    strategy, mirrored, chunk_by_chunk
):
    """From chunks where they are, and in the order of the whole schedule."""
    options = {"mirrored": mirrored, "chunk_by_chunk": chunk_by_chunk}
    for degree in DEGREES:
        schedule = schedule_of(strategy, degree, **options)
        check(schedule)
        for index in range(degree):
            expected = [[] for _ in range(schedule.times)]
            for call in schedule.calls:
                if index in (call.worker, call.reader, call.source):
                    expected[call.time].append(call)
            found = calls_of_rank(strategy, degree, index, **options)
            assert found == tuple(tuple(calls) for calls in expected)


def test_zigzag_is_half_a_square_for_every_rank_at_every_time():
    for degree in DEGREES:
        schedule = schedule_of("zigzag", degree)
        assert len(schedule.calls) == degree * schedule.times
        assert {work_of(call) for call in schedule.calls} == {4}


@every_schedule
def test_at_every_time_each_rank_lends_to_one_other_at_most(strategy):
    for degree in DEGREES:
        lenders = set()
        for call, role in product(schedule_of(strategy, degree).calls, ("reader", "source")):
            owner = getattr(call, role)
            if call.time and owner != call.worker:
                assert (call.time, owner) not in lenders
                lenders.add((call.time, owner))


def test_a_schedule_reads_as_text():
    assert str(schedule_of("zigzag", 2)).splitlines() == [
        "0 | 0: q0+3 x causal kv0+3 | 1: q1+2 x causal kv1+2",
        "1 | 0: q3 x kv1+2 of 1 | 1: q1+2 x kv0 of 0",
    ]
    assert str(schedule_of("balanced", 3)).splitlines() == [
        "0 | 0: q0 x causal kv0 | 1: q1 x causal kv1 | 2: q2 x causal kv2",
        "1 | 0: q2 of 2 x kv0 | 1: q1 x kv0 of 0 | 2: q2 x kv1 of 1",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"missing \[\(2, 0, False\)\], extra \[\]"),
        ({"reader": 1}, "held by another rank"),
        ({"causal": True}, "reads its own chunks"),
        ({"worker": 2}, "time 1: rank 2 has 2 calls"),
        ({"reader": 0, "queries": (0,)}, r"\[\(2, 0, False\)\], extra \[\(0, 0, False\)\]"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    """`balanced` of 3 with one call, rank 0's help, changed or dropped."""
    schedule = schedule_of("balanced", 3)
    calls = [call for call in schedule.calls if (call.time, call.worker) != (1, 0)]
    (help_of_0,) = set(schedule.calls) - set(calls)
    if change is not None:
        calls.append(help_of_0._replace(**change))
    with pytest.raises(ValueError, match=message):
        check(Schedule(chunks=schedule.chunks, calls=tuple(calls)))
