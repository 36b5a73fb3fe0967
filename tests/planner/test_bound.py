"""The tighter bound: below every plan, and at least the closed form."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.bound import bounds_ns
from hf_flexseq.topology import Topology
from planner.brute import best_lockstep_ns

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
SMALL = [Topology(nodes=n, ranks_per_node=r) for n, r in ((1, 2), (1, 3), (1, 4), (2, 2))]


def bounds(lengths, topology, cost, cap):
    """(the closed form, the tighter bound)"""
    return bounds_ns(np.array(lengths), topology, cost, strategy="auto", cap=cap, sync="lockstep")


def random_case(rng, topologies):
    """(lengths, topology, cost, cap) of a step: some long sequences, memory plenty or tight."""
    topology = rng.choice(topologies)
    world = topology.world_size
    cost = replace(
        FLEXSP,
        micro_batch_s=rng.choice([0.0, 0.05]),
        group_s=rng.choice([0.0, 0.01]),
        linear_s=FLEXSP.linear_s * rng.choice([0.01, 1.0, 20.0]),
        all_to_all_bytes=FLEXSP.all_to_all_bytes * rng.choice([1.0, 10.0, 40.0]),
    )
    lengths = [int(2 ** rng.uniform(8, 17)) for _ in range(rng.randint(1, 4 if world < 4 else 3))]
    fill = rng.choice([0.3, 0.6, 0.9, 1.8])
    cap = int(max(max(lengths) / world + 1, sum(lengths) / world / fill))
    return lengths, topology, cost, cap


def test_no_plan_beats_it():
    rng = random.Random(0)
    tighter_than_closed = 0
    for _ in range(50):
        lengths, topology, cost, cap = random_case(rng, SMALL)
        closed, tighter = bounds(lengths, topology, cost, cap)
        exact = best_lockstep_ns(lengths, topology, cost, cap=cap, batches=2)
        assert closed <= tighter <= exact
        tighter_than_closed += tighter > 1.1 * closed
    assert tighter_than_closed > 5


@pytest.mark.parametrize("planner", ["auto", "zeppelin"])
def test_no_plan_of_many_ranks_beats_it(planner):
    rng = random.Random(1)
    topologies = [*SMALL, Topology(nodes=2, ranks_per_node=4), Topology(nodes=4, ranks_per_node=2)]
    for _ in range(60):
        lengths, topology, cost, cap = random_case(rng, topologies)
        plan = make_plan(lengths, topology, cost, planner=planner, max_tokens_per_rank=cap)
        closed, tighter = bounds(lengths, topology, cost, cap)
        assert closed <= tighter
        assert tighter / 1e9 <= plan.objective_s


def test_a_long_sequence_has_to_end_with_its_micro_batch():
    """On the rank that it is cheapest on, it would take longer than everything together."""
    node = Topology(nodes=1, ranks_per_node=8)
    cost = replace(FLEXSP, micro_batch_s=0.0)
    closed, tighter = bounds([200_000], node, cost, 200_000)
    plan = make_plan([200_000], node, cost, max_tokens_per_rank=200_000)
    assert cost.sequence_ns(200_000, 1, "local", False) == 8 * closed
    assert 1.01 * closed < tighter <= plan.objective_s * 1e9
    (note,) = [note for note in plan.notes if note.startswith("no plan takes less than")]
    assert f"{tighter / 1e9:.4g} s" in note


def test_it_is_the_closed_form_where_no_sequence_is_long():
    node = Topology(nodes=1, ranks_per_node=2)
    closed, tighter = bounds([1000] * 8, node, FLEXSP, 4000)
    assert closed == tighter
    plan = make_plan([1000] * 8, node, FLEXSP, max_tokens_per_rank=4000)
    assert not any(note.startswith("no plan takes less than") for note in plan.notes)


def test_other_micro_batches_take_some_of_the_step():
    """Two micro-batches at least: the long sequence has what the other one leaves."""
    node, lengths = Topology(nodes=1, ranks_per_node=4), [24_000] + [6000] * 8
    few, more = (bounds(lengths, node, FLEXSP, cap)[1] for cap in (24_000, 12_000))
    assert few < more
