"""Run a plan without running it: every rank's computing, transfers, waiting and memory over time.

    simulate(plan, topology, cost)                      prices what the closed form estimates
    simulate(plan, topology, cost, detail=CLOSED_FORM)  the closed form itself, event by event

A micro-batch is a constant and then a number of equal layers, forward and back. In every layer

1. each rank runs the linear layers of all its tokens;
2. then the attention of its groups, widest first. Ulysses waits for the whole group, moves half of
   its bytes, computes, and moves the other half (a hybrid likewise, inside nodes); a ring goes
   through the steps of `schedule/attention.py` (see `ring.py`).

What the closed form cannot see follows: ranks in several groups wait for each other in every
layer, not once per micro-batch; linear layers do not make up for attention; ring steps hide their
transfers only as far as they last.

A cost model counts whole models and layers are identical, so a micro-batch is cut into a few
grouped layers (`Detail.layers`): they show the rhythm of all of them, at an eighth of the price
and within half a percent of the seconds. Groups that share a node are nested, and a rank runs them
one after the other; so transfers of different groups never meet on a link, and a measured
bandwidth already holds what the ranks of one group do to each other. What can meet is a ring's two
directions in the backward.

Every rank only waits for ranks of its own groups, so clocks are computed group by group in the
plan's order: the same times that a queue of events would give, without the queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.registry import RINGS
from hf_flexseq.simulate.ring import (
    RingTimes,
    crosses_nodes,
    ring_steps,
    ring_times,
    ring_traffic_ns,
)
from hf_flexseq.simulate.work import GroupWork, make_work
from hf_flexseq.timeline import Recorder, Timeline
from hf_flexseq.topology import Topology

__all__ = ["CLOSED_FORM", "Detail", "most_events", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """How finely a simulation looks."""

    layers: int = 4
    """Grouped layers that a micro-batch is cut into, forward and back. With 0 a group is one
    piece, its linear layers included."""
    overlap: bool = True
    """Whether a ring's transfers travel beside the attention. What Ulysses hides counts as
    attention either way."""
    contention: bool = True
    """Whether transfers that meet share the link."""

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ValueError(f"layers={self.layers}: give 0 or more")


CLOSED_FORM = Detail(layers=0, overlap=False, contention=False)


def simulate(
    plan: Plan,
    topology: Topology,
    cost: CostModel,
    *,
    sync: str = "lockstep",
    detail: Detail | None = None,
) -> Timeline:
    """Return the timeline of one optimizer step, in nanoseconds.

    sync: "lockstep", all ranks begin every micro-batch together, or "free", they meet only inside
    groups.

    Raises ValueError for a cost model that cannot price the plan's strategies.
    """
    if sync not in ("lockstep", "free"):
        raise ValueError(f"sync={sync!r} is neither lockstep nor free")
    cost.check_countable(plan.lengths, topology.world_size)
    simulation = _Simulation(topology, cost, sync=sync, detail=detail or Detail())
    for micro_batch in plan.micro_batches:
        simulation.run_micro_batch(micro_batch, plan.lengths)
    return simulation.recorder.timeline(int(simulation.clock.max()), "ns")


def most_events(plan: Plan, topology: Topology, detail: Detail) -> int:
    """Return an upper bound on the events and changes of memory of a simulated step."""
    passes = max(1, 2 * detail.layers)
    count = 0
    for micro_batch in plan.micro_batches:
        # Of every rank: the constant, waits and, in each pass, memory.
        count += topology.world_size * (3 + passes)
        for group in micro_batch.groups:
            # Of its ranks in each pass: linear layers, latency, waits, transfers, attention of
            # full layers and of the others, scans and what they exchange.
            of_a_pass = 11
            if group.strategy in RINGS:
                of_a_pass += 4 * group.degree  # a ring has at most so many steps
                of_a_pass += 4  # halos and waits for them
            count += group.degree * of_a_pass * passes
    return count


class _Simulation:
    """The clocks of all ranks on their way through a plan."""

    def __init__(self, topology: Topology, cost: CostModel, *, sync: str, detail: Detail) -> None:
        self.topology = topology
        self.cost = cost
        self.sync = sync
        self.detail = detail
        self.near_label = "attention, " + " and ".join(str(kind.reach) for kind in cost.kinds)
        self.clock = np.zeros(topology.world_size, dtype=np.int64)  # [world] when a rank is free
        self.recorder = Recorder(topology.world_size)
        self.state_bytes = cost.state_bytes + cost.sharded_state_bytes / topology.world_size

    def run_micro_batch(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> None:
        """Advance all clocks through one micro-batch: its constant, then pass after pass."""
        layers = self.detail.layers
        tokens = np.array(
            micro_batch.tokens_per_rank(lengths, self.topology.world_size)
        )  # [world]
        works = [
            make_work(index, group, lengths, self.topology, self.cost, layers=layers)
            for index, group in enumerate(micro_batch.groups)
        ]
        self._begin_micro_batch(tokens > 0)
        for number, share in enumerate(_activation_shares(layers)):
            self._run_pass(works, number)
            self._record_memory(tokens * share)
        self._record_memory(0 * tokens)

    def _begin_micro_batch(self, works: NDArray[np.bool_]) -> None:
        """Add the constant of a micro-batch on every rank that takes part.

        works: [world] whether a rank has tokens. In lockstep every rank takes part.
        """
        if self.sync == "lockstep":
            self.clock[:] = self.clock.max()
            self.recorder.wait_until(int(self.clock[0]))
            works = np.ones_like(works)
        self.recorder.begin_micro_batch(int(self.clock[works].min()))
        stops = self.clock + np.where(works, self.cost.micro_batch_ns, 0)
        self._record(0, self.clock, stops, kind="constant", label="per micro-batch")
        self.clock = stops

    def _run_pass(self, works: Sequence[GroupWork], number: int) -> None:
        """Advance through one layer, forward or backward.

        Linear layers of all groups come first, then the attention of one group after the other; in
        a single pass (`layers=0`) each group has its linear layers and its attention together.
        """
        rounds = [[work] for work in works] if self.detail.layers == 0 else [works]
        for groups in rounds:
            for work in groups:
                self._busy(work, work.linear_ns[number], "linear")
            for work in groups:
                self._attend(work, number)

    def _attend(self, work: GroupWork, number: int) -> None:
        """Advance a group's ranks through its attention and transfers in pass `number`."""
        self._busy(work, work.waits_ns[number], "launches, latency", "transfer")
        if work.group.strategy in RINGS:
            self._run_ring(work, number)
            if self.cost.kinds:
                self._exchange(work, work.before_ns[number], "halo")
                self._busy(work, work.near_ns[number], self.near_label)
                self._exchange(work, work.after_ns[number], "halo")
        else:
            self._exchange(work, work.before_ns[number])
            self._busy(work, work.attention_ns[number], "attention")
            self._busy(work, work.near_ns[number], self.near_label)
            self._exchange(work, work.after_ns[number])
        if self.cost.recurrent:
            self._exchange(work, work.summaries_ns[number], "summaries")
            self._busy(work, work.scan_ns[number], "scan")

    def _busy(self, work: GroupWork, duration: int, label: str, kind: str = "compute") -> None:
        """Occupy each rank of a group for `duration`, from when that rank is free."""
        ranks = _ranks(work.group)
        stops = self.clock[ranks] + duration
        self._record(work.group.start, self.clock[ranks], stops, kind=kind, label=label, work=work)
        self.clock[ranks] = stops

    def _exchange(self, work: GroupWork, duration: int, collective: str = "all-to-all") -> None:
        """Occupy all ranks of a group with a collective, from when the last of them is free."""
        group = work.group
        if group.degree == 1:
            return
        self.clock[_ranks(group)] = self.clock[_ranks(group)].max()
        spans_nodes = self.topology.spans_nodes(group.start, group.stop)
        link = _link(spans_nodes and group.strategy != "hybrid")
        self._busy(work, duration, f"{collective}, {link}", "transfer")

    def _run_ring(self, work: GroupWork, number: int) -> None:
        """Advance a group's ranks through one ring attention."""
        group = work.group
        if self.detail.layers == 0:
            phase = "both"
        elif number < self.detail.layers:
            phase = "forward"
        else:
            phase = "backward"
        times = ring_times(
            self.clock[_ranks(group)],
            work.attention_ns[number],
            ring_steps(group.strategy, group.degree),
            ring_traffic_ns(group, work.trip_bytes, self.topology, self.cost, phase=phase),
            overlap=self.cost.ring_overlap if self.detail.overlap else 0.0,
            contention=self.detail.contention,
        )
        self._record_ring(work, times)
        self.clock[_ranks(group)] = times.stop

    # ---- events

    def _record_ring(self, work: GroupWork, times: RingTimes) -> None:
        """Record every step of a ring: waiting for its transfer, the transfer, the attention."""
        start = work.group.start
        crosses = crosses_nodes(work.group, self.topology)  # [steps, degree]
        free = times.begin[0]
        for t, (begin, end) in enumerate(zip(times.begin, times.end, strict=True)):
            label = f"ring, {_link(bool(crosses[t].any()))}"
            depart, arrive = times.depart[t], times.arrive[t]
            self._record(start, free, begin, kind="transfer", label=label, work=work)
            self._record(start, depart, arrive, kind="overlapped", label=label, work=work)
            self._record(start, begin, end, kind="compute", label="attention", work=work)
            free = end
        self._record(start, free, times.stop, kind="transfer", label="ring, results", work=work)

    def _record(
        self,
        start_rank: int,
        starts: Int64Array,
        stops: Int64Array,
        *,
        kind: str,
        label: str,
        work: GroupWork | None = None,
    ) -> None:
        """Record one event on each of some consecutive ranks.

        starts, stops: [ranks] nanoseconds, beginning with `start_rank`.
        """
        self.recorder.add(
            start_rank,
            starts.tolist(),
            stops.tolist(),
            kind=kind,
            label=label,
            group=None if work is None else work.index,
            degree=0 if work is None else work.group.degree,
        )

    def _record_memory(self, tokens: NDArray[np.float64]) -> None:
        """Record the bytes of every rank. tokens: [world] whose activations each rank holds."""
        total = self.state_bytes + self.cost.token_bytes * tokens  # [world]
        self.recorder.hold(self.clock.tolist(), total.astype(np.int64).tolist())


def _activation_shares(layers: int) -> list[float]:
    """Return the share of a micro-batch's activations that is alive after each pass.

    Two layers: 1/2, 1 in the forward, 1/2, 0 in the backward.
    """
    if layers == 0:
        return [1.0]
    forward = range(1, layers + 1)
    backward = range(layers - 1, -1, -1)
    return [alive / layers for alive in (*forward, *backward)]


def _ranks(group: Group) -> slice:
    """Return where a group's ranks stand in an array of [world]."""
    return slice(group.start, group.stop)


def _link(spans_nodes: bool) -> str:
    """Return what the timeline's labels call a link."""
    return "between nodes" if spans_nodes else "within a node"
