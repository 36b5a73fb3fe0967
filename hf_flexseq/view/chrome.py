"""A timeline in the Trace Event Format: nodes as processes, ranks as threads, memory as
counters.

Viewers become slow on large files, so `chrome_text` keeps one step below `MOST_BYTES`: it draws
fewer layers, and then fewer ranks, and says so.
"""

import json
from collections.abc import Callable
from typing import Any

from hf_flexseq.timeline import Event, Timeline

MOST_BYTES = 5_000_000


def chrome_text(
    draw: Callable[[int], Timeline], *, layers: int, ranks_per_node: int | None = None
) -> tuple[str, str]:
    """Return the trace as text of at most `MOST_BYTES`, and what was left out for that, "" for
    nothing.

    draw: returns the timeline with a number of simulated layers.
    layers: to begin with.
    """
    # 1. fewer layers
    wanted = layers
    timeline = draw(layers)
    text = _text(chrome_trace(timeline, ranks_per_node=ranks_per_node))
    while len(text) > MOST_BYTES and layers:
        layers = layers * MOST_BYTES // len(text)
        timeline = draw(layers)
        text = _text(chrome_trace(timeline, ranks_per_node=ranks_per_node))
    left_out = []
    if layers != wanted:
        left_out.append(f"{layers} instead of {wanted} layers of each micro-batch")
    # 2. fewer ranks
    ranks = timeline.world_size
    while len(text) > MOST_BYTES and ranks > 1:
        ranks = max(1, min(ranks - 1, ranks * MOST_BYTES // len(text)))
        text = _text(chrome_trace(timeline, ranks_per_node=ranks_per_node, ranks=ranks))
    if ranks != timeline.world_size:
        left_out.append(f"the first {ranks:,} of {timeline.world_size:,} ranks")
    return text, " and ".join(left_out)


def _text(trace: dict[str, Any]) -> str:
    """Return JSON without spaces."""
    return json.dumps(trace, separators=(",", ":"))


def chrome_trace(
    timeline: Timeline, *, ranks_per_node: int | None = None, ranks: int | None = None
) -> dict[str, Any]:
    """Return the trace as JSON values.

    Times are whole microseconds, or tokens where the timeline has no seconds.
    ranks: how many, from the first one on; None for all.
    """
    scale = 1e3 if timeline.unit == "ns" else 1.0
    node = ranks_per_node or timeline.world_size
    shown = timeline.world_size if ranks is None else ranks
    events = [
        _slice(event, node, scale)
        for event in timeline.events
        if event.kind != "wait" and event.rank < shown
    ]
    memory = [
        {
            "name": f"memory of rank {sample.rank}, GiB",
            "ph": "C",
            "pid": sample.rank // node,
            "ts": round(sample.at / scale),
            "args": {"GiB": round(sample.bytes / 2**30, 3)},
        }
        for sample in timeline.memory
        if sample.rank < shown
    ]
    names = _names(timeline, node, shown)
    return {"traceEvents": names + events + memory, "displayTimeUnit": "ms"}


def _slice(event: Event, node: int, scale: float) -> dict[str, Any]:
    """Return the record of one event. node: ranks per node; scale: timeline units per trace
    unit."""
    shown = {"micro_batch": event.micro_batch}
    if event.group is not None:
        shown["group"] = event.group
    if event.degree > 1:
        shown["degree"] = event.degree
    start = round(event.start / scale)
    return {
        "name": event.label,
        "ph": "X",
        "pid": event.rank // node,
        "tid": _lane(event.rank, event.kind == "overlapped"),
        "ts": start,
        "dur": round(event.stop / scale) - start,
        "args": shown,
    }


def _names(timeline: Timeline, node: int, ranks: int) -> list[dict[str, Any]]:
    """Return the records that name nodes and lanes, in the order in which they are shown.

    node: ranks per node. ranks: how many are shown.
    """
    records = []
    overlapping = {event.rank for event in timeline.events if event.kind == "overlapped"}
    for first in range(0, ranks, node):
        records.append(_named("process_name", first // node, None, f"node {first // node}"))
    for rank in range(ranks):
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
