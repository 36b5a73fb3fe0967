"""A baseline: the dynamic context parallelism of Megatron-Core's dev branch
(`data_schedule_utils.py`, August 2026).

The work of a sequence of s tokens on d ranks is s^2 / d, whatever the machine. Micro-batch by
micro-batch, with the method that does each step:

1. `micro_batch`: the longest sequence takes the smallest degree that memory allows. Work on a rank
   is limited to that sequence's length times the tokens a rank holds, plus 5 %.
2. `_best`: every other sequence, longest first, goes where the busiest rank ends up with the least
   work: to a group with memory left, or to a new group on free ranks, at any degree that memory
   allows. Sequences that fit nowhere are left for the next micro-batch.
3. `_grow`: while ranks are idle the first group of the smallest degree takes the next degree.
4. `_together`: if no group can grow, one group of all ranks takes as many sequences as fit.

Left out, because the published rule leaves it out: linear layers, communication and the constant
of a micro-batch. The cost model only prices the outcome. Changed: where Megatron allows any ranks,
groups are aligned here (`aligned_groups.py`).

tests/published/test_baselines.py walks through the steps on small examples.
"""

import math
from dataclasses import dataclass, field

from hf_flexseq.plan import MicroBatch, widest_first
from hf_flexseq.planner.static import one_strategy_groups
from hf_flexseq.planner.task import PlanTask, longest_first
from hf_flexseq.published.aligned_groups import allowed_degrees, fit_together, rank_ranges

SPARE = 5  # per cent of work above the limit, as published


@dataclass(kw_only=True, slots=True)
class _Pack:
    """A group in the making."""

    degree: int
    """Ranks."""
    ids: list[int] = field(default_factory=list)
    """The sequences it holds."""
    tokens: int = 0
    """Tokens of all its sequences."""
    work: int = 0
    """Squared tokens of each of its ranks, times the common multiple of all degrees."""


class _Scheduler:
    """The published rule for one step."""

    def __init__(self, task: PlanTask) -> None:
        self.lengths = task.lengths
        self.topology = task.topology
        self.cap = task.cap  # tokens of a rank
        self.degrees = allowed_degrees(task)  # ascending
        # work times this is a whole number at every degree
        self.multiple = math.lcm(*self.degrees)

    def micro_batch(self, ids: list[int]) -> tuple[list[_Pack], list[int]]:
        """Return the next micro-batch's groups, and the sequences left. ids: by falling length."""
        # 1. The longest sequence sets the limit.
        longest = self.lengths[ids[0]]
        limit = longest * self.cap * self.multiple * (100 + SPARE) // 100
        first = _Pack(degree=self._smallest_degree(longest))
        self._add(first, ids[0])
        # 2. All others, as far as they fit.
        packs = [first]
        later = []
        for i in ids[1:]:
            pack = self._best(packs, i, limit)
            if pack is None:
                later.append(i)
            else:
                self._add(pack, i)
        # 3. and 4. Groups grow over idle ranks, or are given up for one of all ranks.
        while sum(pack.degree for pack in packs) < self.topology.world_size:
            if not self._grow(packs):
                return self._together(ids)
        return packs, later

    def _smallest_degree(self, length: int) -> int:
        """Return the smallest degree at which memory allows a sequence."""
        return next(degree for degree in self.degrees if -(-length // degree) <= self.cap)

    def _add(self, pack: _Pack, i: int) -> None:
        """Add a sequence to a group."""
        pack.ids.append(i)
        pack.tokens += self.lengths[i]
        pack.work += self._work(i, pack.degree)

    def _work(self, i: int, degree: int) -> int:
        """Return a sequence's work on each of `degree` ranks, in the unit of `_Pack.work`."""
        return self.lengths[i] ** 2 * self.multiple // degree

    def _best(self, packs: list[_Pack], i: int, limit: int) -> _Pack | None:
        """Return the group where a sequence leaves the busiest rank lowest; None above `limit`.

        Of equal ones narrow before wide, and a group in use before a new one. A new one is added
        to `packs`.
        """
        busiest = max(pack.work for pack in packs)
        smallest = self._smallest_degree(self.lengths[i])
        best = None
        least = limit + 1
        for degree in self.degrees[self.degrees.index(smallest) :]:
            work = self._work(i, degree)
            # 1. Groups in use that have memory left.
            most_tokens = self.cap * degree - self.lengths[i]
            for pack in packs:
                if pack.degree != degree or pack.tokens > most_tokens:
                    continue
                busiest_then = max(busiest, pack.work + work)
                if busiest_then < least:
                    best = pack
                    least = busiest_then
            # 2. A new group on free ranks.
            busiest_then = max(busiest, work)
            if busiest_then < least and self._fits([*packs, _Pack(degree=degree)]):
                best = _Pack(degree=degree)
                least = busiest_then
        if best is not None and not best.ids:
            packs.append(best)
        return best

    def _fits(self, packs: list[_Pack]) -> bool:
        """Return whether all groups have ranks side by side."""
        return fit_together([pack.degree for pack in packs], self.topology)

    def _grow(self, packs: list[_Pack]) -> bool:
        """Widen the first group of the smallest degree that has room; False if none has."""
        smallest = min(pack.degree for pack in packs)
        wider = [degree for degree in self.degrees if degree > smallest]
        if not wider:
            return False
        for pack in packs:
            if pack.degree == smallest:
                pack.degree = wider[0]
                if self._fits(packs):
                    return True
                pack.degree = smallest
        return False

    def _together(self, ids: list[int]) -> tuple[list[_Pack], list[int]]:
        """Return one group of the widest degree, and the sequences that do not fit. ids: by
        falling length."""
        whole = _Pack(degree=self.degrees[-1])
        later = []
        for i in ids:
            if whole.tokens + self.lengths[i] <= self.cap * whole.degree:
                self._add(whole, i)
            else:
                later.append(i)
        return [whole], later


def megatron_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of Megatron's schedule."""
    scheduler = _Scheduler(task)
    left = longest_first(task.lengths)
    micro_batches = []
    while left:
        packs, left = scheduler.micro_batch(left)
        ranges = rank_ranges([pack.degree for pack in packs], task.topology)
        groups = one_strategy_groups(ranges, [pack.ids for pack in packs], task)
        micro_batches.append(MicroBatch(groups=widest_first(groups)))
    return tuple(micro_batches)
