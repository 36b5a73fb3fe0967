"""Steps of all ranks together, without processes: what one sends the other expects, and rows are
the ones meant."""

import itertools
import random

import numpy as np
import pytest

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan import attention_schedule as attention
from hf_flexseq.plan.shard import cuts, make_shard
from hf_flexseq.program.builder import Tables
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    JOINED_QUERIES,
    backward_order,
    make_ring_steps,
)

PACKS = [(1,), (2, 1), (17,), (40, 3, 29), tuple(random.Random(0).choices(range(1, 9), k=12))]


@pytest.fixture(params=[1, 1024], ids=["chunk by chunk", "together"], autouse=True)
def large(request, monkeypatch):
    """Whether the chunks of these short sequences travel one by one."""
    monkeypatch.setitem(attention.LARGE, "cuda", request.param)


def turns_of(strategy, lengths, degree, *, worthy_pairs=1):
    """Tables of each rank, and its steps."""
    group_cuts = cuts(strategy, lengths, degree)
    by_rank = []
    for i in range(degree):
        tables = Tables()
        steps = make_ring_steps(
            strategy, group_cuts, i, range(10, 10 + degree), tables, worthy_pairs=worthy_pairs
        )
        by_rank.append((tables, steps))
    return by_rank


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("degree", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("worthy_pairs", [1, 30, 10**9])
def test_every_send_has_its_receive(strategy, degree, lengths, worthy_pairs):
    by_rank = [
        steps for _, steps in turns_of(strategy, lengths, degree, worthy_pairs=worthy_pairs)
    ]
    assert len({len(steps) for steps in by_rank}) == 1
    for together in zip(*by_rank, strict=True):
        for sent, read in (("sent_queries", "queries"), ("sent_keys", "keys")):
            sends = [
                (10 + i, share.peer, share.rows.tokens)
                for i, step in enumerate(together)
                for share in getattr(step, sent)
            ]
            receives = [
                (share.peer, 10 + i, share.rows.tokens)
                for i, step in enumerate(together)
                for share in [getattr(one, read) for one in step.reads]
                if share.peer is not None
            ]
            assert sorted(sends) == sorted(receives)
            assert all(tokens for *_, tokens in sends)


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("degree", [2, 3, 4, 7])
@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("worthy_pairs", [1, 30, 10**9])
def test_every_query_reads_every_earlier_key_of_its_sequence_once(
    strategy, degree, lengths, worthy_pairs
):
    """The executor on token names instead of tensors, forward and backward."""
    group = Group(
        ranks=tuple(range(10, 10 + degree)),
        sequences=tuple(range(len(lengths))),
        strategy=strategy,
    )
    names = []
    for i in range(degree):
        slices = make_shard(MicroBatch(groups=(group,)), lengths, 10 + i).slices
        own = [(s.sequence, t) for s in slices for t in range(s.start, s.stop)]
        names.append(np.array(own, dtype=np.int64).reshape(-1, 2))
    by_rank = turns_of(strategy, lengths, degree, worthy_pairs=worthy_pairs)
    backwards = [(tables, backward_order(steps, tables)) for tables, steps in by_rank]
    wanted = [(s, a, s, b) for s, n in enumerate(lengths) for a in range(n) for b in range(a + 1)]
    for ordered in (by_rank, backwards):
        assert sorted(pairs_read(ordered, names)) == wanted


def pairs_read(by_rank, names):
    """(sequence, query, sequence, key) of every pair that a call of any rank computes."""
    read = []
    tables = [tables for tables, _ in by_rank]
    for t, together in enumerate(zip(*(steps for _, steps in by_rank), strict=True)):
        sent: dict = {}
        for i, step in enumerate(together):
            for what, shares in (("q", step.sent_queries), ("k", step.sent_keys)):
                for share in shares:
                    rows = names[i][tables[i].positions(share.rows)]
                    sent.setdefault((10 + i, share.peer, what), []).append(rows)
        for i, step in enumerate(together):
            if step.call is None:
                continue
            call = tables[i].calls[step.call]

            def taken(side, what, i=i, sent=sent):
                if side.peer is None:
                    return names[i][tables[i].positions(side.rows)]
                return sent[side.peer, 10 + i, what].pop(0)

            q = np.concatenate([taken(one.queries, "q") for one in step.reads])
            k = np.concatenate([taken(one.keys, "k") for one in step.reads])
            assert (len(q), len(k)) == (sum(call.q_lens), sum(call.k_lens)), t
            for rows, keys in blocks(call):
                read += [
                    (*a, *b)
                    for (n, a), (m, b) in itertools.product(
                        enumerate(q[rows].tolist()), enumerate(k[keys].tolist())
                    )
                    if m <= n or not call.causal
                ]
        assert not any(sent.values()), "something is sent that nobody reads"
    return read


def blocks(call):
    """Rows of the queries and of the keys of every sequence of a call."""
    q = k = 0
    for q_len, k_len in zip(call.q_lens, call.k_lens, strict=True):
        yield slice(q, q + q_len), slice(k, k + k_len)
        q += q_len
        k += k_len


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
def test_the_backward_ends_with_half_of_what_a_rank_does_alone(strategy):
    for tables, steps in turns_of(strategy, (4096, 1024), 4):
        (own,) = (step for step in steps if step.time == DIAGONAL_TIME)
        ordered = backward_order(steps, tables)
        assert [step.time == DIAGONAL_TIME for step in ordered] == [
            True,
            *[False] * (len(steps) - 1),
            True,
        ]
        assert squares(tables, ordered[0]) == squares(tables, ordered[-1])
        assert squares(tables, ordered[0]) == squares(tables, own) / 2


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
    one, two = (turns_of("balanced", (chunk * degree,) * count, degree) for count in (1, 2))
    work = [sum(squares(t, step) for step in steps) / chunk**2 for t, steps in one]
    assert (max(work), min(work)) == (degree / 2 + 0.5, degree / 2 - 0.5)
    work = {sum(squares(t, step) for step in steps) / chunk**2 for t, steps in two}
    assert work == {float(degree)}


def test_short_steps_are_joined_and_long_ones_are_not():
    lengths = (8 * 64,)  # chunks of 32 tokens: 64 queries and 2,048 pairs a step
    counts = []
    for worthy_pairs in (2048, 4096, 3 * 2048, 10**9):
        ((_, steps), *_) = turns_of("zigzag", lengths, 8, worthy_pairs=worthy_pairs)
        counts.append(len(steps))
    times = counts[0] - 1  # of the schedule, beside the diagonal
    joined = [1, 2, 3, JOINED_QUERIES // 64]
    assert counts == [1 + -(-times // together) for together in joined]
