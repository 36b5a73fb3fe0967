"""The stages of the default planner against slow, obvious twins."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.blocks import ALL_RANGES, blocks_of
from hf_flexseq.planner.problem import NEVER, Problem, make_problem, micro_batches_of
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import completed, fill_short, water_levels
from hf_flexseq.planner.search.place import TIME, TOKENS, place_long, tick_bits
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.targets import starting_candidates
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.planner.task import PlanTask
from planner.brute import least_rise_by_search, placed_one_by_one, poured_one_by_one
from tests.budget import for_seeds

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
SHAPES = [(1, 1), (1, 5), (1, 8), (2, 4), (3, 2), (1, 9), (1, 12), (2, 6), (3, 5), (4, 8)]


def topology(shape: tuple[int, int]) -> Topology:
    return Topology(nodes=shape[0], ranks_per_node=shape[1])


def problem(shape: tuple[int, int], sync: str, *, count: int = 80, cap: int = 40_000) -> Problem:
    rng = random.Random(count)
    lengths = [int(rng.lognormvariate(7.5, 1.3)) + 1 for _ in range(count)]
    return make_problem(lengths, topology(shape), FLEXSP, strategy="auto", cap=cap, sync=sync)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_and_their_relations(shape: tuple[int, int]) -> None:
    where = topology(shape)
    blocks = blocks_of(where)
    ranges = list(zip(blocks.start.tolist(), blocks.stop.tolist(), strict=True))
    assert ranges[: where.world_size] == [(rank, rank + 1) for rank in range(where.world_size)]
    assert ranges[-1] == (0, where.world_size)
    assert all(where.allows(*block) for block in ranges)
    assert blocks.overlap == (
        (where.world_size in range(3, ALL_RANGES + 1) and where.ranks_per_node > 2)
        or shape == (3, 2)
    )
    for i, (a, b) in enumerate(ranges):
        assert blocks.shapes[blocks.shape_of[i]] == (b - a, where.spans_nodes(a, b))
        stop = blocks.first[i + 1] if i + 1 < len(ranges) else None
        assert blocks.ranks[blocks.first[i] : stop].tolist() == list(range(a, b))
        for j, (c, d) in enumerate(ranges):
            one = set(range(a, b))
            other = set(range(c, d))
            nested = one <= other or other <= one
            assert blocks.inside[i, j] == (other <= one)
            assert blocks.around[i, j] == (other > one)
            assert blocks.crossing[i, j] == (bool(one & other) and not nested)


@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("shape", [(1, 12), (2, 6), (4, 8)])
def test_objectives_are_the_cost_model_s(shape: tuple[int, int], sync: str) -> None:
    """Any placement on a tree, scored by arrays and by walking through the plan it stands for."""
    asked = problem(shape, sync)
    rng = random.Random(1)
    by_id = sorted(zip(asked.ids.tolist(), asked.lengths.tolist(), strict=True))
    lengths = [length for _, length in by_id]
    for _ in range(5):
        row2block = np.array([rng.randrange(len(asked.blocks.start)) for _ in lengths])
        row2batch = np.array([rng.randrange(3) for _ in lengths])
        plan = micro_batches_of(asked, row2block.tolist(), row2batch.tolist())
        walked = step_ns(FLEXSP, plan, lengths, asked.topology, sync=sync)
        assert completed(asked, row2block, row2batch, 3).objective == walked


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 12), (4, 8)])
def test_placing_keeps_every_block_s_fullest_rank(shape: tuple[int, int]) -> None:
    asked = problem(shape, "lockstep", count=30)
    candidates = starting_candidates(asked, 2)
    placed = place_long(asked, candidates)
    blocks = asked.blocks
    tick = 2 ** tick_bits(asked, candidates)
    for c, rows in enumerate(candidates.long_rows.tolist()):
        load = np.zeros((2, asked.world), dtype=np.int64)  # [micro_batches, ranks]
        for row in range(rows):
            b = placed.row2block[c, row]
            m = placed.row2batch[c, row]
            load[m, blocks.start[b] : blocks.stop[b]] += asked.times[row, blocks.shape_of[b]]
        for m in range(2):
            in_use = placed.block_state[TOKENS, c, m] < NEVER  # not shut off by an overlapping one
            for b in np.flatnonzero(in_use):
                fullest = int(load[m, blocks.start[b] : blocks.stop[b]].max())
                counted = int(placed.block_state[TIME, c, m, b])
                assert abs(counted - fullest) <= tick * (rows + 1)


@pytest.mark.parametrize("cap", [5_000, 40_000])
@pytest.mark.parametrize("shape", [(2, 2), (1, 12), (4, 8)])
def test_placing_all_candidates_at_once_is_placing_them_one_by_one(
    shape: tuple[int, int], cap: int
) -> None:
    asked = problem(shape, "lockstep", count=25, cap=cap)
    candidates = starting_candidates(asked, 2)
    placed = place_long(asked, candidates)
    tick = tick_bits(asked, candidates)
    for c, rows in enumerate(candidates.long_rows.tolist()):
        slowly = placed_one_by_one(asked, candidates, c, tick)
        assert placed.fits[c] == (slowly is not None)
        if slowly is not None:
            batches = placed.row2batch[c, :rows].tolist()
            blocks = placed.row2block[c, :rows].tolist()
            assert list(zip(batches, blocks, strict=True)) == slowly


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_free_ranks_wait_for_each_other(shape: tuple[int, int]) -> None:
    """Clocks after placing row by row: a group begins when its last rank is free, and ends for all
    of them at once."""
    asked = problem(shape, "free", count=30)
    started = starting_candidates(asked, 2)
    candidates = replace(started, targets=started.targets * np.array([9, 10]) // 10)
    placed = place_long(asked, candidates)
    tick = 2 ** tick_bits(asked, candidates)
    blocks = asked.blocks
    for c, rows in enumerate(candidates.long_rows.tolist()):
        clock = np.zeros(asked.world, dtype=np.int64)
        tokens = np.zeros((2, asked.world), dtype=np.int64)  # [micro_batches, ranks]
        for row in range(rows):
            b = placed.row2block[c, row]
            m = placed.row2batch[c, row]
            ranks = slice(blocks.start[b], blocks.stop[b])
            row_shape = blocks.shape_of[b]
            opens = asked.constant if not tokens[m, ranks].any() else 0
            clock[ranks] = clock[ranks].max() + asked.times[row, row_shape] + opens
            tokens[m, ranks] += asked.needs[row, row_shape]
        for m in range(2):
            counted = placed.rank_state(asked.world)[TIME, c, m]
            assert (abs(counted - clock) <= 2 * tick * (rows + 1)).all()


def test_filling_and_repair_agree_with_a_fresh_count_and_never_worsen() -> None:
    asked = problem((4, 8), "lockstep", count=300, cap=12_000)
    candidates = starting_candidates(asked, asked.fewest_micro_batches)
    placed = place_long(asked, candidates)
    rises = water_levels(asked, candidates, placed)
    for c in range(len(rises)):
        long_rows = int(candidates.long_rows[c])
        filled = fill_short(asked, placed, c, long_rows=long_rows, rise=int(rises[c]))
        assert filled is not None
        better = repair(asked, filled)
        fresh = completed(asked, better.row2block, better.row2batch, len(better.load))
        assert better.objective == fresh.objective <= filled.objective
        assert (better.load == fresh.load).all()
        assert (better.tokens == fresh.tokens).all()
        assert better.tokens.max() <= asked.cap


@pytest.mark.parametrize("cap", [12_000, 20_000])
def test_water_levels_and_pouring_agree_with_looking_at_every_rank(cap: int) -> None:
    asked = problem((4, 8), "lockstep", count=300, cap=cap)
    candidates = starting_candidates(asked, asked.fewest_micro_batches)
    placed = place_long(asked, candidates)
    rises = water_levels(asked, candidates, placed)
    alone = asked.times[:, 0]
    longest_bisection = int(alone[alone < NEVER].sum())
    poured = 0
    for c, long_rows in enumerate(candidates.long_rows.tolist()):
        # The level is the least rise, but for the steps of the bisection.
        load, tokens = placed.rank_state(asked.world)[:, c]
        slack = placed.targets[c][:, None] - load
        memory = asked.cap - tokens
        least = least_rise_by_search(asked, slack.tolist(), memory.tolist(), long_rows)
        step = longest_bisection // 2**EFFORT.water_steps + 1
        assert least <= rises[c] <= least + step
        # Each short sequence goes to the rank with most left.
        filled = fill_short(asked, placed, c, long_rows=long_rows, rise=int(rises[c]))
        assert filled is not None
        risen = (slack + rises[c]).tolist()
        slowly = poured_one_by_one(asked, risen, memory.tolist(), long_rows)
        if slowly is not None:
            batches = filled.row2batch[long_rows:].tolist()
            blocks = filled.row2block[long_rows:].tolist()
            assert list(zip(batches, blocks, strict=True)) == slowly
            poured += 1
    assert poured


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_repair_of_free_ranks_stays_within_memory_and_helps(shape: tuple[int, int]) -> None:
    asked = problem(shape, "free", count=150, cap=12_000)
    candidates = starting_candidates(asked, asked.fewest_micro_batches + 1)
    placed = place_long(asked, candidates)
    rises = water_levels(asked, candidates, placed)
    helped = 0
    for c in range(len(rises)):
        long_rows = int(candidates.long_rows[c])
        filled = fill_short(asked, placed, c, long_rows=long_rows, rise=int(rises[c]))
        assert filled is not None
        better = repair(asked, filled)
        assert better.objective <= filled.objective
        assert better.tokens.max() <= asked.cap
        helped += better.objective < filled.objective
    assert helped


def test_repair_shares_out_a_sequence_that_all_wait_for() -> None:
    asked = problem((1, 4), "lockstep", count=1, cap=40_000)
    alone = completed(asked, np.array([2]), np.array([0]), 1)
    shared = repair(asked, alone)
    assert asked.blocks.shapes[asked.blocks.shape_of[shared.row2block[0]]] == (4, False)
    assert shared.objective < alone.objective


@for_seeds(10)
def test_repair_keeps_groups_laminar(seed: int) -> None:
    """On up to eight ranks blocks may partly overlap; two such must not meet in a micro-batch."""
    asked = problem((1, 6), "lockstep", count=12)
    rng = random.Random(seed)
    crossing = asked.blocks.crossing
    row2block = np.zeros(12, dtype=np.int64)
    for row in range(12):
        crossed = crossing[:, row2block[:row]].any(axis=1)  # [blocks]
        row2block[row] = rng.choice(np.flatnonzero(~crossed).tolist())
    better = repair(asked, completed(asked, row2block, np.zeros(12, dtype=np.int64), 1))
    assert (better.row2block != row2block).any()
    assert not crossing[np.ix_(better.row2block, better.row2block)].any()


def test_static_packs_into_few_micro_batches() -> None:
    """Six halves and six thirds of a rank's memory fill five ranks: one micro-batch of six ranks,
    not two."""
    six = Topology(nodes=1, ranks_per_node=6)
    lengths = [500] * 6 + [333] * 6

    def task(lengths: list[int], *, degree: int, cap: int) -> PlanTask:
        return PlanTask(
            lengths=tuple(lengths), topology=six, cost=FLEXSP, cap=cap, sp_degree=degree
        )

    made = static_micro_batches(task(lengths, degree=1, cap=1000))
    assert len(made) == 1
    assert sorted(len(g.sequences) for g in made[0].groups) == [2] * 6
    tight = static_micro_batches(task([600, 400, 500, 500], degree=6, cap=334))
    assert len(tight) == 1
    assert len(tight[0].groups) == 1


# ---- the worked example of planner/search/__init__.py


def test_the_worked_example_is_what_the_search_does() -> None:
    lengths = [9000, 3000, 2500, 2000, 1500, 1200, 1000, 800, 600, 500, 400, 300]
    ranks = topology((1, 4))
    asked = make_problem(lengths, ranks, FLEXSP, strategy="auto", cap=3500, sync="lockstep")

    def ms(nanoseconds: int) -> int:
        return round(nanoseconds / 1e6)

    # 1. problem
    one_rank = [ms(time) for time in asked.times[1:, 0].tolist()]
    four_ranks = [ms(time) for time in asked.times[:, 3].tolist()]
    assert (asked.fewest_micro_batches, ms(asked.constant)) == (2, 629)
    assert one_rank == [598, 492, 388, 287, 228, 189, 150, 112, 93, 74, 56]
    assert four_ranks == [561, 164, 135, 107, 79, 63, 52, 41, 31, 26, 21, 15]
    assert ms(int(asked.least_area.sum()) // 4) == 1228
    # 2. targets
    candidates = starting_candidates(asked, 2)
    first = candidates.targets[:, 0]
    second = candidates.targets[:, 1]
    assert len(first) == 522
    assert (candidates.forced_shapes[:, 4] >= 0).sum() == 512
    assert (candidates.forced_shapes[:, 5] >= 0).sum() == 0
    assert (ms(first[0]), ms(second[0])) == (733, 569)
    assert (ms(first[512:].min()), ms(first[512:].max())) == (617, 771)
    # 3. place and water
    placed = place_long(asked, candidates)
    rises = water_levels(asked, candidates, placed)
    promise = placed.targets.sum(axis=1) + 2 * (rises + asked.constant)
    best = np.argsort(promise, kind="stable")[:2].tolist()
    assert [ms(promise[c]) for c in best] == [2533, 2536]
    assert [(ms(first[c]), ms(second[c])) for c in best] == [(717, 548), (622, 655)]
    # 4. fill, 6. repair
    filled = []
    for c in best:
        long_rows = int(candidates.long_rows[c])
        filled.append(fill_short(asked, placed, c, long_rows=long_rows, rise=int(rises[c])))
    assert [ms(plan.objective) for plan in filled] == [2532, 2511]
    assert [ms(load) for load in filled[1].load.max(axis=1)] == [609, 643]
    repaired = repair(asked, filled[1])
    assert repaired.objective == filled[1].objective
    # The whole search, and 7. one degree
    plan = make_plan(lengths, ranks, FLEXSP, PlanOptions(max_tokens_per_rank=3500))
    one_degree = make_plan(
        lengths,
        ranks,
        FLEXSP,
        PlanOptions(planner="static", sp_degree=4, max_tokens_per_rank=3500),
    )
    assert plan.objective_s == repaired.objective / 1e9
    assert (round(plan.lower_bound_s, 3), round(one_degree.objective_s, 3)) == (2.487, 2.553)
    groups = [[(g.ranks, g.sequences) for g in mb.groups] for mb in plan.micro_batches]
    assert groups == [
        [((0, 1, 2, 3), (0,)), ((0, 1), (7,)), ((2,), (10,)), ((3,), (11,))],
        [((0,), (1,)), ((1,), (2, 8)), ((2,), (3, 6)), ((3,), (4, 5, 9))],
    ]
