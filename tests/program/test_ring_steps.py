"""The work of a ring's steps on all ranks: evenly shared, and half of a rank's own work last in
the backward. That the steps compute causal attention is shown by `tests/attention`."""

import itertools

import pytest

from hf_flexseq.plan import attention_schedule as attention
from hf_flexseq.plan.shard import cuts
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    ZoneLayout,
    backward_order,
    make_ring_steps,
)
from hf_flexseq.program.tables import Tables

FIRST = 10  # the first rank of the group

both_rings = pytest.mark.parametrize("strategy", ["zigzag", "balanced"])


@pytest.fixture(params=[1, 1024], ids=["chunk by chunk", "together"], autouse=True)
def large(request, monkeypatch):
    """Whether the chunks of these short sequences travel one by one."""
    monkeypatch.setitem(attention.LARGE, "cuda", request.param)


def steps_of(strategy, lengths, degree):
    """Tables of each rank, and its steps."""
    group_cuts = cuts(strategy, lengths, degree)
    by_rank = []
    for i in range(degree):
        tables = Tables()
        ranks = range(FIRST, FIRST + degree)
        layout = ZoneLayout(group_cuts, strategy, i, ranks, tables)
        by_rank.append((tables, make_ring_steps(layout)))
    return by_rank


@both_rings
def test_sequences_that_are_too_short_for_a_chunk_are_left_out(strategy):
    for degree, lengths in itertools.product((2, 3, 8), ((1,), (2, 1), (40, 3, 29), (1,) * 12)):
        for tables, steps in steps_of(strategy, lengths, degree):
            for step in steps:
                calls = [] if step.call is None else [tables.calls[step.call]]
                counts = [n for call in calls for n in (*call.q_lens, *call.k_lens)]
                counts += [one.rows.tokens for one in (*step.sent_queries, *step.sent_keys)]
                assert all(counts)


@both_rings
def test_the_backward_ends_with_half_of_what_a_rank_does_alone(strategy):
    for tables, steps in steps_of(strategy, (4096, 1024), 4):
        (own,) = (step for step in steps if step.time == DIAGONAL_TIME)
        first, *others, last = backward_order(steps, tables)
        assert first.time == last.time == DIAGONAL_TIME
        assert [step.time == DIAGONAL_TIME for step in others] == [False] * (len(steps) - 1)
        assert squares(tables, first) == squares(tables, last) == squares(tables, own) / 2


def squares(tables, step):
    """Query-key pairs of a step's call, half of them where it is causal."""
    if step.call is None:
        return 0
    call = tables.calls[step.call]
    pairs = sum(q * k for q, k in zip(call.q_lens, call.k_lens, strict=True))
    return pairs / 2 if call.causal else pairs


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_sequences_that_lie_both_ways_round_fill_the_idle_half_block_of_even_degrees(degree):
    chunk = 10
    one, two = (steps_of("balanced", (chunk * degree,) * count, degree) for count in (1, 2))
    work = [sum(squares(t, step) for step in steps) / chunk**2 for t, steps in one]
    assert (max(work), min(work)) == (degree / 2 + 0.5, degree / 2 - 0.5)
    work = {sum(squares(t, step) for step in steps) / chunk**2 for t, steps in two}
    assert work == {float(degree)}
