"""The parts of the default planner against slow, obvious twins."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner.blocks import ALL_RANGES, blocks_of
from hf_flexseq.planner.problem import NEVER, Problem, make_problem, micro_batches_of
from hf_flexseq.planner.search.fill import completed, fill_short, water_levels
from hf_flexseq.planner.search.place import place_long, tick_bits
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.tabu import after_each_move, improved
from hf_flexseq.planner.search.targets import starting_candidates
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.topology import Topology

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
    blocks, where = blocks_of(topology(shape)), topology(shape)
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
            mine, other = set(range(a, b)), set(range(c, d))
            assert blocks.inside[i, j] == (other <= mine)
            assert blocks.around[i, j] == (other > mine)
            assert blocks.crossing[i, j] == (
                bool(mine & other) and not mine <= other and not other <= mine
            )


@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("shape", [(1, 12), (2, 6), (4, 8)])
def test_objectives_are_the_cost_model_s(shape: tuple[int, int], sync: str) -> None:
    """Any placement on a tree, scored by arrays and by walking through the plan it stands for."""
    asked, rng = problem(shape, sync), random.Random(1)
    lengths = [
        int(n) for _, n in sorted(zip(asked.ids.tolist(), asked.lengths.tolist(), strict=True))
    ]
    for _ in range(5):
        block = np.array([rng.randrange(len(asked.blocks.start)) for _ in lengths])
        batch = np.array([rng.randrange(3) for _ in lengths])
        plan = micro_batches_of(asked, block.tolist(), batch.tolist())
        assert completed(asked, block, batch, 3).objective == step_ns(
            FLEXSP, plan, lengths, asked.topology, sync=sync
        )


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 12), (4, 8)])
def test_placing_keeps_every_block_s_fullest_rank(shape: tuple[int, int]) -> None:
    asked = problem(shape, "lockstep", count=30)
    candidates = starting_candidates(asked, 2)
    placed = place_long(asked, candidates)
    blocks, tick = asked.blocks, 2 ** tick_bits(asked, candidates)
    for c, rows in enumerate(candidates.long.tolist()):
        load = np.zeros((2, asked.world), dtype=np.int64)
        for row in range(rows):
            b = placed.block[c, row]
            load[placed.batch[c, row], blocks.start[b] : blocks.stop[b]] += asked.times[
                row, blocks.shape_of[b]
            ]
        for m in range(2):
            for b in np.flatnonzero(
                placed.state[1, c, m] < NEVER
            ):  # those that are not shut off by an overlapping one
                fullest = int(load[m, blocks.start[b] : blocks.stop[b]].max())
                assert abs(int(placed.state[0, c, m, b]) - fullest) <= tick * (rows + 1)


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_free_ranks_wait_for_each_other(shape: tuple[int, int]) -> None:
    """Clocks after placing row by row: a group begins when its last rank is free, and ends for all
    of them at once."""
    asked = problem(shape, "free", count=30)
    started = starting_candidates(asked, 2)
    candidates = replace(started, targets=started.targets * np.array([9, 10]) // 10)
    placed, tick = place_long(asked, candidates), 2 ** tick_bits(asked, candidates)
    blocks = asked.blocks
    for c, rows in enumerate(candidates.long.tolist()):
        clock, held = (
            np.zeros(asked.world, dtype=np.int64),
            np.zeros((2, asked.world), dtype=np.int64),
        )
        for row in range(rows):
            b, m = placed.block[c, row], placed.batch[c, row]
            ranks, shape_of = slice(blocks.start[b], blocks.stop[b]), blocks.shape_of[b]
            opens = asked.constant if not held[m, ranks].any() else 0
            clock[ranks] = clock[ranks].max() + asked.times[row, shape_of] + opens
            held[m, ranks] += asked.needs[row, shape_of]
        for m in range(2):
            assert (
                abs(placed.rank_state(asked.world)[0, c, m] - clock) <= 2 * tick * (rows + 1)
            ).all()


def test_filling_and_repair_agree_with_a_fresh_count_and_never_worsen() -> None:
    asked = problem((4, 8), "lockstep", count=300, cap=12_000)
    candidates = starting_candidates(asked, asked.fewest_micro_batches)
    placed = place_long(asked, candidates)
    rises = water_levels(asked, candidates, placed)
    for c in range(len(rises)):
        filled = fill_short(asked, placed, c, long=int(candidates.long[c]), rise=int(rises[c]))
        assert filled is not None
        better = repair(asked, filled)
        fresh = completed(asked, better.block, better.batch, len(better.load))
        assert better.objective == fresh.objective <= filled.objective
        assert (better.load == fresh.load).all()
        assert (better.held == fresh.held).all()
        assert better.held.max() <= asked.cap


@pytest.mark.parametrize("shape", [(1, 12), (4, 8)])
def test_repair_of_free_ranks_stays_within_memory_and_helps(shape: tuple[int, int]) -> None:
    asked = problem(shape, "free", count=150, cap=12_000)
    candidates = starting_candidates(asked, asked.fewest_micro_batches + 1)
    placed = place_long(asked, candidates)
    rises, helped = water_levels(asked, candidates, placed), 0
    for c in range(len(rises)):
        filled = fill_short(asked, placed, c, long=int(candidates.long[c]), rise=int(rises[c]))
        assert filled is not None
        better = repair(asked, filled)
        assert better.objective <= filled.objective
        assert better.held.max() <= asked.cap
        helped += better.objective < filled.objective
    assert helped


def test_repair_shares_out_a_sequence_that_all_wait_for() -> None:
    asked = problem((1, 4), "lockstep", count=1, cap=40_000)
    alone = completed(asked, np.array([2]), np.array([0]), 1)
    shared = repair(asked, alone)
    assert asked.blocks.shapes[asked.blocks.shape_of[shared.block[0]]] == (4, False)
    assert shared.objective < alone.objective


@pytest.mark.parametrize("seed", range(10))
def test_repair_keeps_groups_laminar(seed: int) -> None:
    """On up to eight ranks blocks may partly overlap; two such must not meet in a micro-batch."""
    asked, rng = problem((1, 6), "lockstep", count=12), random.Random(seed)
    blocks, crossing = asked.blocks, asked.blocks.crossing
    block = np.zeros(12, dtype=np.int64)
    for row in range(12):
        block[row] = rng.choice(
            [b for b in range(len(blocks.start)) if not crossing[b, block[:row]].any()]
        )
    better = repair(asked, completed(asked, block, np.zeros(12, dtype=np.int64), 1))
    assert (better.block != block).any()
    assert not crossing[np.ix_(better.block, better.block)].any()


@pytest.mark.parametrize("shape", [(1, 3), (1, 4), (2, 2), (1, 12)])
def test_every_move_is_priced_as_a_fresh_count_would(shape: tuple[int, int]) -> None:
    asked, rng = problem(shape, "lockstep", count=8, cap=20_000), random.Random(4)
    blocks = asked.blocks
    for _ in range(5):
        where = np.array([rng.randrange(asked.world) for _ in range(8)])
        filled = completed(asked, where, np.array([rng.randrange(2) for _ in range(8)]), 2)
        priced = after_each_move(asked, filled)
        for row, batch, block in np.ndindex(priced.shape):
            moved, batches = filled.block.copy(), filled.batch.copy()
            moved[row], batches[row] = block, batch
            fresh = completed(asked, moved, batches, 2)
            mates = [b for i, b in enumerate(moved.tolist()) if batches[i] == batch]
            legal = (
                fresh.held[batch].max() <= asked.cap
                and not blocks.crossing[np.ix_(mates, mates)].any()
            )
            stays = (where[row], filled.batch[row]) == (block, batch)
            if legal and not stays:
                assert priced[row, batch, block] == fresh.objective
            elif (
                stays
                or fresh.held[batch, blocks.start[block] : blocks.stop[block]].max() > asked.cap
            ):
                assert priced[row, batch, block] == NEVER


def test_a_walk_never_worsens_a_plan() -> None:
    asked = problem((1, 4), "lockstep", count=12, cap=30_000)
    start = completed(asked, np.zeros(12, dtype=np.int64), np.arange(12) % 2, 2)
    better = improved(asked, start)
    assert better.objective < start.objective
    assert better.objective == completed(asked, better.block, better.batch, 2).objective


def test_static_packs_into_few_micro_batches() -> None:
    """Six halves and six thirds of a rank's memory fill five ranks: one micro-batch of six ranks,
    not two."""
    six = Topology(nodes=1, ranks_per_node=6)
    lengths = [500] * 6 + [333] * 6
    made = static_micro_batches(lengths, six, FLEXSP, degree=1, strategy="auto", cap=1000)
    assert len(made) == 1
    assert sorted(len(g.sequences) for g in made[0].groups) == [2] * 6
    tight = static_micro_batches(
        [600, 400, 500, 500], six, FLEXSP, degree=6, strategy="auto", cap=334
    )
    assert len(tight) == 1
    assert len(tight[0].groups) == 1
