"""Figures that text and pictures share: boundaries, degrees, durations, and where time goes."""

from collections import Counter

from hf_flexseq.view.timeline import KINDS, Timeline

# What people call the kinds of events.
NAMES = {kind: kind for kind in KINDS} | {"transfer": "transfers", "wait": "idle"}


def boundaries(timeline: Timeline) -> list[int]:
    """Return the times at which all ranks have ended one micro-batch and none has begun the next.

    In free synchronisation there may be none.
    """
    if not timeline.starts:
        return []
    last = [0] * len(timeline.starts)
    for event in timeline.events:
        if event.kind != "wait":
            last[event.micro_batch] = max(last[event.micro_batch], event.stop)
    return [
        start
        for index, start in enumerate(timeline.starts)
        if index and max(last[:index]) <= start
    ]


def degrees(timeline: Timeline) -> dict[int, int]:
    """Count the groups of each degree, ascending by degree."""
    group2degree = {
        (event.micro_batch, event.group): event.degree
        for event in timeline.events
        if event.group is not None
    }
    counts = Counter(group2degree.values())
    return dict(sorted(counts.items()))


def duration(timeline: Timeline, span: int) -> str:
    """Return a span of the timeline's unit in words for people."""
    if timeline.unit != "ns":
        return f"{span:,} {timeline.unit}"
    seconds = span / 1e9
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def shares(timeline: Timeline) -> str:
    """Return one line that says where the ranks' time goes."""
    parts = [(name, timeline.share(kind)) for kind, name in NAMES.items()]
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in parts if share > 0)
