"""LightSeq's balanced ring: its rounds, and its costs against its schedule.

Its attention is tested with all other strategies, in tests/attention, tests/plan and tests/hf.
"""

import pytest

from hf_flexseq.cost.rings import ring_costs
from hf_flexseq.plan.attention_schedule import attention_schedule
from tests.costs import simple_cost


def test_no_rank_idles_at_odd_degrees_and_each_for_half_a_block_at_even_ones():
    for degree in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16):
        schedule = attention_schedule("balanced", degree)
        busiest = [0] * schedule.times  # half squares of the busiest rank
        for call in schedule.calls:
            busiest[call.time] = max(busiest[call.time], call.work)
        perfect = sum(call.work for call in schedule.calls) / degree
        assert sum(busiest) / perfect == (1.0 if degree % 2 else (degree + 1) / degree)
        assert schedule.times == degree // 2 + 1  # the ring is done half way round


def busiest_link(degree: int, keys: float, queries: float) -> float:
    """From the steps of `balanced`: the most that any rank sends or receives, for tensors of these
    widths."""
    total = 0.0
    for there, back_of_keys in ((1, 0), (3, 1)):  # forward, backward
        moves = []  # (source, target, size)
        for step in attention_schedule("balanced", degree).calls:
            if step.source != step.worker:
                moves.append((step.source, step.worker, keys))
                moves.append((step.worker, step.source, back_of_keys * keys))
            if step.reader != step.worker:
                moves.append((step.reader, step.worker, there * queries))
                moves.append((step.worker, step.reader, queries))
        sent, received = [0.0] * degree, [0.0] * degree
        for source, target, size in moves:
            sent[source] += size
            received[target] += size
        total += max(sent + received)
    return total


@pytest.mark.parametrize("degree", range(2, 17))
def test_the_ring_pays_what_its_busiest_rank_moves(degree):
    """Keys and values of a width of 2, queries as wide as keys alone."""
    assert 2.0 * ring_costs("balanced").trips(degree) == busiest_link(degree, 2.0, 1.0)


def test_seconds_count_the_idle_time_of_even_degrees():
    cost = simple_cost(attention_s=1.0)
    assert [cost.sequence_ns(12, d, "balanced", False) / 1e9 for d in (2, 3, 4)] == pytest.approx(
        [144 / 2 * 3 / 2, 144 / 3, 144 / 4 * 5 / 4], rel=1e-6
    )
