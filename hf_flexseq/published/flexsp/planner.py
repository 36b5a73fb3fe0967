"""FlexSP (arXiv 2412.01523): the workflow of its section 4.3, Algorithm 1, around the program of
`milp.py`, degree 1 allowed.

1. `plan`: try the fewest micro-batches that memory allows, and up to four more. For each number M
   cut the sequences into M micro-batches (`blaster.py`, section 4.2).
2. `_solved`: put each micro-batch's sequences into buckets (`buckets.py`, section 4.1.3) and find
   its groups by the mixed-integer program (`milp.py`, section 4.1), which starts from the best
   plan with one degree for all groups.
3. `_assigned`: the members of a bucket go to its groups longest first, widest group first; groups
   are cut from rank 0 by falling degree, which aligns them.
4. `plan`: the M whose plan takes least seconds wins.

Added: an M whose lower bound is not better than the best known plan is left out, which cannot
change the result. As published, it plans for lockstep only. Left out: the program of single
sequences, equations 6 to 10, which the paper replaces by the one with buckets; from the released
code the random draw of a bucket's members, the time limit of a program, and that degree 1 is
missing from its options (the paper has it).

tests/published/test_flexsp.py tries every set of degrees and every assignment on small programs.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from hf_flexseq.cost import Int64Array, step_ns
from hf_flexseq.plan import MicroBatch, widest_first
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.planner.static import best_fit, least_loaded, one_strategy_groups
from hf_flexseq.planner.task import PlanTask
from hf_flexseq.published.aligned_groups import allowed_degrees, rank_ranges, slots_of
from hf_flexseq.published.blaster import blast
from hf_flexseq.published.flexsp.buckets import Buckets, bucketed
from hf_flexseq.published.flexsp.milp import Chosen, GroupingTask, slowest_ns, solve

TRIALS = 5  # numbers of micro-batches, as published


def flexsp_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of FlexSP's plan."""
    return FlexSP(task).plan()


class FlexSP:
    """The planning of one step."""

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.lengths = task.lengths  # tokens
        self.topology = task.topology
        self.cost = task.cost
        self.cap = task.cap  # tokens of a rank in a micro-batch
        self.room = task.cap * task.topology.world_size  # tokens of a micro-batch
        self.degrees = allowed_degrees(task)  # ascending

    # ---- steps 1 and 4: the number of micro-batches

    def plan(self) -> tuple[MicroBatch, ...]:
        """Return the fastest plan over the numbers of micro-batches tried."""
        fewest = -(-sum(self.lengths) // self.room)
        best = None
        least = NEVER
        # More than TRIALS numbers only until memory allows a first plan.
        for count in range(fewest, fewest + len(self.lengths) + TRIALS):
            if best is not None and count >= fewest + TRIALS:
                break
            micro_batches = self._with(blast(self.lengths, count), least)
            if not micro_batches:
                continue
            nanoseconds = self._step_ns(micro_batches)
            if nanoseconds < least:
                best = micro_batches
                least = nanoseconds
        assert best is not None, "every sequence alone in a micro-batch is a plan"
        return best

    def _with(self, cut: list[list[int]], to_beat: int) -> tuple[MicroBatch, ...] | None:
        """Return the micro-batches with these ids, solved one by one.

        None when memory does not hold one of them, or when a plan of `to_beat` nanoseconds is out
        of reach.
        """
        nanoseconds = [self._bound(ids) for ids in cut]  # of each: its bound, until it is solved
        micro_batches: list[MicroBatch] = []
        for index, ids in enumerate(cut):
            tokens = sum(self.lengths[i] for i in ids)
            if sum(nanoseconds) >= to_beat or tokens > self.room:
                return None
            micro_batch = self._solved(ids)
            if micro_batch is None:
                return None
            micro_batches.append(micro_batch)
            nanoseconds[index] = self._step_ns((micro_batch,))
        return tuple(micro_batches)

    def _step_ns(self, micro_batches: tuple[MicroBatch, ...]) -> int:
        """Return the nanoseconds of micro-batches in lockstep."""
        return step_ns(self.cost, micro_batches, self.lengths, self.topology, sync="lockstep")

    def _bound(self, ids: list[int]) -> int:
        """Return nanoseconds that no groups can undercut on these sequences."""
        tokens = np.array([self.lengths[i] for i in ids], dtype=np.int64)
        areas = self._times(tokens) * np.array(self.degrees)  # [sequences, degrees] device-ns
        least = int(areas.min(axis=1).sum())
        return least // self.topology.world_size + self.cost.micro_batch_ns

    def _times(self, tokens: Int64Array) -> Int64Array:
        """Return [lengths, degrees] the nanoseconds of each length [lengths] at each degree."""
        columns = []
        for degree in self.degrees:
            shape = (degree, self.topology.spans_nodes(0, degree))
            nanoseconds, _ = cheapest(self.cost, tokens, shape, self.task.strategy)
            columns.append(nanoseconds)
        return np.stack(columns, axis=1)

    # ---- step 2: buckets and the program

    def _solved(self, ids: list[int]) -> MicroBatch | None:
        """Return a micro-batch with these sequences; None when no single degree holds them."""
        buckets = bucketed(ids, self.lengths, self.room)
        task = self._task(buckets)
        # 1. The best plan with one degree.
        starts = []
        for column in range(len(self.degrees)):
            start = self._one_degree(task, column)
            if start:
                starts.append(start)
        if not starts:
            return None
        start = min(starts, key=lambda chosen: slowest_ns(task, chosen))
        # 2. The program, from there.
        found = solve(task, start)
        best = min(start, found, key=lambda chosen: slowest_ns(task, chosen))
        return self._assigned(buckets, best)

    def _task(self, buckets: Buckets) -> GroupingTask:
        """Return the numbers of the program for these buckets."""
        return GroupingTask(
            tokens=buckets.longest,
            counts=buckets.counts,
            times=self._times(buckets.longest),
            latency=tuple(self._latencies()),
            degrees=self.degrees,
            copies=tuple(self._copies(degree) for degree in self.degrees),
            cap=self.cap,
            ranks=self.topology.world_size,
            slots=slots_of(self.topology),
        )

    def _latencies(self) -> Iterator[int]:
        """Yield the least waits of a group of each degree, in nanoseconds."""
        names = self.cost.strategies(self.task.strategy)
        for degree in self.degrees:
            spans = self.topology.spans_nodes(0, degree)
            yield min((self.cost.waits(degree, name, spans).always for name in names), default=0)

    def _copies(self, degree: int) -> int:
        """Return how many groups of one degree fit side by side."""
        node = self.topology.ranks_per_node
        if degree <= node:
            return self.topology.nodes * (node // degree)
        return self.topology.world_size // degree

    def _one_degree(self, task: GroupingTask, column: int) -> Chosen | None:
        """Return groups of the degree of one column, or None when memory does not hold them.

        Evenly loaded, or packed where memory is too tight for that.
        """
        # 1. The bucket of each sequence, longest first, with its tokens and nanoseconds.
        buckets = np.repeat(np.arange(len(task.counts)), task.counts)[::-1].tolist()  # [sequences]
        tokens = [int(task.tokens[bucket]) for bucket in buckets]
        times = [int(task.times[bucket, column]) for bucket in buckets]
        # 2. Bins: positions in these lists, for each group.
        room = task.cap * task.degrees[column]
        count = task.copies[column]
        if tokens[0] > room:
            return None
        bins = least_loaded(tokens, times, count, room) or best_fit(tokens, room)
        if len(bins) > count:
            return None
        # 3. How many members of each bucket every group has.
        groups = []
        for positions in bins:
            buckets_of_group = [buckets[position] for position in positions]
            members = np.bincount(buckets_of_group, minlength=len(task.counts))  # [buckets]
            groups.append((column, tuple(members.tolist())))
        return groups

    # ---- step 3: ranks and sequences

    def _assigned(self, buckets: Buckets, chosen: Chosen) -> MicroBatch:
        """Return the chosen groups on their ranks, with the sequences of the buckets."""
        widest_groups_first = sorted(chosen, key=lambda group: (-self.degrees[group[0]], group[1]))
        degrees = [self.degrees[column] for column, _ in widest_groups_first]
        ranges = rank_ranges(degrees, self.topology)
        left = [iter(ids) for ids in buckets.members]  # longest first
        members = []
        for _, counts in widest_groups_first:
            ids: list[int] = []
            for bucket, count in zip(left, counts, strict=True):
                ids += islice(bucket, count)
            members.append(ids)
        groups = one_strategy_groups(ranges, members, self.task)
        return MicroBatch(groups=widest_first(groups))
