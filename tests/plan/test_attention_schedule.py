"""Block schedules as data: all ranks have the same calls, and about equal loads. That they compute
causal attention is shown by tests/attention/test_sequence_parallel.py."""

from itertools import product

import pytest

from hf_flexseq.plan.attention_schedule import calls_of_rank
from tests.plan.schedules import schedule_of, work_of

DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16]

every_schedule = pytest.mark.parametrize("strategy", ["zigzag", "balanced"])


@every_schedule
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("chunk_by_chunk", [False, True])
def test_a_rank_finds_the_calls_in_which_it_takes_part(strategy, mirrored, chunk_by_chunk):
    """In the order of the whole schedule."""
    options = {"mirrored": mirrored, "chunk_by_chunk": chunk_by_chunk}
    for degree in DEGREES:
        schedule = schedule_of(strategy, degree, **options)
        for index in range(degree):
            expected = [[] for _ in range(1 + schedule[-1].time)]
            for call in schedule:
                if index in (call.worker, call.reader, call.source):
                    expected[call.time].append(call)
            found = calls_of_rank(strategy, degree, index, **options)
            assert found == tuple(tuple(calls) for calls in expected)


def test_zigzag_is_half_a_square_for_every_rank_at_every_time():
    for degree in DEGREES:
        schedule = schedule_of("zigzag", degree)
        assert len(schedule) == degree * (1 + schedule[-1].time)
        assert {work_of(call) for call in schedule} == {4}


@every_schedule
def test_at_every_time_each_rank_lends_to_one_other_at_most(strategy):
    for degree in DEGREES:
        lenders = set()
        for call, role in product(schedule_of(strategy, degree), ("reader", "source")):
            owner = getattr(call, role)
            if call.time and owner != call.worker:
                assert (call.time, owner) not in lenders
                lenders.add((call.time, owner))
