"""A baseline: the dynamic context parallelism of Megatron-Core's dev branch
(`data_schedule_utils.py`, August 2026).

The work of a sequence of s tokens on d ranks is s^2 / d, whatever the machine. Micro-batch by
micro-batch:

1. The longest sequence takes the smallest degree that memory allows. Work per rank is limited to
   that sequence's length times the tokens a rank holds, plus 5 %.
2. Every other one, longest first, goes where the most loaded rank ends up with the least work: to
   a group with memory left, or to a new group on free ranks, at any degree that memory allows.
   What fits nowhere is left for later.
3. While ranks are idle the first group of the smallest degree takes the next one; if none can, one
   group of all ranks takes as many sequences as fit.

It knows no linear layers, no communication and no constant per micro-batch: the cost model only
prices the outcome. Where Megatron allows any ranks, groups are aligned here (`aligned.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_flexseq.cost import CostModel
from hf_flexseq.plan import MicroBatch, widest_first
from hf_flexseq.planner.published.aligned import aligned_degrees, fit_together, rank_ranges
from hf_flexseq.planner.published.blaster import falling
from hf_flexseq.planner.static import one_strategy_group
from hf_flexseq.topology import Topology

SPARE = 5  # per cent of work above the limit


@dataclass(kw_only=True, slots=True)
class _Pack:
    """A group in the making. work: of each of its ranks, times the common multiple of all
    degrees."""

    degree: int
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    work: int = 0


class _Scheduler:
    """The rule above for one step."""

    def __init__(
        self, lengths: Sequence[int], topology: Topology, degrees: tuple[int, ...], cap: int
    ) -> None:
        self.lengths, self.topology, self.degrees, self.cap = lengths, topology, degrees, cap
        self.multiple = math.lcm(*degrees)

    def micro_batch(self, ids: list[int]) -> tuple[list[_Pack], list[int]]:
        """The groups of the next micro-batch and the sequences left for later; `ids` fall in
        length."""
        longest = self.lengths[ids[0]]
        limit = longest * self.cap * self.multiple * (100 + SPARE) // 100
        first = _Pack(degree=self._needed(longest))
        self._add(first, ids[0])
        packs, later = [first], []
        for i in ids[1:]:
            pack = self._best(packs, i, limit)
            if pack is None:
                later.append(i)
            else:
                self._add(pack, i)
        return self._filled(packs, ids, later)

    def _needed(self, length: int) -> int:
        return next(d for d in self.degrees if -(-length // d) <= self.cap)

    def _add(self, pack: _Pack, i: int) -> None:
        pack.ids.append(i)
        pack.tokens += self.lengths[i]
        pack.work += self._work(i, pack.degree)

    def _work(self, i: int, degree: int) -> int:
        return self.lengths[i] ** 2 * self.multiple // degree

    def _best(self, packs: list[_Pack], i: int, limit: int) -> _Pack | None:
        """Where the most loaded rank stays lowest; narrow before wide, and groups there before a
        new one. A new one is added to `packs`."""
        busiest, best, least = max(pack.work for pack in packs), None, limit + 1
        for degree in self.degrees[self.degrees.index(self._needed(self.lengths[i])) :]:
            work = self._work(i, degree)
            room = self.cap * degree - self.lengths[i]
            for pack in packs:
                if (
                    pack.degree == degree
                    and pack.tokens <= room
                    and max(busiest, pack.work + work) < least
                ):
                    best, least = pack, max(busiest, pack.work + work)
            if max(busiest, work) < least and self._fits([*packs, _Pack(degree=degree)]):
                best, least = _Pack(degree=degree), max(busiest, work)
        if best is not None and not best.ids:
            packs.append(best)
        return best

    def _fits(self, packs: list[_Pack]) -> bool:
        return fit_together([pack.degree for pack in packs], self.topology)

    def _filled(
        self, packs: list[_Pack], ids: list[int], later: list[int]
    ) -> tuple[list[_Pack], list[int]]:
        """The groups grown over idle ranks."""
        while sum(pack.degree for pack in packs) < self.topology.world_size:
            if not self._grown(packs):
                return self._together(ids)
        return packs, later

    def _grown(self, packs: list[_Pack]) -> bool:
        """Whether a group of the smallest degree could take the next one."""
        narrowest = min(pack.degree for pack in packs)
        wider = [d for d in self.degrees if d > narrowest]
        for pack in packs:
            if wider and pack.degree == narrowest:
                pack.degree = wider[0]
                if self._fits(packs):
                    return True
                pack.degree = narrowest
        return False

    def _together(self, ids: list[int]) -> tuple[list[_Pack], list[int]]:
        """One group of the widest degree with every sequence that fits, longest first."""
        whole, later = _Pack(degree=self.degrees[-1]), []
        for i in ids:
            if whole.tokens + self.lengths[i] <= self.cap * whole.degree:
                self._add(whole, i)
            else:
                later.append(i)
        return [whole], later


def megatron_micro_batches(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, strategy: str, cap: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches of that schedule. Every sequence must fit on all ranks together."""
    degrees = (1,) if strategy == "local" else aligned_degrees(topology)
    scheduler, left, made = _Scheduler(lengths, topology, degrees, cap), falling(lengths), []
    while left:
        packs, left = scheduler.micro_batch(left)
        ranges = rank_ranges([pack.degree for pack in packs], topology)
        groups = [
            one_strategy_group(ranks, pack.ids, (lengths, topology, cost, strategy))
            for ranks, pack in zip(ranges, packs, strict=True)
        ]
        made.append(MicroBatch(groups=widest_first(groups)))
    return tuple(made)
