"""Complete a candidate: its short sequences go to one rank each, on top of the long ones.

Longest first, each short sequence goes to the (micro-batch, rank) with the most time left below
the target, among those with memory for it.

Rejected: several ranks for a sequence that no single rank has memory for, so that memory can be
filled up. On 220 steps, half of them with 94 % of memory full, that gained 0.03 %.

The slow twins are in tests/planner/brute.py: `counted` for each rank's load and tokens,
`poured_one_by_one` for the heap.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import Problem
from hf_flexseq.planner.search.place import Placement


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """A complete candidate: a block and a micro-batch for every sequence."""

    objective: int
    """Nanoseconds of the step."""
    row2block: Int64Array
    """[sequences] block of each row of the problem."""
    row2batch: Int64Array
    """[sequences] micro-batch of each row of the problem."""
    load: Int64Array
    """[micro_batches, ranks] nanoseconds."""
    tokens: Int64Array
    """[micro_batches, ranks] tokens."""


# ---- one candidate


def fill_short(problem: Problem, placed: Placement, candidate: int) -> Filled | None:
    """Return a candidate, by index, with its short sequences, or None when memory does not hold
    them."""
    load, tokens = placed.load[candidate], placed.tokens[candidate]  # [micro_batches, ranks] each
    level = placed.targets[candidate][:, None]  # [micro_batches, 1]
    # A slot is one rank in one micro-batch: micro-batch x world + rank.
    slack = (level - load).ravel().tolist()  # nanoseconds below the level
    memory = (problem.cap - tokens).ravel().tolist()  # tokens
    long_rows = placed.row2block.shape[1]
    spots = _pour(problem, slack, memory, long_rows)
    if spots is None:
        return None
    row2batch, row2block = np.array(spots, dtype=np.int64).reshape(-1, 2).T
    load = level - np.array(slack).reshape(load.shape)
    return Filled(
        objective=lockstep_objective(problem, load),
        row2block=np.concatenate([placed.row2block[candidate], row2block]),
        row2batch=np.concatenate([placed.row2batch[candidate], row2batch]),
        load=load,
        tokens=problem.cap - np.array(memory).reshape(load.shape),
    )


def lockstep_objective(problem: Problem, load: Int64Array) -> int:
    """Return the lockstep nanoseconds of loads [micro_batches, ranks]; empty ones are free."""
    slowest = load.max(axis=1)  # [micro_batches]
    started = int((slowest > 0).sum())
    return int(slowest.sum()) + started * problem.constant


# ---- pouring


def _pour(
    problem: Problem, slack: list[int], memory: list[int], long_rows: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, block) of each row from `long_rows` on; None when memory is short.

    slack, memory: [slots] nanoseconds left below the target and tokens left; they are updated.
    """
    world = problem.world
    times = problem.times[long_rows:, 0].tolist()
    lengths = problem.lengths[long_rows:].tolist()
    # (-nanoseconds left, slot) of the slots that may have memory for the row, most left on top
    heap = [(-left, slot) for slot, left in enumerate(slack)]
    heapq.heapify(heap)
    # (-tokens left, slot) of slots too full for an earlier, longer row, most tokens left on top
    tight: list[tuple[int, int]] = []
    spots = []
    for time, length in zip(times, lengths, strict=True):
        # 1. Slots that were too full for longer rows, and have memory for this one.
        while tight and -tight[0][0] >= length:
            slot = heapq.heappop(tight)[1]
            heapq.heappush(heap, (-slack[slot], slot))
        # 2. Slots with much time left but too little memory.
        while heap and memory[heap[0][1]] < length:
            slot = heapq.heappop(heap)[1]
            heapq.heappush(tight, (-memory[slot], slot))
        # 3. The slot with most left takes the row.
        if not heap:
            return None
        slot = heap[0][1]
        slack[slot] -= time
        memory[slot] -= length
        heapq.heapreplace(heap, (-slack[slot], slot))
        spots.append(divmod(slot, world))  # block r < world is rank r alone
    return spots
