"""LightSeq's balanced ring: its rounds, and its costs against its schedule.

Its attention is tested with all other strategies, in tests/attention, tests/plan and tests/hf.
"""

from dataclasses import replace

import pytest

from hf_flexseq.plan.attention_schedule import attention_schedule
from tests.cost.test_model import SIMPLE

every_degree = pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16])


@every_degree
def test_no_rank_idles_at_odd_degrees_and_each_for_half_a_block_at_even_ones(degree):
    expected = 1.0 if degree % 2 else (degree + 1) / degree
    assert attention_schedule("balanced", degree).critical_path() == expected


@every_degree
def test_the_ring_is_done_half_way_round(degree):
    assert attention_schedule("balanced", degree).times == degree // 2 + 1


def busiest_link(degree: int, keys: float, queries: float) -> float:
    """From the steps of `balanced`: the most that any rank sends or receives, for tensors of these
    widths."""
    total = 0.0
    for there, back_of_keys in ((1, 0), (3, 1)):  # forward, backward
        sent, received = [0.0] * degree, [0.0] * degree

        def move(
            source: int,
            target: int,
            size: float,
            out: list[float] = sent,
            into: list[float] = received,
        ) -> None:
            out[source] += size
            into[target] += size

        for step in attention_schedule("balanced", degree).calls:
            if step.source != step.worker:
                move(step.source, step.worker, keys)
                move(step.worker, step.source, back_of_keys * keys)
            if step.reader != step.worker:
                move(step.reader, step.worker, there * queries)
                move(step.worker, step.reader, queries)
        total += max(sent + received)
    return total


@pytest.mark.parametrize("shared", [1, 2, 4, 8])
@pytest.mark.parametrize("degree", range(2, 17))
def test_the_ring_pays_what_its_busiest_rank_moves(degree: int, shared: int) -> None:
    """Keys and values of a width of 2, queries `shared` times as wide as keys alone."""
    cost = replace(SIMPLE, ring_bytes=6.0, query_bytes=shared)
    assert cost.trip_bytes() == (2.0, shared)
    assert cost.ring_traffic(degree, "balanced") == busiest_link(degree, 2.0, shared)


def test_the_ring_is_the_fastest_where_keys_are_as_wide_as_queries_and_links_slow() -> None:
    """One head, so that Ulysses has no one to share with; a ring moves 24 tensors' worth a token,
    balanced 16."""
    cost = replace(
        SIMPLE, attention_s=0.2, ring_bytes=6.0, query_bytes=1.0, all_to_all_bytes=8.0, heads=1
    )
    seconds = {
        name: cost.sequence_ns(90, 5, name, False) / 1e9
        for name in ("ulysses", "zigzag", "balanced")
    }
    assert min(seconds, key=seconds.__getitem__) == "balanced"
    assert seconds["zigzag"] - seconds["balanced"] == 24 * 18 - 0.2 * 90 * 18


def test_seconds_count_the_idle_time_of_even_degrees() -> None:
    cost = replace(SIMPLE, attention_s=1.0, linear_s=1e-9, ring_bytes=0.0)
    assert [cost.sequence_ns(12, d, "balanced", False) / 1e9 for d in (2, 3, 4)] == pytest.approx(
        [144 / 2 * 3 / 2, 144 / 3, 144 / 4 * 5 / 4], rel=1e-6
    )
