"""Slow twins of the planner's searches: every laminar plan, one by one; and the stages of the
default search with loops over single candidates, micro-batches and ranks.

* `best_lockstep_ns`: the best of all laminar plans, for any planner.
* `best_of_one_micro_batch_ns`: the best of all micro-batches of all strategies, priced whole.
* `placed_one_by_one`: the twin of `planner/search/place.py`.
* `least_rise_by_search` and `poured_one_by_one`: the twins of `planner/search/fill.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.place import ANY_SHAPE, FIT_RANKS, Candidates

Block = tuple[int, int]
Lengths = tuple[int, ...]


def best_lockstep_ns(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, cap: int, batches: int
) -> int:
    """Return the nanoseconds of the best plan with at most `batches` micro-batches.

    Sequences on the same ranks share them in the best way. Depth first over the sequences, cut
    where the time so far already exceeds the best plan met.
    """
    world = topology.world_size
    blocks = [
        (start, stop)
        for start in range(world)
        for stop in range(start + 1, world + 1)
        if topology.allows(start, stop)
    ]
    price = _Prices(cost)
    load = [[0] * world for _ in range(batches)]  # [batches][world] nanoseconds
    tokens = [[0] * world for _ in range(batches)]  # [batches][world] tokens
    used: list[dict[Block, Lengths]] = [{} for _ in range(batches)]  # blocks with sequences
    best = 2**62

    def so_far() -> int:
        return sum(max(ranks) + cost.micro_batch_ns for ranks in load if max(ranks))

    def visit(index: int) -> None:
        nonlocal best
        if so_far() >= best:
            return
        if index == len(lengths):
            best = so_far()
            return
        for batch, (start, stop) in _spots(blocks, used):
            degree = stop - start
            need = -(-lengths[index] // degree)
            if max(tokens[batch][start:stop]) + need > cap:
                continue
            before = used[batch].get((start, stop), ())
            after = tuple(sorted((*before, lengths[index])))
            spans = topology.spans_nodes(start, stop)
            time = price.of(after, degree, spans) - price.of(before, degree, spans)
            for rank in range(start, stop):
                load[batch][rank] += time
                tokens[batch][rank] += need
            used[batch][start, stop] = after
            visit(index + 1)
            used[batch][start, stop] = before
            if not before:
                del used[batch][start, stop]
            for rank in range(start, stop):
                load[batch][rank] -= time
                tokens[batch][rank] -= need

    visit(0)
    return best


def _spots(blocks: list[Block], used: list[dict[Block, Lengths]]) -> Iterator[tuple[int, Block]]:
    """Yield (micro-batch, block) of every way to add a sequence."""
    for batch, used_blocks in enumerate(used):
        for start, stop in blocks:
            if not any(start < b < stop < d or b < start < d < stop for b, d in used_blocks):
                yield batch, (start, stop)
        if not used_blocks:
            return  # the micro-batches after an empty one are empty too, and like it


class _Prices:
    """The least nanoseconds of sequences that share their ranks, in groups of any strategies."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: dict[tuple[Lengths, int, bool], int] = {}

    def of(self, lengths: Lengths, degree: int, spans: bool) -> int:
        """Return the price. lengths: in ascending order."""
        if not lengths:
            return 0
        key = (lengths, degree, spans)
        if key not in self._known:
            names = ("local",) if degree == 1 else self._cost.strategies("auto")
            together = min(
                self._cost.group_ns(np.array(lengths), degree, name, spans) for name in names
            )
            apart = [together]
            for count in range(1, len(lengths)):
                for chosen in combinations(range(1, len(lengths)), count):
                    part = tuple(lengths[i] for i in chosen)
                    rest = tuple(s for i, s in enumerate(lengths) if i not in chosen)
                    apart.append(self.of(part, degree, spans) + self.of(rest, degree, spans))
            self._known[key] = min(apart)
        return self._known[key]


def best_of_one_micro_batch_ns(lengths: Sequence[int], topology: Topology, cost: CostModel) -> int:
    """Return the nanoseconds of the best micro-batch of all sequences: every strategy and every
    ranks for each of them, memory left aside."""
    world = topology.world_size
    spots = []  # (start, stop, strategy)
    for start, stop in combinations(range(world + 1), 2):
        names = ("local",) if stop - start == 1 else cost.strategies("auto")
        spots += [(start, stop, name) for name in names]
    best = 2**62
    for chosen in product(spots, repeat=len(lengths)):
        if any(a < b < c < d for (a, c, _), (b, d, _) in product(chosen, repeat=2)):
            continue  # they overlap in part
        groups = []
        for start, stop, name in dict.fromkeys(chosen):
            members = tuple(i for i, spot in enumerate(chosen) if spot == (start, stop, name))
            ranks = tuple(range(start, stop))
            groups.append(Group(ranks=ranks, sequences=members, strategy=name))
        micro_batch = MicroBatch(groups=widest_first(groups))
        (nanoseconds,) = lockstep_ns(cost, [micro_batch], lengths, topology)
        best = min(best, nanoseconds)
    return best


# ---- the stages of the default search, on blocks that do not partly overlap


def placed_one_by_one(
    problem: Problem, candidates: Candidates, candidate: int, tick: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, block) of each long row of one candidate in lockstep.

    None when memory is short. tick: power of two of the nanoseconds that times are rounded down
    to.
    """
    blocks = problem.blocks
    targets = [target >> tick for target in candidates.targets[candidate].tolist()]
    fit = int(candidates.fit[candidate])
    divisor = FIT_RANKS
    while divisor < problem.world:
        divisor *= 2
    load = [[0] * problem.world for _ in targets]  # ticks
    tokens = [[0] * problem.world for _ in targets]
    spots = []
    for row in range(int(candidates.long_rows[candidate])):
        forced = ANY_SHAPE
        if row < candidates.forced_shapes.shape[1]:
            forced = int(candidates.forced_shapes[candidate, row])
        best = None
        least = 0
        for batch, target in enumerate(targets):
            for block, shape in enumerate(blocks.shape_of.tolist()):
                time_ns, need = int(problem.times[row, shape]), int(problem.needs[row, shape])
                if time_ns >= NEVER or forced not in (ANY_SHAPE, shape):
                    continue
                ranks = slice(int(blocks.start[block]), int(blocks.stop[block]))
                if max(tokens[batch][ranks]) + need > problem.cap:
                    continue
                degree = ranks.stop - ranks.start
                wasted = (time_ns * degree - int(problem.least_area[row])) // problem.world
                fullest = max(load[batch][ranks])
                above = fullest + (time_ns >> tick) - target
                misfit = fit * (target - fullest) // divisor
                score = max(above, misfit) + (wasted >> tick)
                if best is None or score < least:
                    best, least = (batch, block), score
        if best is None:
            return None
        spots.append(best)
        batch, block = best
        shape = int(blocks.shape_of[block])
        for rank in range(int(blocks.start[block]), int(blocks.stop[block])):
            load[batch][rank] += int(problem.times[row, shape]) >> tick
            tokens[batch][rank] += int(problem.needs[row, shape])
            targets[batch] = max(targets[batch], load[batch][rank])
    return spots


def least_rise_by_search(
    problem: Problem, slack: list[list[int]], memory: list[list[int]], first_row: int
) -> int:
    """Return the least nanoseconds by which targets rise until the rows from `first_row` on fit.

    The rows count as divisible. slack, memory: [micro-batches][ranks] nanoseconds below the
    target, and tokens left. Tries every rise that makes a rank start or stop taking, and solves
    for the rise in between.
    """
    time = sum(int(t) for t in problem.times[first_row:, 0])
    rate = time // max(1, sum(problem.lengths[first_row:].tolist())) + 1
    pairs = []
    for slacks, memories in zip(slack, memory, strict=True):
        for ns, tokens in zip(slacks, memories, strict=True):
            pairs.append((ns, tokens * rate))

    def taken(rise: int) -> int:
        return sum(max(0, min(ns + rise, most)) for ns, most in pairs)

    rise = 0
    for point in sorted({0, *(-ns for ns, _ in pairs), *(most - ns for ns, most in pairs)}):
        if point < 0:
            continue
        if taken(point) >= time:
            growing = sum(1 for ns, most in pairs if ns + rise >= 0 and ns + rise < most)
            missing = time - taken(rise)
            return rise + (-(-missing // growing) if missing > 0 else 0)
        rise = point
    raise AssertionError("memory does not hold the rows")


def poured_one_by_one(
    problem: Problem, slack: list[list[int]], memory: list[list[int]], first_row: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, rank) of each row from `first_row` on in lockstep, by looking at
    all.

    None when a row fits no single rank. The lists [micro-batches][ranks] are nanoseconds below the
    target and tokens left; they are updated.
    """
    times = problem.times[first_row:, 0].tolist()
    lengths = problem.lengths[first_row:].tolist()
    rate = sum(times) // max(1, sum(lengths)) + 1
    spots = []
    for time, length in zip(times, lengths, strict=True):
        left = {}
        for batch, slacks in enumerate(slack):
            for rank, ns in enumerate(slacks):
                if memory[batch][rank] >= length:
                    left[batch, rank] = min(ns, memory[batch][rank] * rate)
        if not left:
            return None
        batch, rank = min(left, key=lambda spot: (-left[spot], spot))
        slack[batch][rank] -= time
        memory[batch][rank] -= length
        spots.append((batch, rank))
    return spots
