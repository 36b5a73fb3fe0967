"""Everything every rank does in a step, as frozen data: the simulator writes it, `view` draws it.

A rank has two lanes. On the main lane stand, one after the other, what it computes, what it sends
and receives while it can do nothing else, and what it waits for: together they fill the step.
Beside it, kind `overlapped`, stand transfers that travel while the rank computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_flexseq.plan import Plan

# What a pipeline's stages compute.
ACTION_KINDS = ("forward", "backward", "input gradient", "weight gradient")

# What a rank does one after the other.
MAIN_KINDS = ("compute", "transfer", "constant", "wait", *ACTION_KINDS)
# All kinds; an overlapped event stands beside the main lane.
KINDS = (*MAIN_KINDS, "overlapped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something a rank does for one micro-batch, or one chunk."""

    rank: int
    """The rank that acts."""
    start: int
    """When the event begins, in the timeline's unit."""
    stop: int
    """When the event ends, in the timeline's unit."""
    kind: str
    """One of `KINDS`."""
    micro_batch: int
    """Index of the micro-batch, or of the chunk."""
    group: int | None
    """Index of the group in the micro-batch; None for what belongs to no group."""
    degree: int
    """Ranks of that group; 0 without one."""
    label: str
    """What exactly happens, with the link it uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The bytes of a rank from some time on."""

    rank: int
    """The rank."""
    at: int
    """When its bytes change, in the timeline's unit."""
    bytes: int
    """Bytes that the rank holds from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One optimizer step."""

    world_size: int
    """Number of ranks."""
    events: tuple[Event, ...]
    """All events, by rank, then by time."""
    memory: tuple[Memory, ...]
    """All changes of memory, by rank, then by time; () when nobody knows."""
    starts: tuple[int, ...]
    """When each micro-batch begins on its first rank; () for a pipeline, whose chunks overlap."""
    stop: int
    """When the last rank is done."""
    unit: str
    """Unit of all times: "ns" or "tokens"."""

    def share(self, kind: str) -> float:
        """Return the part of all ranks' time that goes into events of `kind`.

        The kinds of the main lane add up to one.
        """
        if not self.stop:
            return 0.0
        spent = sum(event.stop - event.start for event in self.events if event.kind == kind)
        return spent / (self.world_size * self.stop)

    @property
    def peak_bytes(self) -> int:
        """The most bytes any rank holds at any time."""
        return max((sample.bytes for sample in self.memory), default=0)


class Recorder:
    """Collects the events of a step, rank by rank; gaps on the main lane become waiting."""

    def __init__(self, world_size: int) -> None:
        # [world_size] The events of each rank: one after the other, and beside those.
        self._main: list[list[Event]] = [[] for _ in range(world_size)]
        self._beside: list[list[Event]] = [[] for _ in range(world_size)]
        # [world_size] The changes of each rank's memory.
        self._memory: list[list[Memory]] = [[] for _ in range(world_size)]
        self._starts: list[int] = []  # of each micro-batch

    def begin_micro_batch(self, at: int) -> None:
        """Begin a micro-batch: events that are added from now on belong to it."""
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
        """Add one event for each of the ranks from `start_rank` on; empty ones are left out.

        starts, stops: [ranks] when each rank's event begins and ends. The other arguments are
        fields of `Event`.
        """
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

    def hold(self, ats: Sequence[int], held: Sequence[int]) -> None:
        """Set the bytes of every rank. ats, held: [world_size] from when on, and how many."""
        for rank, (at, size) in enumerate(zip(ats, held, strict=True)):
            self._memory[rank].append(Memory(rank=rank, at=at, bytes=size))

    def wait_until(self, at: int) -> None:
        """Let all ranks idle until `at`."""
        for rank, lane in enumerate(self._main):
            free_at = _free_at(lane)
            if free_at < at:
                _extend(lane, _idle(rank, free_at, at, len(self._starts) - 1))

    def timeline(self, stop: int, unit: str) -> Timeline:
        """Return all that was added; ranks that are done earlier idle until `stop`."""
        self.wait_until(stop)
        events: list[Event] = []
        memory: list[Memory] = []
        for main, beside, samples in zip(self._main, self._beside, self._memory, strict=True):
            events += main
            events += beside
            memory += samples
        return Timeline(
            world_size=len(self._main),
            events=tuple(events),
            memory=tuple(memory),
            starts=tuple(self._starts),
            stop=stop,
            unit=unit,
        )

    def _append(self, event: Event) -> None:
        if event.kind == "overlapped":
            _extend(self._beside[event.rank], event)
            return
        lane = self._main[event.rank]
        free_at = _free_at(lane)
        assert event.start >= free_at, (
            f"rank {event.rank} does two things at {event.start}: {lane[-1:]} and {event}"
        )
        if event.start > free_at:
            _extend(lane, _waiting(event, free_at))
        _extend(lane, event)


def sketch(plan: Plan, world_size: int, measured_s: Sequence[float] | None = None) -> Timeline:
    """Return a plan's timeline without a cost model: a rank is busy in proportion to its tokens.

    The unit is tokens. With `measured_s`, the seconds of each micro-batch, it is time, the fullest
    rank of a micro-batch being busy all of it.
    """
    recorder = Recorder(world_size)
    now = 0
    for index, micro_batch in enumerate(plan.micro_batches):
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, world_size))
        duration = fullest
        if measured_s is not None:
            duration = round(measured_s[index] * 1e9)
        recorder.begin_micro_batch(now)
        # A rank works in its groups one after the other, widest first.
        tokens = [0] * world_size  # of each rank in the groups so far
        for group_index, group in enumerate(micro_batch.groups):
            before = tokens[group.start : group.stop]
            share = group.tokens_per_rank(plan.lengths)
            after = [count + share for count in before]
            tokens[group.start : group.stop] = after
            recorder.add(
                group.start,
                [now + count * duration // fullest for count in before],
                [now + count * duration // fullest for count in after],
                kind="compute",
                group=group_index,
                degree=group.degree,
                label=group.strategy,
            )
        now += duration
        recorder.wait_until(now)
    return recorder.timeline(now, "tokens" if measured_s is None else "ns")


def _free_at(lane: Sequence[Event]) -> int:
    """Return when the last event of a lane ends."""
    return lane[-1].stop if lane else 0


def _waiting(event: Event, since: int) -> Event:
    """Return the wait from `since` until `event` can begin."""
    return replace(event, start=since, stop=event.start, kind="wait", label="wait for the group")


def _idle(rank: int, start: int, stop: int, micro_batch: int) -> Event:
    """Return a wait from `start` to `stop` that belongs to no group."""
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
    if lane and lane[-1].stop == event.start and _activity(lane[-1]) == _activity(event):
        event = replace(lane.pop(), stop=event.stop)
    lane.append(event)


def _activity(event: Event) -> tuple[str, int, int | None, str]:
    """Return what two events have equal when they are one thing going on."""
    return event.kind, event.micro_batch, event.group, event.label
