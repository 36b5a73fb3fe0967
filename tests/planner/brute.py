"""Slow twins of the stages of the default search, with loops over single candidates, micro-batches
and ranks.

* `placed_one_by_one`: the twin of `planner/search/place.py`.
* `poured_one_by_one`: the twin of `planner/search/fill.py`.
* `counted`: what each rank has, of `planner/search/fill.py` and `repair.py`.
"""

import numpy as np

from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.fill import Filled, lockstep_objective
from hf_flexseq.planner.search.place import ANY_SHAPE, FIT_RANKS, Candidates


def placed_one_by_one(
    problem: Problem, candidates: Candidates, candidate: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, block) of each long row of one candidate; None when memory is
    short."""
    blocks = problem.blocks
    targets = candidates.targets[candidate].tolist()
    divisor = FIT_RANKS
    while divisor < problem.world:
        divisor *= 2
    load = [[0] * problem.world for _ in targets]  # nanoseconds
    tokens = [[0] * problem.world for _ in targets]
    spots = []
    for row in range(candidates.long_rows):
        forced = ANY_SHAPE
        if row < candidates.forced_shapes.shape[1]:
            forced = int(candidates.forced_shapes[candidate, row])
        scores = {}  # of (micro-batch, block)
        for batch, target in enumerate(targets):
            for block, shape in enumerate(blocks.shape_of.tolist()):
                time, need = int(problem.times[row, shape]), int(problem.needs[row, shape])
                if time >= NEVER or forced not in (ANY_SHAPE, shape):
                    continue
                ranks = slice(int(blocks.start[block]), int(blocks.stop[block]))
                if max(tokens[batch][ranks]) + need > problem.cap:
                    continue
                degree = ranks.stop - ranks.start
                wasted = (time * degree - int(problem.least_area[row])) // problem.world
                over = max(load[batch][ranks]) - target
                scores[batch, block] = max(over + time, over // divisor) + wasted
        if not scores:
            return None
        batch, block = min(scores, key=scores.__getitem__)  # of equal ones the first
        spots.append((batch, block))
        shape = int(blocks.shape_of[block])
        for rank in range(int(blocks.start[block]), int(blocks.stop[block])):
            load[batch][rank] += int(problem.times[row, shape])
            tokens[batch][rank] += int(problem.needs[row, shape])
            targets[batch] = max(targets[batch], load[batch][rank])
    return spots


def poured_one_by_one(
    problem: Problem, slack: list[list[int]], memory: list[list[int]], first_row: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, rank) of each row from `first_row` on, by looking at all.

    None when a row fits no single rank. The lists [micro-batches][ranks] are nanoseconds below the
    target and tokens left; they are updated.
    """
    spots = []
    for row in range(first_row, len(problem.lengths)):
        time, length = int(problem.times[row, 0]), int(problem.lengths[row])
        left = {}
        for batch, slacks in enumerate(slack):
            for rank, ns in enumerate(slacks):
                if memory[batch][rank] >= length:
                    left[batch, rank] = ns
        if not left:
            return None
        batch, rank = min(left, key=lambda spot: (-left[spot], spot))
        slack[batch][rank] -= time
        memory[batch][rank] -= length
        spots.append((batch, rank))
    return spots


def counted(problem: Problem, row2block: list[int], row2batch: list[int], batches: int) -> Filled:
    """Return the complete candidate with each row on a block, in a micro-batch."""
    blocks = problem.blocks
    figures = np.zeros((2, batches, problem.world), dtype=np.int64)
    for row, (block, batch) in enumerate(zip(row2block, row2batch, strict=True)):
        shape = blocks.shape_of[block]
        ranks = slice(blocks.start[block], blocks.stop[block])
        figures[0, batch, ranks] += problem.times[row, shape]
        figures[1, batch, ranks] += problem.needs[row, shape]
    return Filled(
        objective=lockstep_objective(problem, figures[0]),
        row2block=np.array(row2block),
        row2batch=np.array(row2batch),
        load=figures[0],
        tokens=figures[1],
    )
