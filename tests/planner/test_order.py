"""Quiet micro-batches last, unless the cost model says that it would be slower."""

import random
from collections import Counter

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.order import best_order
from plans import random_plan
from tests.budget import for_seeds

COST, LLAMA, PAIR = (
    PRESETS["flexsp-gpt-7b-a100"],
    PRESETS["llama-3.1-8b-h200"],
    Topology(nodes=1, ranks_per_node=2),
)
LENGTHS = (8000, 3000, 900, 4000, 4000, 500)


def micro_batch(shared: tuple[int, ...], *own: tuple[int, ...]) -> MicroBatch:
    """Sequences of both ranks, and of each of them alone."""
    wide = [Group(ranks=(0, 1), sequences=shared, strategy="ulysses")] if shared else []
    alone = [
        Group(ranks=(r,), sequences=ids, strategy="local") for r, ids in enumerate(own) if ids
    ]
    return MicroBatch(groups=(*wide, *alone))


WHOLE, MIXED = micro_batch((0,)), micro_batch((1,), (2,))
LOCAL, SMALL = micro_batch((), (3,), (4,)), micro_batch((), (), (5,))


@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_what_communicates_most_comes_first(sync: str) -> None:
    given = (LOCAL, MIXED, SMALL, WHOLE)
    assert best_order(given, LENGTHS, PAIR, COST, sync=sync)[1] == (WHOLE, MIXED, SMALL, LOCAL)


def test_free_ranks_wait_less_when_what_they_do_alone_comes_last() -> None:
    """3,000 tokens more on rank 0, then as many on rank 1: between shared sequences each has to
    wait."""
    lengths = (8000, 3000, 8000, 3000)
    whole, first, second = (micro_batch((0,)), micro_batch((), (1,)), micro_batch((), (), (3,)))
    given = (first, whole, second, micro_batch((2,)))
    _, made = best_order(given, lengths, PAIR, COST, sync="free")
    assert made == (whole, micro_batch((2,)), first, second)
    assert step_ns(COST, made, lengths, PAIR, sync="free") < step_ns(
        COST, given, lengths, PAIR, sync="free"
    )


@for_seeds(40)
def test_nothing_is_lost_and_no_step_gets_longer(seed: int) -> None:
    rng = random.Random(seed)
    nodes, lengths = (
        rng.choice((1, 2)),
        [rng.randint(1, 60_000) for _ in range(rng.randint(1, 12))],
    )
    plan = random_plan(lengths, 4, rng, micro_batches=5, nodes=nodes)
    topology = Topology(nodes=nodes, ranks_per_node=4 // nodes)
    for sync in ("lockstep", "free"):
        nanoseconds, made = best_order(
            plan.micro_batches, plan.lengths, topology, LLAMA, sync=sync
        )
        assert Counter(made) == Counter(plan.micro_batches)
        times = [
            step_ns(LLAMA, order, plan.lengths, topology, sync=sync)
            for order in (made, plan.micro_batches)
        ]
        assert nanoseconds == times[0] <= times[1]
