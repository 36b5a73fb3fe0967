"""The stages of the default planner against slow, obvious twins."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner.blocks import ALL_RANGES, blocks_of
from hf_flexseq.planner.problem import NEVER, Problem, make_problem, micro_batches_of
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import completed, fill_short, water_levels
from hf_flexseq.planner.search.place import TIME, TOKENS, place_long, tick_bits
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.targets import starting_candidates
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.planner.task import PlanTask
from tests.budget import for_seeds
from tests.planner.brute import least_rise_by_search, placed_one_by_one, poured_one_by_one
from tests.plans import planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
SHAPES = [(1, 1), (1, 5), (1, 8), (2, 4), (3, 2), (1, 9), (1, 12), (2, 6), (3, 5), (4, 8)]


def topology(shape: tuple[int, int]) -> Topology:
    return Topology(nodes=shape[0], ranks_per_node=shape[1])


def problem(shape: tuple[int, int], sync: str, *, count: int = 80, cap: int = 40_000) -> Problem:
    rng = random.Random(count)
    lengths = [int(rng.lognormvariate(7.5, 1.3)) + 1 for _ in range(count)]
    task = PlanTask(
        lengths=tuple(lengths), topology=topology(shape), cost=FLEXSP, cap=cap, sync=sync
    )
    return make_problem(task)


def started(asked: Problem, batches: int):
    """The starting candidates, where their long sequences are, and nanoseconds of a tick."""
    candidates = starting_candidates(asked, batches)
    return candidates, place_long(asked, candidates), 2 ** tick_bits(asked, candidates)


def filled(asked: Problem, batches: int):
    """Yield (candidate, its placement, long rows, rise, filled) of the starting candidates."""
    candidates, placed, _ = started(asked, batches)
    rises = water_levels(asked, candidates, placed).tolist()
    for c, (long_rows, rise) in enumerate(zip(candidates.long_rows.tolist(), rises, strict=True)):
        found = fill_short(asked, placed, c, long_rows=long_rows, rise=rise)
        assert found is not None
        yield c, placed, long_rows, rise, found


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_and_their_relations(shape):
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
        one = set(range(a, b))
        for j, block in enumerate(ranges):
            other = set(range(*block))
            nested = one <= other or other <= one
            assert blocks.inside[i, j] == (other <= one)
            assert blocks.around[i, j] == (other > one)
            assert blocks.crossing[i, j] == (bool(one & other) and not nested)


@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("shape", [(1, 12), (2, 6), (4, 8)])
def test_objectives_are_the_cost_model_s(shape, sync):
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


@pytest.mark.parametrize(
    "shape, cap", [((1, 4), 40_000), ((2, 4), 40_000), ((2, 2), 40_000), ((1, 12), 5_000)]
)
def test_placing_all_candidates_at_once_is_placing_them_one_by_one(shape, cap):
    asked = problem(shape, "lockstep", count=25, cap=cap)
    candidates, placed, tick = started(asked, 2)
    blocks = asked.blocks
    for c in range(0, len(candidates.long_rows), 3):
        rows = int(candidates.long_rows[c])
        spots = list(zip(placed.row2batch[c, :rows], placed.row2block[c, :rows], strict=True))
        if not blocks.overlap:
            slowly = placed_one_by_one(asked, candidates, c, tick.bit_length() - 1)
            assert placed.fits[c] == (slowly is not None)
            assert slowly is None or spots == slowly
        # Every block's fullest rank is kept, if no overlapping block shuts it off.
        load = np.zeros((2, asked.world), dtype=np.int64)  # [micro_batches, ranks]
        for row, (m, b) in enumerate(spots):
            load[m, blocks.start[b] : blocks.stop[b]] += asked.times[row, blocks.shape_of[b]]
        for m, b in np.argwhere(placed.block_state[TOKENS, c] < NEVER):
            fullest = int(load[m, blocks.start[b] : blocks.stop[b]].max())
            counted = int(placed.block_state[TIME, c, m, b])
            assert not placed.fits[c] or abs(counted - fullest) <= tick * (rows + 1)


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_free_ranks_wait_for_each_other(shape):
    """Clocks after placing row by row: a group begins when its last rank is free, and ends for all
    of them at once."""
    asked = problem(shape, "free", count=30)
    candidates, _, tick = started(asked, 2)
    candidates = replace(candidates, targets=candidates.targets * np.array([9, 10]) // 10)
    placed = place_long(asked, candidates)
    blocks = asked.blocks
    for c, rows in enumerate(candidates.long_rows.tolist()):
        clock = np.zeros(asked.world, dtype=np.int64)
        tokens = np.zeros((2, asked.world), dtype=np.int64)  # [micro_batches, ranks]
        for row in range(rows):
            b, m = placed.row2block[c, row], placed.row2batch[c, row]
            ranks = slice(blocks.start[b], blocks.stop[b])
            row_shape = blocks.shape_of[b]
            opens = asked.constant if not tokens[m, ranks].any() else 0
            clock[ranks] = clock[ranks].max() + asked.times[row, row_shape] + opens
            tokens[m, ranks] += asked.needs[row, row_shape]
        counted = placed.rank_state(asked.world)[TIME, c]  # [micro_batches, ranks]
        assert (abs(counted - clock) <= 2 * tick * (rows + 1)).all()


def test_filling_and_repair_agree_with_a_fresh_count_and_never_worsen():
    asked = problem((4, 8), "lockstep", count=300, cap=12_000)
    for *_, before in filled(asked, asked.fewest_micro_batches):
        better = repair(asked, before)
        fresh = completed(asked, better.row2block, better.row2batch, len(better.load))
        assert better.objective == fresh.objective <= before.objective
        assert (better.load == fresh.load).all()
        assert (better.tokens == fresh.tokens).all()
        assert better.tokens.max() <= asked.cap


@pytest.mark.parametrize("cap", [12_000, 20_000])
def test_water_levels_and_pouring_agree_with_looking_at_every_rank(cap):
    asked = problem((4, 8), "lockstep", count=300, cap=cap)
    alone = asked.times[:, 0]
    longest_bisection = int(alone[alone < NEVER].sum())
    poured = 0
    for c, placed, long_rows, rise, found in filled(asked, asked.fewest_micro_batches):
        # The level is the least rise, but for the steps of the bisection.
        load, tokens = placed.rank_state(asked.world)[:, c]
        slack = placed.targets[c][:, None] - load
        memory = asked.cap - tokens
        least = least_rise_by_search(asked, slack.tolist(), memory.tolist(), long_rows)
        assert least <= rise <= least + longest_bisection // 2**EFFORT.water_steps + 1
        # Each short sequence goes to the rank with most left.
        slowly = poured_one_by_one(asked, (slack + rise).tolist(), memory.tolist(), long_rows)
        if slowly is not None:
            batches = found.row2batch[long_rows:].tolist()
            blocks = found.row2block[long_rows:].tolist()
            assert list(zip(batches, blocks, strict=True)) == slowly
            poured += 1
    assert poured


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_repair_of_free_ranks_stays_within_memory_and_helps(shape):
    asked = problem(shape, "free", count=150, cap=12_000)
    helped = 0
    for *_, before in filled(asked, asked.fewest_micro_batches + 1):
        better = repair(asked, before)
        assert better.objective <= before.objective
        assert better.tokens.max() <= asked.cap
        helped += better.objective < before.objective
    assert helped


def test_repair_shares_out_a_sequence_that_all_wait_for():
    asked = problem((1, 4), "lockstep", count=1)
    alone = completed(asked, np.array([2]), np.array([0]), 1)
    shared = repair(asked, alone)
    assert asked.blocks.shapes[asked.blocks.shape_of[shared.row2block[0]]] == (4, False)
    assert shared.objective < alone.objective


@for_seeds(10)
def test_repair_keeps_groups_laminar(seed):
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


@pytest.mark.parametrize(
    "lengths, degree, cap, groups",
    [
        # six halves and six thirds of a rank's memory fill five ranks: not two micro-batches
        ([500] * 6 + [333] * 6, 1, 1000, [2] * 6),
        ([600, 400, 500, 500], 6, 334, [4]),
    ],
)
def test_static_packs_into_few_micro_batches(lengths, degree, cap, groups):
    task = PlanTask(
        lengths=tuple(lengths), topology=topology((1, 6)), cost=FLEXSP, cap=cap, sp_degree=degree
    )
    (made,) = static_micro_batches(task)
    assert [len(group.sequences) for group in made.groups] == groups


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
    assert ms(asked.times[:, 3]) == four_ranks
    # 2. targets
    candidates, placed, _ = started(asked, 2)
    assert len(candidates.targets) == 522
    assert (candidates.forced_shapes >= 0).sum(axis=0)[4:].tolist() == [512, 0]
    assert ms(candidates.targets[0]) == [733, 569]
    first = candidates.targets[512:, 0]
    assert ms([first.min(), first.max()]) == [617, 771]
    # 3. place and water
    rises = water_levels(asked, candidates, placed)
    promise = placed.targets.sum(axis=1) + 2 * (rises + asked.constant)
    best = np.argsort(promise, kind="stable")[:2].tolist()
    assert ms(promise[best]) == [2533, 2536]
    assert [ms(candidates.targets[c]) for c in best] == [[717, 548], [622, 655]]
    # 4. fill, 6. repair
    found = []
    for c in best:
        long_rows = int(candidates.long_rows[c])
        found.append(fill_short(asked, placed, c, long_rows=long_rows, rise=int(rises[c])))
    assert ms([plan.objective for plan in found]) == [2532, 2511]
    assert ms(found[1].load.max(axis=1)) == [609, 643]
    repaired = repair(asked, found[1])
    assert repaired.objective == found[1].objective
    # The whole search, and 7. one degree
    cap = {"max_tokens_per_rank": 3500}
    plan = planned(lengths, ranks, FLEXSP, **cap)
    one_degree = planned(lengths, ranks, FLEXSP, planner="static", sp_degree=4, **cap)
    assert plan.objective_s == repaired.objective / 1e9
    assert (round(plan.lower_bound_s, 3), round(one_degree.objective_s, 3)) == (2.487, 2.553)
    assert [[(g.ranks, g.sequences) for g in mb.groups] for mb in plan.micro_batches] == [
        [((0, 1, 2, 3), (0,)), ((0, 1), (7,)), ((2,), (10,)), ((3,), (11,))],
        [((0,), (1,)), ((1,), (2, 8)), ((2,), (3, 6)), ((3,), (4, 5, 9))],
    ]
