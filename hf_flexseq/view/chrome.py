"""A timeline in the Trace Event Format: nodes as processes, ranks as threads, memory as
counters."""

from typing import Any

from hf_flexseq.timeline import Event, Timeline


def chrome_trace(timeline: Timeline, *, ranks_per_node: int | None = None) -> dict[str, Any]:
    """Return the trace as JSON values.

    Times are microseconds, or tokens where the timeline has no seconds.
    """
    scale = 1e3 if timeline.unit == "ns" else 1.0
    node = ranks_per_node or timeline.world_size
    events = [_slice(event, node, scale) for event in timeline.events if event.kind != "wait"]
    memory = [
        {
            "name": f"memory of rank {sample.rank}, GiB",
            "ph": "C",
            "pid": sample.rank // node,
            "ts": sample.at / scale,
            "args": {"GiB": round(sample.bytes / 2**30, 6)},
        }
        for sample in timeline.memory
    ]
    return {"traceEvents": _names(timeline, node) + events + memory, "displayTimeUnit": "ms"}


def _slice(event: Event, node: int, scale: float) -> dict[str, Any]:
    """Return the record of one event. node: ranks per node; scale: timeline units per trace
    unit."""
    shown = {"micro_batch": event.micro_batch, "group": event.group, "degree": event.degree}
    return {
        "name": event.label,
        "cat": event.kind,
        "ph": "X",
        "pid": event.rank // node,
        "tid": _lane(event.rank, event.kind == "overlapped"),
        "ts": event.start / scale,
        "dur": (event.stop - event.start) / scale,
        "args": {key: value for key, value in shown.items() if value is not None},
    }


def _names(timeline: Timeline, node: int) -> list[dict[str, Any]]:
    """Return the records that name nodes and lanes, in the order in which they are shown.

    node: ranks per node.
    """
    records = []
    overlapping = {event.rank for event in timeline.events if event.kind == "overlapped"}
    for first in range(0, timeline.world_size, node):
        records.append(_named("process_name", first // node, None, f"node {first // node}"))
    for rank in range(timeline.world_size):
        pid = rank // node
        records.append(_named("thread_name", pid, _lane(rank, False), f"rank {rank}"))
        if rank in overlapping:
            name = f"rank {rank}, overlapped transfers"
            records.append(_named("thread_name", pid, _lane(rank, True), name))
    return records


def _named(what: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    """Return the record that names a process (a node) or, with `tid`, a thread (a lane)."""
    record: dict[str, Any] = {"name": what, "ph": "M", "pid": pid, "args": {"name": name}}
    return record if tid is None else record | {"tid": tid}


def _lane(rank: int, overlapped: bool) -> int:
    """Return the thread id of a rank's main lane, or of its overlapped transfers below it."""
    return 2 * rank + overlapped
