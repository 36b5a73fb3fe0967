"""Block schedules as data: all ranks have the same calls, and about equal loads. That they compute
causal attention is shown by tests/attention/test_sequence_parallel.py."""

from itertools import product

import pytest

from tests.plan.schedules import schedule_of, work_of

DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16]

every_schedule = pytest.mark.parametrize("strategy", ["zigzag", "balanced"])


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
