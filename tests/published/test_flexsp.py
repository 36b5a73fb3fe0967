"""FlexSP's parts against exhaustive search; tests/planner/test_legal.py checks its plans."""

import random
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.planner.task import PlanTask
from hf_flexseq.published.aligned_groups import aligned_degrees, fit_together, rank_ranges
from hf_flexseq.published.flexsp.buckets import bucketed
from hf_flexseq.published.flexsp.milp import GroupingTask, slowest_ns, solve
from hf_flexseq.published.flexsp.planner import FlexSP
from tests.budget import for_seeds
from tests.plans import planned

MODEL = replace(PRESETS["flexsp-gpt-7b-a100"], micro_batch_s=0.05)
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 6), (2, 2), (2, 6), (3, 4), (6, 8), (8, 8), (2, 7)]


def topology(shape: tuple[int, int]) -> Topology:
    return Topology(nodes=shape[0], ranks_per_node=shape[1])


def flexsp(lengths: list[int], where: Topology, cap: int) -> FlexSP:
    return FlexSP(PlanTask(lengths=tuple(lengths), topology=where, cost=MODEL, cap=cap))


@for_seeds(200)
def test_groups_stand_side_by_side_on_legal_ranks(seed):
    rng = random.Random(seed)
    where = topology(rng.choice(SHAPES))
    degrees = aligned_degrees(where)
    for _ in range(5):
        chosen: list[int] = []
        while fit_together([*chosen, degree := rng.choice(degrees)], where):
            chosen.append(degree)
        ranges = rank_ranges(chosen, where)
        assert [len(ranks) for ranks in ranges] == chosen
        assert all(where.allows(ranks.start, ranks.stop) for ranks in ranges)
        used = [rank for ranks in ranges for rank in ranks]
        assert len(used) == len(set(used))


# ---- the program


def best_chosen(task: GroupingTask, where: Topology) -> int:
    """Return the nanoseconds of the program's best solution.

    By trying every set of degrees and every assignment of sequences to groups.
    """
    buckets = [q for q, count in enumerate(task.counts.tolist()) for _ in range(count)]
    best = 2**62
    for size in range(1, where.world_size + 1):
        for columns in combinations_with_replacement(range(len(task.degrees)), size):
            if not fit_together([task.degrees[c] for c in columns], where):
                continue
            rooms = [task.cap * task.degrees[c] for c in columns]
            for groups in product(range(size), repeat=len(buckets)):
                tokens = [0] * size
                nanoseconds = [0] * size
                for q, p in zip(buckets, groups, strict=True):
                    tokens[p] += int(task.tokens[q])
                    nanoseconds[p] += int(task.times[q, columns[p]])
                if all(t <= room for t, room in zip(tokens, rooms, strict=True)):
                    best = min(best, max(nanoseconds))
    return best


@for_seeds(12)
def test_the_program_s_optimum_is_found(seed):
    rng = random.Random(seed)
    where = topology(rng.choice([(1, 2), (1, 3), (1, 4), (2, 2)]))
    world = where.world_size
    lengths = [int(2 ** rng.uniform(9, 15)) for _ in range(rng.randint(2, 6 if world < 4 else 5))]
    cap = int(
        max(max(lengths) / world + 1, sum(lengths) / world * rng.choice([1.0, 1.2, 2.0]) + 1)
    )
    planner = flexsp(lengths, where, cap)
    task = planner._task(bucketed(range(len(lengths)), lengths, cap * world))
    start = planner._one_degree(task, len(task.degrees) - 1)
    assert start is not None
    found = solve(task, start, gap=0.0, nodes=10_000)
    assert slowest_ns(task, found) == pytest.approx(best_chosen(task, where), rel=1e-5)
    degrees = [task.degrees[column] for column, _ in found]
    members = np.array([members for _, members in found])
    assert fit_together(degrees, where)
    assert (members.sum(axis=0) == task.counts).all()
    assert (members @ task.tokens <= task.cap * np.array(degrees)).all()


# ---- the plans


def test_it_beats_the_best_single_degree():
    rng = random.Random(5)
    lengths = [min(40_000, int(rng.lognormvariate(7, 1.5)) + 1) for _ in range(32)]
    mixed, single = (
        planned(lengths, topology((1, 8)), MODEL, planner=planner, max_tokens_per_rank=9000)
        for planner in ("flexsp", "batch-ada")
    )
    assert len(mixed.degrees()) > 1
    assert mixed.objective_s < single.objective_s


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hf_flexseq.base.registry.find_spec", lambda module: None)
    with pytest.raises(ValueError, match=r'needs highspy.*"hf_flexseq\[planner\]"'):
        planned([4], topology((1, 2)), MODEL, planner="flexsp")


def test_groups_that_cannot_beat_the_known_solution_hold_nothing():
    """A group's own seconds alone may exceed it, on processors for example."""
    where = topology((1, 4))
    sizes = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16}
    shape = ModelShape(**sizes, intermediate=128, vocab=256, params=180_000)
    cost = analytic_cost_model(shape, DEVICES["CPU"], where)
    plan = planned([30, 20, 12, 9], where, cost, planner="flexsp")
    assert plan.objective_s > 0
