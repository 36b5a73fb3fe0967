"""Block schedules as data: each covers the causal triangle exactly once, and everyone is served."""

import pytest

from hf_flexseq.schedule.attention import zigzag
from hf_flexseq.shard import zigzag_chunks

DEGREES = [1, 2, 3, 4, 5, 6, 7, 8, 16]


def blocks(degree):
    """(query chunk, key chunk, causal) of all steps of all ranks; a causal step is the triangle of its chunks."""
    for index in range(degree):
        for step in zigzag(index, degree):
            for place, q in enumerate(step.queries):
                for k in step.keys[: place + 1] if step.causal else step.keys:
                    yield q, k, q == k


@pytest.mark.parametrize("degree", DEGREES)
def test_the_lower_triangle_is_covered_once(degree):
    chunks = 2 * degree
    assert sorted(blocks(degree)) == [(q, k, q == k) for q in range(chunks) for k in range(q + 1)]


@pytest.mark.parametrize("degree", DEGREES)
def test_every_step_is_half_a_square_for_every_rank(degree):
    for index in range(degree):
        first, *others = zigzag(index, degree)
        assert (first.source, first.causal) == (index, True)
        assert all(len(step.queries) * len(step.keys) == 2 for step in others)


@pytest.mark.parametrize("degree", DEGREES)
def test_at_every_time_each_rank_lends_to_one_other(degree):
    for t in range(degree):
        steps = [zigzag(index, degree)[t] for index in range(degree)]
        assert sorted(step.source for step in steps) == list(range(degree))
        assert all(set(step.keys) <= set(zigzag_chunks(step.source, degree)) for step in steps)


def test_a_step_reads_as_text():
    assert [str(step) for step in zigzag(0, 2)] == ["q0+3 x causal kv0+3 of 0", "q3 x kv1+2 of 1"]
