"""What text and pictures have in common."""

from hf_flexseq.timeline import ACTION_KINDS, Timeline

NAMES = {
    "compute": "compute",
    **{kind: kind for kind in ACTION_KINDS},
    "transfer": "transfers",
    "constant": "constant",
    "wait": "idle",
}


def boundaries(timeline: Timeline) -> list[int]:
    """Where one micro-batch ends and the next begins on all ranks at once; in free synchronisation
    maybe nowhere."""
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
    """How many groups of each degree the timeline has, ascending by degree."""
    groups = {(e.micro_batch, e.group): e.degree for e in timeline.events if e.group is not None}
    found = sorted(groups.values())
    return {degree: found.count(degree) for degree in sorted(set(found))}


def duration(timeline: Timeline, span: int) -> str:
    """`span` of the timeline's unit, for people."""
    if timeline.unit != "ns":
        return f"{span:,} {timeline.unit}"
    seconds = span / 1e9
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def shares(timeline: Timeline) -> str:
    """Where the ranks' time goes, in one line."""
    parts = [(name, timeline.share(kind)) for kind, name in NAMES.items()]
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in parts if share > 0)
