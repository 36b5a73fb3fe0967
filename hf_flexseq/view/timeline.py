"""Everything every rank does in a step, as frozen data.

    Timeline     the events of all ranks, and their memory
    Recorder     collects them rank by rank; gaps become waits

A rank's events follow each other without a gap: work, transfers that nothing hides, and waits.
Together they fill the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Kinds of a pipeline stage's work.
ACTION_KINDS = ("forward", "backward", "input gradient", "weight gradient")

# All kinds of events.
KINDS = ("compute", "experts", *ACTION_KINDS, "transfer", "constant", "wait")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something a rank does for one micro-batch, or one chunk."""

    rank: int
    """Rank that acts."""
    start: int
    """Beginning of the event, in the timeline's unit."""
    stop: int
    """End of the event, in the timeline's unit."""
    kind: str
    """One of `KINDS`."""
    micro_batch: int
    """Index of the micro-batch, or of the chunk."""
    group: int | None
    """Index of the group in the micro-batch; None outside of groups."""
    degree: int
    """Ranks of that group; 0 without one."""
    label: str
    """Name of the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The bytes of a rank from some time on."""

    rank: int
    """Rank that holds them."""
    at: int
    """Time of the change, in the timeline's unit."""
    bytes: int
    """Bytes held from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One optimizer step."""

    world_size: int
    """Number of ranks."""
    events: tuple[Event, ...]
    """All events, by rank, then by time."""
    memory: tuple[Memory, ...]
    """All changes of memory, by rank, then by time; () if unknown."""
    starts: tuple[int, ...]
    """Beginning of each micro-batch on its first rank; () for a pipeline, whose chunks overlap."""
    stop: int
    """End of the last rank's last event."""
    unit: str
    """Unit of all times: "ns" or "tokens"."""

    def share(self, kind: str) -> float:
        """Return the part of all ranks' time that goes into events of `kind`.

        The shares of all kinds add up to one.
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
    """The clocks of all ranks, and the events that they have been through."""

    def __init__(self, world_size: int) -> None:
        self.clock = [0] * world_size  # [world_size] end of each rank's last event
        self._events: list[list[Event]] = [[] for _ in range(world_size)]
        self._memory: list[list[Memory]] = [[] for _ in range(world_size)]
        self._starts: list[int] = []  # of each micro-batch

    def begin_micro_batch(self, ranks: Sequence[int]) -> None:
        """Begin a micro-batch on `ranks`: later events belong to it."""
        self._starts.append(min(self.clock[rank] for rank in ranks))

    def meet(self, ranks: Sequence[int], *, group: int | None = None, degree: int = 0) -> None:
        """Let `ranks` wait until the last of them is free."""
        last = max(self.clock[rank] for rank in ranks)
        label = "wait for the other ranks" if group is None else "wait for the group"
        for rank in ranks:
            self.work(rank, last - self.clock[rank], "wait", label, group=group, degree=degree)

    def work(
        self,
        rank: int,
        duration: int,
        kind: str,
        label: str,
        *,
        group: int | None = None,
        degree: int = 0,
        micro_batch: int | None = None,
    ) -> None:
        """Add an event of `rank` from when it is free; an empty one is left out.

        micro_batch: index of the micro-batch, or of a chunk; None for the micro-batch that was
        begun last. The other arguments are fields of `Event`.
        """
        if duration <= 0:
            return
        if micro_batch is None:
            micro_batch = max(0, len(self._starts) - 1)
        start = self.clock[rank]
        self.clock[rank] = start + duration
        self._events[rank].append(
            Event(
                rank=rank,
                start=start,
                stop=start + duration,
                kind=kind,
                micro_batch=micro_batch,
                group=group,
                degree=degree,
                label=label,
            )
        )

    def hold(self, rank: int, size: int) -> None:
        """Set the bytes that `rank` holds from now on."""
        self._memory[rank].append(Memory(rank=rank, at=self.clock[rank], bytes=size))

    def timeline(self, unit: str) -> Timeline:
        """Return all events; ranks that are done earlier idle until the last one is."""
        self.meet(range(len(self.clock)))
        events: list[Event] = []
        memory: list[Memory] = []
        for of_rank, samples in zip(self._events, self._memory, strict=True):
            events += of_rank
            memory += samples
        return Timeline(
            world_size=len(self.clock),
            events=tuple(events),
            memory=tuple(memory),
            starts=tuple(self._starts),
            stop=max(self.clock),
            unit=unit,
        )
