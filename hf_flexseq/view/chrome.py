"""A timeline in the Trace Event Format: nodes as processes, ranks as threads, memory as
counters.

Viewers become slow on large files, so `chrome_text` stays below `MOST_BYTES`: it draws fewer
ranks, and says so.
"""

import json
from typing import Any

from hf_flexseq.view.timeline import Event, Timeline

MOST_BYTES = 5_000_000


def chrome_text(timeline: Timeline, *, ranks_per_node: int | None = None) -> tuple[str, str]:
    """Return a trace of at most `MOST_BYTES`, and the ranks that it shows, "" for all."""
    ranks = timeline.world_size
    text = _text(chrome_trace(timeline, ranks_per_node=ranks_per_node))
    while len(text) > MOST_BYTES and ranks > 1:
        ranks = max(1, min(ranks - 1, ranks * MOST_BYTES // len(text)))
        text = _text(chrome_trace(timeline, ranks_per_node=ranks_per_node, ranks=ranks))
    if ranks == timeline.world_size:
        return text, ""
    return text, f"the first {ranks:,} of {timeline.world_size:,} ranks"


def _text(trace: dict[str, Any]) -> str:
    """Return JSON without spaces."""
    return json.dumps(trace, separators=(",", ":"))


def chrome_trace(
    timeline: Timeline, *, ranks_per_node: int | None = None, ranks: int | None = None
) -> dict[str, Any]:
    """Return the trace as JSON values.

    Times are whole microseconds, or tokens if the timeline counts tokens.
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
    return {"traceEvents": _names(node, shown) + events + memory, "displayTimeUnit": "ms"}


def _slice(event: Event, node: int, scale: float) -> dict[str, Any]:
    """Return an event's record. node: ranks per node; scale: timeline units per trace unit."""
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
        "tid": event.rank,
        "ts": start,
        "dur": round(event.stop / scale) - start,
        "args": shown,
    }


def _names(node: int, ranks: int) -> list[dict[str, Any]]:
    """Return the records that name nodes and ranks, in order. node: ranks per node."""
    records = []
    for first in range(0, ranks, node):
        records.append(_named("process_name", first // node, None, f"node {first // node}"))
    for rank in range(ranks):
        records.append(_named("thread_name", rank // node, rank, f"rank {rank}"))
    return records


def _named(what: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    """Return the record that names a process (a node) or, with `tid`, a thread (a rank)."""
    record: dict[str, Any] = {"name": what, "ph": "M", "pid": pid, "args": {"name": name}}
    return record if tid is None else record | {"tid": tid}
