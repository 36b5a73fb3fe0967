"""Quiet micro-batches last, unless the cost model says that it would be slower."""

import random
from collections import Counter

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.order import best_order
from tests.budget import for_seeds
from tests.plans import group, random_plan

COST = PRESETS["flexsp-gpt-7b-a100"]
LLAMA = PRESETS["llama-3.1-8b-h200"]
PAIR = Topology(nodes=1, ranks_per_node=2)


def micro_batch(*, shared: int | None = None, first: int | None = None, second: int | None = None):
    """A sequence of both ranks, and of each of them alone."""
    places = (((0, 2), shared), ((0, 1), first), ((1, 2), second))
    return MicroBatch(groups=tuple(group(*ranks, one) for ranks, one in places if one is not None))


@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_what_communicates_most_comes_first(sync):
    lengths = (8000, 3000, 900, 4000, 4000, 500)
    whole, mixed = micro_batch(shared=0), micro_batch(shared=1, first=2)
    local, small = micro_batch(first=3, second=4), micro_batch(second=5)
    _, made = best_order((local, mixed, small, whole), lengths, PAIR, COST, sync=sync)
    assert made == (whole, mixed, small, local)


def test_free_ranks_wait_less_when_what_they_do_alone_comes_last():
    """3,000 tokens more on rank 0, then as many on rank 1: between shared sequences each has to
    wait."""
    lengths = (8000, 3000, 8000, 3000)
    whole, other = micro_batch(shared=0), micro_batch(shared=2)
    first, second = micro_batch(first=1), micro_batch(second=3)
    given = (first, whole, second, other)
    nanoseconds, made = best_order(given, lengths, PAIR, COST, sync="free")
    assert made == (whole, other, first, second)
    assert nanoseconds < step_ns(COST, given, lengths, PAIR, sync="free")


@for_seeds(30)
def test_nothing_is_lost_and_no_step_gets_longer(seed):
    rng = random.Random(seed)
    nodes = rng.choice((1, 2))
    lengths = [rng.randint(1, 60_000) for _ in range(rng.randint(1, 12))]
    given = random_plan(lengths, 4, rng, micro_batches=5, nodes=nodes).micro_batches
    topology = Topology(nodes=nodes, ranks_per_node=4 // nodes)
    for sync in ("lockstep", "free"):
        nanoseconds, made = best_order(given, lengths, topology, LLAMA, sync=sync)
        assert Counter(made) == Counter(given)
        before, after = (
            step_ns(LLAMA, order, lengths, topology, sync=sync) for order in (given, made)
        )
        assert nanoseconds == after <= before
