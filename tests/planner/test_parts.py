"""The stages of the default planner against slow, obvious twins."""

import random

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner.problem import Problem, make_problem
from hf_flexseq.planner.search.fill import fill_short
from hf_flexseq.planner.search.place import place_long
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.targets import starting_candidates
from hf_flexseq.planner.task import PlanTask
from tests.planner.brute import counted, placed_one_by_one, poured_one_by_one
from tests.plans import planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]


def topology(shape: tuple[int, int]) -> Topology:
    return Topology(nodes=shape[0], ranks_per_node=shape[1])


def problem(shape: tuple[int, int], *, count: int = 80, cap: int = 40_000) -> Problem:
    rng = random.Random(count)
    lengths = [int(rng.lognormvariate(7.5, 1.3)) + 1 for _ in range(count)]
    task = PlanTask(lengths=tuple(lengths), topology=topology(shape), cost=FLEXSP, cap=cap)
    return make_problem(task)


def started(asked: Problem, batches: int):
    """The starting candidates, and where their long sequences are."""
    candidates = starting_candidates(asked, batches)
    return candidates, place_long(asked, candidates)


def filled(asked: Problem, batches: int):
    """Yield (candidate, its placement, filled) of the starting candidates."""
    candidates, placed = started(asked, batches)
    for c in range(len(candidates.targets)):
        found = fill_short(asked, placed, c)
        assert found is not None
        yield c, placed, found


@pytest.mark.parametrize(
    "shape, cap", [((1, 4), 40_000), ((2, 4), 40_000), ((2, 2), 40_000), ((1, 12), 5_000)]
)
def test_placing_all_candidates_at_once_is_placing_them_one_by_one(shape, cap):
    asked = problem(shape, count=25, cap=cap)
    candidates, placed = started(asked, 2)
    for c in range(0, len(candidates.targets), 3):
        spots = list(zip(placed.row2batch[c], placed.row2block[c], strict=True))
        slowly = placed_one_by_one(asked, candidates, c)
        assert placed.fits[c] == (slowly is not None)
        if slowly is not None:
            assert spots == slowly
            load = np.zeros((2, asked.world), dtype=np.int64)  # [micro_batches, ranks]
            for row, (m, b) in enumerate(spots):
                ranks = slice(asked.blocks.start[b], asked.blocks.stop[b])
                load[m, ranks] += asked.times[row, asked.blocks.shape_of[b]]
            assert (placed.load[c] == load).all()


def test_filling_and_repair_agree_with_a_fresh_count_and_never_worsen():
    asked = problem((4, 8), count=300, cap=12_000)
    for *_, before in filled(asked, asked.fewest_micro_batches):
        better = repair(asked, before)
        for one in (before, better):
            rows = one.row2block.tolist(), one.row2batch.tolist()
            fresh = counted(asked, *rows, len(one.load))
            assert one.objective == fresh.objective
            assert (one.load == fresh.load).all()
            assert (one.tokens == fresh.tokens).all()
            assert one.tokens.max() <= asked.cap
        assert better.objective < before.objective


@pytest.mark.parametrize("cap", [12_000, 20_000])
def test_pouring_agrees_with_looking_at_every_rank(cap):
    """Each short sequence goes to the rank with most left."""
    asked = problem((4, 8), count=300, cap=cap)
    poured = 0
    for c, placed, found in filled(asked, asked.fewest_micro_batches):
        long_rows = placed.row2block.shape[1]
        slack = placed.targets[c][:, None] - placed.load[c]
        memory = asked.cap - placed.tokens[c]
        slowly = poured_one_by_one(asked, slack.tolist(), memory.tolist(), long_rows)
        if slowly is not None:
            batches = found.row2batch[long_rows:].tolist()
            blocks = found.row2block[long_rows:].tolist()
            assert list(zip(batches, blocks, strict=True)) == slowly
            poured += 1
    assert poured


# ---- the worked example of planner/search/__init__.py


def test_the_worked_example_is_what_the_search_does():
    lengths = [9000, 3000, 2500, 2000, 1500, 1200, 1000, 800, 600, 500, 400, 300]
    ranks = topology((1, 4))
    task = PlanTask(lengths=tuple(lengths), topology=ranks, cost=FLEXSP, cap=3500)
    asked = make_problem(task)

    def ms(nanoseconds: list[int]) -> list[int]:
        return [round(one / 1e6) for one in nanoseconds]

    # 1. problem
    assert asked.fewest_micro_batches == 2
    assert ms([asked.constant, int(asked.least_area.sum()) // 4]) == [629, 1228]
    one_rank = [598, 492, 388, 287, 228, 189, 150, 112, 93, 74, 56]
    four_ranks = [561, 164, 135, 107, 79, 63, 52, 41, 31, 26, 21, 15]
    assert ms(asked.times[1:, 0]) == one_rank
    assert ms(asked.times[:, -1]) == four_ranks
    # 2. targets
    candidates, placed = started(asked, 2)
    assert len(candidates.targets) == 257
    assert (candidates.forced_shapes >= 0).sum(axis=0).tolist() == [243] * 6
    assert ms(candidates.targets[0]) == [760, 591]
    first = candidates.targets[243:, 0]
    assert ms([first.min(), first.max()]) == [578, 792]
    # 3. place
    busy = placed.load.max(axis=2).sum(axis=1) + 2 * asked.constant
    best = np.argsort(busy, kind="stable")[:2].tolist()
    assert candidates.long_rows == 12
    assert ms(busy[best]) == [2509, 2511]
    assert [ms(candidates.targets[c]) for c in best] == [[594, 671], [622, 655]]
    # 4. fill and repair
    found = fill_short(asked, placed, best[0])
    assert ms([found.objective]) == [2509]
    assert ms(found.load.max(axis=1)) == [598, 652]
    repaired = repair(asked, found)
    # The whole search, and 5. one degree
    cap = {"max_tokens_per_rank": 3500}
    plan = planned(lengths, ranks, FLEXSP, **cap)
    one_degree = planned(lengths, ranks, FLEXSP, planner="static", sp_degree=4, **cap)
    assert plan.objective_s == repaired.objective / 1e9
    assert repaired.objective == found.objective
    assert (round(plan.lower_bound_s, 3), round(one_degree.objective_s, 3)) == (2.487, 2.553)
    assert [[(g.ranks, g.sequences) for g in mb.groups] for mb in plan.micro_batches] == [
        [((0, 1, 2, 3), (0,)), ((0, 1), (7,)), ((2, 3), (8, 11))],
        [((0,), (1,)), ((1,), (2, 9)), ((2,), (3, 6)), ((3,), (4, 5, 10))],
    ]
