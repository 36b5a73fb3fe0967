"""Run a pipeline's plan without running it: what every stage does when, what it holds, and what
the bubble costs.

    simulate_pipeline(plan, cost)    a Timeline in nanoseconds, for `view`
    report(plan, cost)               seconds, bubble and peaks in one record

Times are the longest path through the plan's actions (`schedule/pipeline/walk.py`), so they are
exact for the given cost of each action; what they leave out are transfers that disturb each other
and stages that disturb their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.cost.stages import PipelineCost, StageCost
from hf_flexseq.plan.pipeline import KINDS, PipelinePlan
from hf_flexseq.schedule.pipeline.walk import Done, timed
from hf_flexseq.timeline import ACTION_KINDS, Event, Memory, Timeline

_NAMES = dict(zip(KINDS, ACTION_KINDS, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A simulated step. seconds: until the last rank is done. bubble: share of the ranks' time
    without work. peak_bytes, peak_tokens: of each rank, of what is in flight; a checkpointed token
    counts whole."""

    seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    peak_tokens: tuple[int, ...]


def simulate_pipeline(plan: PipelinePlan, cost: PipelineCost) -> Timeline:
    """The timeline of one optimizer step."""
    places = plan.places()
    lanes: list[list[Done]] = [[] for _ in range(plan.ranks)]
    for done in timed(plan, cost):
        lanes[done.rank].append(done)
    stop = max((lane[-1].stop for lane in lanes if lane), default=0)
    return Timeline(
        world_size=plan.ranks,
        events=tuple(
            event for rank, lane in enumerate(lanes) for event in _events(rank, lane, places, stop)
        ),
        memory=tuple(sample for lane in lanes for done in lane for sample in _memory(done)),
        starts=(),
        stop=stop,
        unit="ns",
    )


def report(plan: PipelinePlan, cost: PipelineCost) -> Report:
    """The step in numbers."""
    timeline = simulate_pipeline(plan, cost)
    peaks = [0] * plan.ranks
    for sample in timeline.memory:
        peaks[sample.rank] = max(peaks[sample.rank], sample.bytes)
    return Report(
        seconds=timeline.stop / 1e9,
        bubble=timeline.share("wait"),
        peak_bytes=tuple(peaks),
        peak_tokens=peak_tokens(plan),
    )


def peak_tokens(plan: PipelinePlan) -> tuple[int, ...]:
    """The most tokens each rank has between their forward and the end of their backward."""
    places = plan.places()
    peaks = []
    for actions in plan.actions:
        held = peak = 0
        for action in actions:
            tokens = plan.chunks[places[action.unit, action.chunk]].tokens
            held += {"F": tokens, "I": 0}.get(action.kind, -tokens)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def tokens_as_time(stages: int) -> PipelineCost:
    """A cost for plans whose real one is not known: a microsecond per token, forward."""
    return PipelineCost.even(stages, StageCost(linear_ns=1e3, attention_ns=0.0, chunk_ns=0.0))


def _events(
    rank: int, lane: Sequence[Done], places: dict[tuple[int, int], int], stop: int
) -> list[Event]:
    events, free = [], 0
    for done in lane:
        place = places[done.action.unit, done.action.chunk]
        if done.start > free:
            events.append(_event(rank, free, done.start, "wait", place, "wait for the neighbour"))
        events.append(
            _event(rank, done.start, done.stop, _NAMES[done.action.kind], place, str(done.action))
        )
        free = done.stop
    if free < stop:
        events.append(_event(rank, free, stop, "wait", 0, "wait for the other ranks"))
    return events


def _event(rank: int, start: int, stop: int, kind: str, place: int, label: str) -> Event:
    return Event(
        rank=rank,
        start=start,
        stop=stop,
        kind=kind,
        micro_batch=place,
        group=None,
        degree=0,
        label=label,
    )


def _memory(done: Done) -> list[Memory]:
    return [
        Memory(rank=done.rank, at=done.start, bytes=done.held),
        Memory(rank=done.rank, at=done.stop, bytes=done.left),
    ]
