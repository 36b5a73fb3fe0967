"""Block schedules as data: each covers the causal triangle exactly once, and everyone is
served."""

import pytest

from hf_flexseq.plan.attention_schedule import Schedule, attention_schedule, calls_of_rank, check

DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16]

every_degree = pytest.mark.parametrize("degree", DEGREES)
every_schedule = pytest.mark.parametrize("strategy", ["zigzag", "balanced"])


@every_degree
@every_schedule
@pytest.mark.parametrize("mirrored", [False, True])
def test_every_block_is_computed_once_from_chunks_where_they_are(strategy, degree, mirrored):
    check(attention_schedule(strategy, degree, mirrored))
    check(attention_schedule(strategy, degree, mirrored, chunk_by_chunk=True))


@every_degree
@every_schedule
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("chunk_by_chunk", [False, True])
def test_a_rank_finds_its_own_calls_in_the_order_of_the_whole_schedule(
    strategy, degree, mirrored, chunk_by_chunk
):
    schedule = attention_schedule(strategy, degree, mirrored, chunk_by_chunk=chunk_by_chunk)
    for index in range(degree):
        expected = [[] for _ in range(schedule.times)]
        for call in schedule.calls:
            if index in (call.worker, call.reader, call.source):
                expected[call.time].append(call)
        found = calls_of_rank(
            strategy, degree, index, mirrored=mirrored, chunk_by_chunk=chunk_by_chunk
        )
        assert found == tuple(tuple(calls) for calls in expected)


@every_degree
def test_zigzag_has_no_idle_time(degree):
    assert attention_schedule("zigzag", degree).critical_path() == 1.0


@every_degree
def test_zigzag_is_half_a_square_for_every_rank_at_every_time(degree):
    assert {call.work for call in attention_schedule("zigzag", degree).calls} == {4}


@every_degree
@every_schedule
def test_at_every_time_each_rank_lends_to_one_other_at_most(strategy, degree):
    schedule = attention_schedule(strategy, degree)
    for time in range(1, schedule.times):
        lenders = [
            owner
            for call in schedule.calls
            if call.time == time
            for owner in (call.reader, call.source)
            if owner != call.worker
        ]
        assert len(lenders) == len(set(lenders))


def test_a_schedule_reads_as_text():
    assert str(attention_schedule("zigzag", 2)).splitlines() == [
        "0 | 0: q0+3 x causal kv0+3 | 1: q1+2 x causal kv1+2",
        "1 | 0: q3 x kv1+2 of 1 | 1: q1+2 x kv0 of 0",
    ]
    assert str(attention_schedule("balanced", 3)).splitlines() == [
        "0 | 0: q0 x causal kv0 | 1: q1 x causal kv1 | 2: q2 x causal kv2",
        "1 | 0: q2 of 2 x kv0 | 1: q1 x kv0 of 0 | 2: q2 x kv1 of 1",
    ]


def broken(change):
    """Return `balanced` of 3 with one call, rank 0's help, changed by `change`; None drops it."""
    schedule = attention_schedule("balanced", 3)
    calls = []
    for call in schedule.calls:
        if (call.time, call.worker) != (1, 0):
            calls.append(call)
        elif change is not None:
            calls.append(call._replace(**change))
    return Schedule(chunks=schedule.chunks, calls=tuple(calls))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"missing \[\(2, 0, False\)\], extra \[\]"),
        ({"reader": 1}, "held by another rank"),
        ({"causal": True}, "reads its own chunks"),
        ({"worker": 2}, "time 1: rank 2 has 2 calls"),
        (
            {"reader": 0, "queries": (0,)},
            r"missing \[\(2, 0, False\)\], extra \[\(0, 0, False\)\]",
        ),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check(broken(change))
