"""Run a plan without running it: every rank's computing, transfers, waiting and memory over time.

    simulate(plan, topology, cost)                          what the closed form only estimates,
                                                            priced
    simulate(plan, topology, cost, detail=CLOSED_FORM)      the closed form itself, event by event

A micro-batch is a constant and then a number of equal layers, forward and back. In every layer

1. each rank runs the linear layers of all its tokens;
2. then the attention of its groups, widest first. Ulysses waits for the whole group, moves half of
   its bytes, computes, and moves the other half (a hybrid likewise, inside nodes); an all-gather
   does it with keys, values and their gradients; a ring goes through the steps of
   `schedule/attention.py` (see `ring.py`).

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

from hf_flexseq.cost import CostModel, Int64Array, remapped_ns
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.simulate.ring import RingTimes, crosses_nodes, moving_ns, ring_steps, ring_times
from hf_flexseq.simulate.work import LINEAR, RINGS, GroupWork, make_work, spread, weights
from hf_flexseq.timeline import Recorder, Timeline
from hf_flexseq.topology import Topology

__all__ = ["CLOSED_FORM", "Detail", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """How finely to look.

    layers: grouped layers a micro-batch is cut into, forward and back; 0 takes each group in one
    piece, linear layers included. overlap: ring transfers travel beside the attention; what
    Ulysses hides counts as attention either way. contention: transfers that meet share the link.
    """

    layers: int = 4
    overlap: bool = True
    contention: bool = True

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
    """The timeline of one optimizer step, in nanoseconds.

    sync: "lockstep", all ranks begin every micro-batch together, or "free", they meet only inside
    groups. Raises ValueError for a cost model that cannot price the plan's strategies.
    """
    if sync not in ("lockstep", "free"):
        raise ValueError(f"sync={sync!r} is neither lockstep nor free")
    run = _Run(topology, cost, sync=sync, detail=detail or Detail())
    for micro_batch in plan.micro_batches:
        run.micro_batch(micro_batch, plan.lengths)
    return run.recorder.timeline(int(run.clock.max()), "ns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remapped:
    """Nanoseconds of every rank in a remapped micro-batch, by piece: linear layers, and moving
    tokens to their groups and back."""

    linear_ns: tuple[int, ...]
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]


class _Run:
    """The clocks of all ranks on their way through a plan."""

    def __init__(self, topology: Topology, cost: CostModel, *, sync: str, detail: Detail) -> None:
        self.topology, self.cost, self.sync, self.detail = topology, cost, sync, detail
        self.clock = np.zeros(topology.world_size, dtype=np.int64)
        self.recorder = Recorder(topology.world_size)
        self.states = cost.state_bytes + cost.sharded_state_bytes / topology.world_size

    def micro_batch(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> None:
        layers = self.detail.layers
        held = np.array(micro_batch.tokens_per_rank(lengths, self.topology.world_size))
        works = [
            make_work(place, group, lengths, self.topology, self.cost, layers=layers)
            for place, group in enumerate(micro_batch.groups)
        ]
        self._begin((held > 0) | micro_batch.remap)
        kept = (
            [1.0]
            if layers == 0
            else [k / layers for k in (*range(1, layers + 1), *range(layers - 1, -1, -1))]
        )
        even = self._remapped(micro_batch, lengths, len(kept)) if micro_batch.remap else None
        for piece, share in enumerate(kept):
            self._piece(works, piece, even)
            self._hold(held * share)
        self._hold(0 * held)

    def _remapped(self, micro_batch: MicroBatch, lengths: Sequence[int], pieces: int) -> Remapped:
        """By piece: linear layers on evenly spread tokens, and half of the transfers to the groups
        and back."""
        _, linear, moved = remapped_ns(self.cost, micro_batch, lengths, self.topology)
        halves = spread(moved, [1] * 2 * pieces)
        return Remapped(
            linear_ns=spread(linear, weights(LINEAR, pieces // 2)),
            before_ns=halves[::2],
            after_ns=halves[1::2],
        )

    def _begin(self, works: NDArray[np.bool_]) -> None:
        """The constant of a micro-batch, on every rank in lockstep and otherwise on those that
        work in it."""
        if self.sync == "lockstep":
            self.clock[:] = self.clock.max()
            self.recorder.wait_until(int(self.clock[0]))
            works = np.ones_like(works)
        self.recorder.begin_micro_batch(int(self.clock[works].min()))
        stops = self.clock + np.where(works, self.cost.micro_batch_ns, 0)
        self._add(0, self.clock, stops, kind="constant", label="per micro-batch")
        self.clock = stops

    def _piece(self, works: Sequence[GroupWork], piece: int, even: Remapped | None) -> None:
        """One layer, forward or backward: linear layers of all groups, then their attention; or
        group after group. even: of a remapped micro-batch, where all ranks meet before and after
        attention."""
        if even is not None:
            self._all_ranks(even.linear_ns[piece], "compute", "linear")
            self._all_ranks(even.before_ns[piece], "transfer", "remap")
        rounds = [[work] for work in works] if self.detail.layers == 0 else [works]
        for together in rounds:
            for work in together if even is None else ():
                self._everyone(work, work.linear_ns[piece], "linear")
            for work in together:
                self._everyone(work, work.latency_ns[piece], "latency", "transfer")
                if work.group.strategy in RINGS:
                    self._ring(work, piece)
                else:
                    self._together(work, work.before_ns[piece])
                    self._everyone(work, work.attention_ns[piece], "attention")
                    self._together(work, work.after_ns[piece])

        if even is not None:
            self._all_ranks(even.after_ns[piece], "transfer", "remap")

    def _all_ranks(self, duration: int, kind: str, label: str) -> None:
        """All ranks are busy for `duration`, as soon as the last one is free."""
        self.clock[:] = self.clock.max()
        self._add(0, self.clock, self.clock + duration, kind=kind, label=label)
        self.clock += duration

    def _everyone(self, work: GroupWork, duration: int, label: str, kind: str = "compute") -> None:
        """Each rank of the group is busy for `duration` from when it is free."""
        ranks = _slice(work.group)
        stops = self.clock[ranks] + duration
        self._add(work.group.start, self.clock[ranks], stops, kind=kind, label=label, work=work)
        self.clock[ranks] = stops

    def _together(self, work: GroupWork, duration: int) -> None:
        """All ranks of the group exchange, as soon as the last one is there."""
        group = work.group
        if group.degree > 1:
            self.clock[_slice(group)] = self.clock[_slice(group)].max()
            what = "all-gather" if group.strategy == "allgather" else "all-to-all"
            spans = (
                self.topology.spans_nodes(group.start, group.stop) and group.strategy != "hybrid"
            )
            link = _link(spans)
            self._everyone(work, duration, f"{what}, {link}", "transfer")

    def _ring(self, work: GroupWork, piece: int) -> None:
        group, layers = work.group, self.detail.layers
        phase = "both" if layers == 0 else "forward" if piece < layers else "backward"
        times = ring_times(
            self.clock[_slice(group)],
            work.attention_ns[piece],
            ring_steps(group.strategy, group.degree),
            moving_ns(group, work.trip_bytes, self.topology, self.cost, phase=phase),
            overlap=self.cost.ring_overlap if self.detail.overlap else 0.0,
            contention=self.detail.contention,
        )
        self._add_ring(work, times)
        self.clock[_slice(group)] = times.stop

    def _add_ring(self, work: GroupWork, times: RingTimes) -> None:
        start, free = work.group.start, times.begin[0]
        crosses = crosses_nodes(work.group, self.topology)
        for t in range(len(times.begin)):
            label = f"ring, {_link(bool(crosses[t].any()))}"
            self._add(start, free, times.begin[t], kind="transfer", label=label, work=work)
            self._add(
                start, times.depart[t], times.arrive[t], kind="overlapped", label=label, work=work
            )
            self._add(
                start, times.begin[t], times.end[t], kind="compute", label="attention", work=work
            )
            free = times.end[t]
        self._add(start, free, times.stop, kind="transfer", label="ring, results", work=work)

    def _add(
        self,
        start_rank: int,
        starts: Int64Array,
        stops: Int64Array,
        *,
        kind: str,
        label: str,
        work: GroupWork | None = None,
    ) -> None:
        place, degree = (None, 0) if work is None else (work.place, work.group.degree)
        self.recorder.add(
            start_rank,
            starts.tolist(),
            stops.tolist(),
            kind=kind,
            label=label,
            group=place,
            degree=degree,
        )

    def _hold(self, tokens: NDArray[np.float64]) -> None:
        held = self.states + self.cost.token_bytes * tokens
        self.recorder.hold(self.clock.tolist(), held.astype(np.int64).tolist())


def _slice(group: Group) -> slice:
    return slice(group.start, group.stop)


def _link(spans_nodes: bool) -> str:
    return "between nodes" if spans_nodes else "within a node"
