"""Steps of all ranks together, without processes: what one sends the other expects, and rows are
the ones meant."""

import itertools
import random

import numpy as np
import pytest

from hf_flexseq.plan import attention_schedule as attention
from hf_flexseq.plan.shard import cuts, make_shard
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    ZoneLayout,
    backward_order,
    make_ring_steps,
)
from hf_flexseq.program.tables import Tables
from tests.plans import one_group

PACKS = [(1,), (2, 1), (17,), (40, 3, 29), tuple(random.Random(0).choices(range(1, 9), k=12))]
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
def test_every_send_has_its_receive_and_every_query_reads_each_earlier_key_once(strategy):
    """The executor on token names instead of tensors, forward and backward."""
    for degree, lengths in itertools.product((2, 3, 4, 5, 7, 8, 16), PACKS):
        by_rank = steps_of(strategy, lengths, degree)
        assert len({len(steps) for _, steps in by_rank}) == 1
        group = one_group(range(FIRST, FIRST + degree), len(lengths), strategy)
        names = []
        for i in range(degree):
            slices = make_shard(group, lengths, FIRST + i).slices
            own = [(s.sequence, t) for s in slices for t in range(s.start, s.stop)]
            names.append(np.array(own, dtype=np.int64).reshape(-1, 2))
        backwards = [(tables, backward_order(steps, tables)) for tables, steps in by_rank]
        wanted = [
            (s, a, s, b) for s, n in enumerate(lengths) for a in range(n) for b in range(a + 1)
        ]
        for ordered in (by_rank, backwards):
            assert sorted(pairs_read(ordered, names)) == wanted


def pairs_read(by_rank, names):
    """(sequence, query, sequence, key) of every pair that a call of any rank computes."""
    read = []
    tables = [tables for tables, _ in by_rank]
    for together in zip(*(steps for _, steps in by_rank), strict=True):
        sent: dict = {}
        for i, step in enumerate(together):
            for what, shares in (("q", step.sent_queries), ("k", step.sent_keys)):
                for share in shares:
                    assert share.rows.tokens, "an empty message"
                    rows = names[i][tables[i].positions(share.rows)]
                    sent.setdefault((FIRST + i, share.peer, what), []).append(rows)

        def taken(side, what, i, sent=sent):
            if side.peer == FIRST + i:
                return names[i][tables[i].positions(side.rows)]
            rows = sent[side.peer, FIRST + i, what].pop(0)
            assert len(rows) == side.rows.tokens
            return rows

        for i, step in enumerate(together):
            if step.call is None:
                continue
            call = tables[i].calls[step.call]
            q, k = taken(step.read.queries, "q", i), taken(step.read.keys, "k", i)
            assert (len(q), len(k)) == (sum(call.q_lens), sum(call.k_lens))
            for rows, keys in blocks(call):
                pairs = itertools.product(enumerate(q[rows].tolist()), enumerate(k[keys].tolist()))
                read += [(*a, *b) for (n, a), (m, b) in pairs if m <= n or not call.causal]
        assert not any(sent.values()), "something is sent that nobody reads"
    return read


def blocks(call):
    """Rows of the queries and of the keys of every sequence of a call."""
    q = k = 0
    for q_len, k_len in zip(call.q_lens, call.k_lens, strict=True):
        yield slice(q, q + q_len), slice(k, k + k_len)
        q += q_len
        k += k_len


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
