"""What every rank does when, as frozen data: the simulator writes it, `view` draws it.

A rank has two lanes. On the main lane stand, one after the other, what it computes, what it sends
and receives while it can do nothing else, and what it waits for: together they fill the step.
Beside it, kind `overlapped`, stand transfers that travel while the rank computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.plan import MicroBatch, Plan

# what a pipeline's stages compute
ACTION_KINDS = ("forward", "backward", "input gradient", "weight gradient")
MAIN_KINDS = ("compute", "transfer", "constant", "wait", *ACTION_KINDS)
KINDS = (*MAIN_KINDS, "overlapped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something `rank` does from `start` to `stop` (in the timeline's unit) for one micro-batch,
    or one chunk.

    kind: one of `KINDS`. group: index in the micro-batch, None for what belongs to no group.
    degree: of that group, 0 without one. label: what exactly, with the link it uses.
    """

    rank: int
    start: int
    stop: int
    kind: str
    micro_batch: int
    group: int | None
    degree: int
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """From `at` on, `rank` holds `bytes`."""

    rank: int
    at: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One optimizer step on `world_size` ranks.

    events: by rank, then by time. memory: by rank, then by time; empty when nobody knows. starts:
    when each micro-batch begins on its first rank; empty for a pipeline, whose chunks overlap.
    stop: when the last rank is done. unit: "ns" or "tokens".
    """

    world_size: int
    events: tuple[Event, ...]
    memory: tuple[Memory, ...]
    starts: tuple[int, ...]
    stop: int
    unit: str

    def share(self, kind: str) -> float:
        """Which part of all ranks' time goes into events of `kind`; the kinds of the main lane add
        up to one."""
        spent = sum(event.stop - event.start for event in self.events if event.kind == kind)
        return spent / (self.world_size * self.stop) if self.stop else 0.0

    @property
    def peak_bytes(self) -> int:
        """The most bytes any rank holds at any time."""
        return max((sample.bytes for sample in self.memory), default=0)


class Recorder:
    """Collects the events of a step, rank by rank; gaps on the main lane become waiting."""

    def __init__(self, world_size: int) -> None:
        self._lanes: list[list[Event]] = [[] for _ in range(world_size)]
        self._beside: list[list[Event]] = [[] for _ in range(world_size)]
        self._memory: list[list[Memory]] = [[] for _ in range(world_size)]
        self._starts: list[int] = []

    def begin_micro_batch(self, at: int) -> None:
        self._starts.append(at)

    def add(
        self,
        start_rank: int,
        starts: Sequence[int],
        stops: Sequence[int],
        *,
        kind: str,
        group: int | None,
        degree: int,
        label: str,
    ) -> None:
        """One event for each of the ranks from `start_rank` on, of the micro-batch begun last;
        empty ones are left out."""
        for offset, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if stop > start:
                event = Event(
                    rank=start_rank + offset,
                    start=start,
                    stop=stop,
                    kind=kind,
                    micro_batch=len(self._starts) - 1,
                    group=group,
                    degree=degree,
                    label=label,
                )
                self._append(event)

    def _append(self, event: Event) -> None:
        if event.kind == "overlapped":
            _extend(self._beside[event.rank], event)
            return
        lane = self._lanes[event.rank]
        free = lane[-1].stop if lane else 0
        assert event.start >= free, (
            f"rank {event.rank} does two things at {event.start}: {lane[-1:]} and {event}"
        )
        if event.start > free:
            _extend(lane, _waiting(event, free))
        _extend(lane, event)

    def hold(self, ats: Sequence[int], held: Sequence[int]) -> None:
        """Bytes of every rank from now on."""
        for rank, (at, size) in enumerate(zip(ats, held, strict=True)):
            self._memory[rank].append(Memory(rank=rank, at=at, bytes=size))

    def wait_until(self, at: int) -> None:
        """All ranks idle until `at`."""
        for rank, lane in enumerate(self._lanes):
            free = lane[-1].stop if lane else 0
            if free < at:
                _extend(lane, _idle(rank, free, at, len(self._starts) - 1))

    def timeline(self, stop: int, unit: str) -> Timeline:
        self.wait_until(stop)
        return Timeline(
            world_size=len(self._lanes),
            events=tuple(
                event
                for lanes in zip(self._lanes, self._beside, strict=True)
                for lane in lanes
                for event in lane
            ),
            memory=tuple(sample for samples in self._memory for sample in samples),
            starts=tuple(self._starts),
            stop=stop,
            unit=unit,
        )


def sketch(plan: Plan, world_size: int, measured_s: Sequence[float] | None = None) -> Timeline:
    """A plan without a cost model: a rank is busy in proportion to its tokens.

    The unit is tokens; with the `measured_s` seconds of each micro-batch it is time, the fullest
    rank of a micro-batch being busy all of it.
    """
    recorder, now = Recorder(world_size), 0
    for index, micro_batch in enumerate(plan.micro_batches):
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, world_size))
        length = fullest if measured_s is None else round(measured_s[index] * 1e9)
        recorder.begin_micro_batch(now)
        _sketch_micro_batch(
            recorder, micro_batch, plan.lengths, world_size, now=now, scale=(length, fullest)
        )
        now += length
        recorder.wait_until(now)
    return recorder.timeline(now, "tokens" if measured_s is None else "ns")


def _sketch_micro_batch(
    recorder: Recorder,
    micro_batch: MicroBatch,
    lengths: Sequence[int],
    world_size: int,
    *,
    now: int,
    scale: tuple[int, int],
) -> None:
    held, (length, fullest) = [0] * world_size, scale
    for index, group in enumerate(micro_batch.groups):
        before = held[group.start : group.stop]
        after = [tokens + group.tokens_per_rank(lengths) for tokens in before]
        held[group.start : group.stop] = after
        starts, stops = (
            [now + tokens * length // fullest for tokens in side] for side in (before, after)
        )
        recorder.add(
            group.start,
            starts,
            stops,
            kind="compute",
            group=index,
            degree=group.degree,
            label=group.strategy,
        )


def _waiting(event: Event, since: int) -> Event:
    """The wait from `since` until `event` can begin."""
    return Event(
        rank=event.rank,
        start=since,
        stop=event.start,
        kind="wait",
        micro_batch=event.micro_batch,
        group=event.group,
        degree=event.degree,
        label="wait for the group",
    )


def _idle(rank: int, start: int, stop: int, micro_batch: int) -> Event:
    return Event(
        rank=rank,
        start=start,
        stop=stop,
        kind="wait",
        micro_batch=micro_batch,
        group=None,
        degree=0,
        label="wait for the other ranks",
    )


def _extend(lane: list[Event], event: Event) -> None:
    """Append `event`, joined with the one before when that is the same thing going on."""
    if lane and lane[-1].stop == event.start and _what(lane[-1]) == _what(event):
        last = lane.pop()
        event = Event(
            rank=last.rank,
            start=last.start,
            stop=event.stop,
            kind=last.kind,
            micro_batch=last.micro_batch,
            group=last.group,
            degree=last.degree,
            label=last.label,
        )
    lane.append(event)


def _what(event: Event) -> tuple[str, int, int | None, str]:
    return event.kind, event.micro_batch, event.group, event.label
