"""FlexSP (arXiv 2412.01523): the workflow of its section 4.3 around the program of `milp.py`,
degree 1 allowed.

1. For M from the fewest micro-batches that memory allows to four more, `blaster.py` cuts the
   sequences into M pieces.
2. Each piece is put into buckets (`buckets.py`) and its groups are found by the MILP, which starts
   from the best plan with one degree for all of the piece's groups.
3. The members of a bucket go to its groups longest first, widest group first; groups are cut from
   rank 0 by falling degree, which aligns them. The M whose plan takes least time wins.

An M whose lower bound is no better than the best plan in hand is not solved: that cannot change
the result. As published, it plans for lockstep only. Rejected: the released code's random draw of
a bucket's members, its time limit per MILP, and degree 1 left out of its options (the paper has
it).
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array, step_ns
from hf_flexseq.plan import MicroBatch, widest_first
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.planner.published.aligned import aligned_degrees, rank_ranges, slots, units
from hf_flexseq.planner.published.blaster import blast
from hf_flexseq.planner.published.buckets import Buckets, bucketed
from hf_flexseq.planner.published.milp import Chosen, GroupingTask, slowest_ns, solve
from hf_flexseq.planner.static import best_fit, least_loaded, one_strategy_group
from hf_flexseq.topology import Topology

TRIALS = 5  # numbers of micro-batches


def flexsp_micro_batches(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, strategy: str, cap: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches of FlexSP's plan. Every sequence must fit on all ranks together."""
    return FlexSP(lengths, topology, cost, strategy=strategy, cap=cap).plan()


class FlexSP:
    """One step's planning. `lengths` in tokens; `cap` tokens per rank and micro-batch."""

    def __init__(
        self,
        lengths: Sequence[int],
        topology: Topology,
        cost: CostModel,
        *,
        strategy: str,
        cap: int,
    ) -> None:
        self.lengths, self.topology, self.cost, self.strategy, self.cap = (
            lengths,
            topology,
            cost,
            strategy,
            cap,
        )
        self.degrees = aligned_degrees(topology) if strategy != "local" else (1,)
        self.room = cap * topology.world_size

    def plan(self) -> tuple[MicroBatch, ...]:
        """The fastest plan over the numbers of micro-batches tried."""
        fewest = -(-sum(self.lengths) // self.room)
        best, least = None, NEVER
        for batches in range(fewest, fewest + len(self.lengths) + TRIALS):
            if best is not None and batches >= fewest + TRIALS:
                break
            made = self._with(blast(self.lengths, batches), least)
            taken = (
                step_ns(self.cost, made, self.lengths, self.topology, sync="lockstep")
                if made
                else NEVER
            )
            if made and taken < least:
                best, least = made, taken
        assert best is not None, "every sequence alone in a micro-batch is a plan"
        return best

    def _with(self, pieces: list[list[int]], beat: int) -> tuple[MicroBatch, ...] | None:
        """The micro-batches of these pieces; None when memory does not hold one, or `beat` is out
        of reach."""
        bounds = [self._bound(piece) for piece in pieces]
        made = []
        for piece in pieces:
            if sum(bounds) >= beat or sum(self.lengths[i] for i in piece) > self.room:
                return None
            micro_batch = self._micro_batch(piece)
            if micro_batch is None:
                return None
            made.append(micro_batch)
            bounds[len(made) - 1] = step_ns(
                self.cost, (micro_batch,), self.lengths, self.topology, sync="lockstep"
            )
        return tuple(made)

    def _bound(self, piece: list[int]) -> int:
        """Nanoseconds that no groups can undercut on this piece."""
        times = self._times(np.array([self.lengths[i] for i in piece], dtype=np.int64))
        areas = (times * np.array(self.degrees)).min(axis=1)
        return int(areas.sum()) // self.topology.world_size + self.cost.micro_batch_ns

    def _times(self, tokens: Int64Array) -> Int64Array:
        """[K, D] nanoseconds of each length at each degree."""
        spans = [self.topology.spans_nodes(0, degree) for degree in self.degrees]
        shapes = zip(self.degrees, spans, strict=True)
        return np.stack(
            [cheapest(self.cost, tokens, shape, self.strategy)[0] for shape in shapes], axis=1
        )

    def _micro_batch(self, piece: list[int]) -> MicroBatch | None:
        buckets = bucketed(piece, self.lengths, self.room)
        task = self._task(buckets)
        starts = [
            start
            for column in range(len(self.degrees))
            if (start := self._one_degree(task, column))
        ]
        if not starts:
            return None
        start = min(starts, key=lambda chosen: slowest_ns(task, chosen))
        found = solve(task, start)
        return self._dealt(buckets, min(start, found, key=lambda chosen: slowest_ns(task, chosen)))

    def _task(self, buckets: Buckets) -> GroupingTask:
        world, nodes = self.topology.world_size, self.topology.nodes
        taken = {
            unit: tuple(slots(self.topology, d, unit) if d >= unit else 0 for d in self.degrees)
            for unit in units(self.topology)
        }
        return GroupingTask(
            tokens=buckets.longest,
            counts=buckets.counts,
            times=self._times(buckets.longest),
            latency=tuple(self.cost.latency_ns(degree) for degree in self.degrees),
            degrees=self.degrees,
            copies=tuple(self._copies(degree) for degree in self.degrees),
            cap=self.cap,
            ranks=world,
            slots=tuple((nodes * (self.topology.ranks_per_node // u), taken[u]) for u in taken),
        )

    def _copies(self, degree: int) -> int:
        """How many groups of one degree fit side by side."""
        node = self.topology.ranks_per_node
        return (
            self.topology.nodes * (node // degree)
            if degree <= node
            else self.topology.world_size // degree
        )

    def _one_degree(self, task: GroupingTask, column: int) -> Chosen | None:
        """Groups of one degree, evenly loaded, or packed where memory is too tight; None when it
        is too small."""
        rows = np.repeat(np.arange(len(task.counts)), task.counts)[::-1].tolist()
        tokens = [int(task.tokens[q]) for q in rows]
        room, count = task.cap * task.degrees[column], task.copies[column]
        if tokens[0] > room:
            return None
        even = least_loaded(tokens, [int(task.times[q, column]) for q in rows], count, room)
        bins = even or best_fit(tokens, room)
        if len(bins) > count:
            return None
        members = [
            np.bincount([rows[i] for i in there], minlength=len(task.counts)) for there in bins
        ]
        return [(column, tuple(counts.tolist())) for counts in members]

    def _dealt(self, buckets: Buckets, chosen: Chosen) -> MicroBatch:
        """The groups on their ranks, with the sequences of the buckets."""
        chosen = sorted(chosen, key=lambda group: (-self.degrees[group[0]], group[1]))
        left = [list(reversed(ids)) for ids in buckets.members]
        degrees = [self.degrees[column] for column, _ in chosen]
        groups = []
        for ranks, (_, counts) in zip(rank_ranges(degrees, self.topology), chosen, strict=True):
            ids = [left[q].pop() for q, count in enumerate(counts) for _ in range(count)]
            groups.append(
                one_strategy_group(
                    ranks, ids, (self.lengths, self.topology, self.cost, self.strategy)
                )
            )
        return MicroBatch(groups=widest_first(groups))
