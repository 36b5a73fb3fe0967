"""One step as a timeline: ranks downwards, time to the right, groups coloured by degree.

The picture stands without a script, for paper and for readers that run none. What a box is made
of is in the page once: its shape, with its micro-batch, its group and its label as attributes, and
beside it a record of every group. `script.js` zooms, and tells what is under the pointer.

A page is sent around, so the picture has a limit of bytes. What would exceed it is drawn coarser,
and the page says so: first a group is one box, then the last micro-batches are left out.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_flexseq.plan import Plan
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.timeline import Event, Timeline
from hf_flexseq.view.picture import blocks
from hf_flexseq.view.report.charts import Tick, along, canvas, label, percent, values_up_to
from hf_flexseq.view.report.looks import UNITS, Box, classes, legend, marks_class, patterns
from hf_flexseq.view.report.markup import Markup, bullets, element, joined, table
from hf_flexseq.view.report.words import counted, seconds
from hf_flexseq.view.shares import shares

MOST_BYTES = 1_200_000  # of the picture and its records
# Pixels: of a rank, and of the picture at most.
ROW, LOWEST, HIGHEST = 8, 160, 640
SEQUENCES_NAMED = 8  # longest sequences of a group, of which the page tells the lengths
ROWS_OF_TABLE = 100  # micro-batches that are listed
# The least part of the picture that has room for a number, to the right and downwards.
ROOM = 0.016
ROOM_DOWN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step to draw."""

    number: int
    """Its number in the run, or its index."""
    plan: Plan | PipelinePlan
    """What is drawn."""
    timeline: Timeline
    """When it happens."""
    title: str
    """What the timeline is: simulated, measured or tokens."""
    reason: str
    """Why this step is drawn."""
    ranks_per_node: int | None = None
    """None where nobody knows."""
    measured_s: tuple[float, ...] | None = None
    """Measured seconds of its micro-batches."""


def step_part(step: Step) -> Markup:
    """Return the part of the page about a step."""
    drawing = fitting(step)
    boxes = drawing.boxes
    timeline = step.timeline
    notes = step.plan.notes if isinstance(step.plan, Plan) else ()
    return element(
        "section",
        element("h2", f"Step {step.number}"),
        element("p", f"{step.reason} {step.title}"),
        element("p", f"Ranks' time: {_time(timeline)}. ", drawing.remark),
        _toolbar(step, boxes),
        legend(timeline, boxes),
        _picture(step, drawing),
        element(
            "p",
            "Point at the picture, or touch it.",
            id="told",
            aria_live="polite",
            class_="screen",
        ),
        *_table(step),
        element("details", element("summary", "Why the plan is as it is"), bullets(*notes))
        if notes
        else None,
        _data(step, boxes),
        id="step",
    )


def _time(timeline: Timeline) -> str:
    """Return where the ranks' time goes, in the words of the page."""
    return shares(timeline).replace("transfers", "communication")


# ---- boxes


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn of a step."""

    boxes: list[Box]
    """What can be pointed at, and has a colour."""
    groups: list[Box]
    """A box for each group on its ranks, as far as it does not wait: these have the marks."""
    remark: str
    """What was left out to stay below `MOST_BYTES`, "" for nothing."""


def fitting(step: Step) -> Drawing:
    """Return as much of a step as stays below `MOST_BYTES`."""
    groups = _boxes(step.timeline, _joined(step.timeline.events))
    drawing = Drawing(_boxes(step.timeline, step.timeline.events), groups, "")
    if _bytes(step, drawing) <= MOST_BYTES:
        return drawing
    # 1. a group is one box on each of its ranks
    remark = "To keep the page small a group is one box, its communication included."
    drawing = Drawing(groups, groups, remark)
    # 2. fewer micro-batches
    count = 1 + max(box.event.micro_batch for box in groups)
    what = "chunks" if isinstance(step.plan, PipelinePlan) else "micro-batches"
    shown = count
    size = _bytes(step, drawing)
    while size > MOST_BYTES and shown > 1:
        shown = max(1, min(shown - 1, shown * MOST_BYTES // size))
        groups = [box for box in groups if box.event.micro_batch < shown]
        left_out = f"{remark} Only the first {shown:,} of {count:,} {what} are drawn."
        drawing = Drawing(groups, groups, left_out)
        size = _bytes(step, drawing)
    return drawing


def _bytes(step: Step, drawing: Drawing) -> int:
    """Return the bytes of the picture and its records."""
    shapes = len(_shapes(drawing.boxes)) + len(_marks(drawing.groups))
    return shapes + len(_data(step, drawing.boxes))


def _boxes(timeline: Timeline, events: Iterable[Event]) -> list[Box]:
    """Return the boxes of some events, in units of the picture; those that nobody can see are left
    out."""
    drawn = [event for event in events if event.kind not in ("wait", "overlapped")]
    boxes = []
    for first, stop, event in blocks(drawn):
        start = event.start * UNITS // timeline.stop
        end = event.stop * UNITS // timeline.stop
        if end > start:
            boxes.append(Box(first, stop, replace(event, start=start, stop=end)))
    return boxes


def _joined(events: Iterable[Event]) -> list[Event]:
    """Return a rank's events of one group that follow each other without a wait as one event."""
    joined_events: list[Event] = []
    for event in events:
        if event.kind in ("wait", "overlapped"):
            continue
        if event.group is not None:
            event = replace(event, kind="compute", label="group")
        last = joined_events[-1] if joined_events else None
        if last is not None and last.stop == event.start and _same(last, event):
            joined_events[-1] = replace(last, stop=event.stop)
        else:
            joined_events.append(event)
    return joined_events


def _same(one: Event, other: Event) -> bool:
    """Return whether two events are of one group's rank, and of one kind."""
    return (one.rank, one.micro_batch, one.group, one.kind, one.label) == (
        other.rank,
        other.micro_batch,
        other.group,
        other.kind,
        other.label,
    )


# ---- shapes


def _shapes(boxes: Sequence[Box]) -> Markup:
    """Return the boxes as shapes: a path for everything that looks the same in a group."""
    numbers = _label_numbers(boxes)
    paths: dict[tuple[int, int, str, int], list[str]] = defaultdict(list)
    for box in boxes:
        event = box.event
        group = -1 if event.group is None else event.group
        key = (event.micro_batch, group, classes(event), numbers[event.label])
        paths[key].append(_outline(box))
    parts = []
    for (batch, group, look, index), pieces in sorted(paths.items()):
        of_group = "" if group < 0 else f' data-g="{group}"'
        parts.append(
            f'<path class="{look}" data-b="{batch}"{of_group} data-l="{index}" '
            f'd="{"".join(pieces)}"/>'
        )
    return Markup("".join(parts))


def _marks(groups: Sequence[Box]) -> Markup:
    """Return the marks of the boxes: a shape for each degree, or for each kind of action."""
    paths: dict[str, list[str]] = defaultdict(list)
    for box in groups:
        name = marks_class(box.event)
        if name:
            paths[name].append(_outline(box))
    shapes = []
    for name, pieces in sorted(paths.items()):
        shapes.append(element("path", d="".join(pieces), class_="marks", fill=f"url(#m-{name})"))
    return joined(*shapes)


def _outline(box: Box) -> str:
    """Return a box as a piece of a path."""
    width = box.event.stop - box.event.start
    return f"M{box.event.start} {box.first}h{width}v{box.stop - box.first}h-{width}z"


def _label_numbers(boxes: Sequence[Box]) -> dict[str, int]:
    """Return the index of each label."""
    labels = dict.fromkeys(box.event.label for box in boxes)
    return {text: index for index, text in enumerate(labels)}


def _picture(step: Step, drawing: Drawing) -> Markup:
    """Return the picture with its axes."""
    boxes = drawing.boxes
    timeline = step.timeline
    world = timeline.world_size
    height = min(HIGHEST, max(LOWEST, ROW * world))
    lines = [
        element("path", d=f"M{_unit(timeline, at)} 0v{world}", class_="edge")
        for at in timeline.starts[1:]
    ]
    if step.ranks_per_node and step.ranks_per_node < world:
        for rank in range(step.ranks_per_node, world, step.ranks_per_node):
            lines.append(element("path", d=f"M0 {rank}h{UNITS}", class_="node"))
    for start, stop, first, past, _ in _group_spans(boxes).values():
        width = stop - start
        lines.append(
            element("path", d=f"M{start} {first}h{width}M{start} {past}h{width}", class_="gap")
        )
    says = f"{step.title} {_time(timeline)}."
    unit = "seconds" if timeline.unit == "ns" else "tokens per rank"
    every = step.ranks_per_node if step.ranks_per_node and world > 16 else max(1, world // 8)
    every = max(every, -(-world // 32))
    ranks = (
        label(str(rank), "y rank", f"top:{percent(rank / world)}")
        for rank in range(0, world, every)
    )
    return element(
        "div",
        element("div", "rank", class_="y-label"),
        element(
            "div",
            patterns(boxes, timeline, height),
            canvas(
                joined(_shapes(boxes), _marks(drawing.groups), *lines),
                f"0 0 {UNITS} {world}",
                says=says,
                class_="boxes",
            ),
            element("div", *_numbers(step, boxes), class_="over", aria_hidden="true"),
            element("div", *_times(timeline), class_="axis"),
            *ranks,
            class_="plot",
            id="timeline",
            tabindex=0,
            style=f"height:{height}px",
        ),
        element("div", unit, class_="x-label"),
        class_="chart wide by-degree",
        id="step-chart",
    )


def _unit(timeline: Timeline, at: int) -> int:
    """Return a time in units of the picture."""
    return at * UNITS // max(1, timeline.stop)


def _times(timeline: Timeline) -> list[Markup]:
    """Return the texts of the time axis."""
    end = timeline.stop / (1e9 if timeline.unit == "ns" else 1)
    if not end:
        return []
    return along(Tick(value / end, f"{value:,.10g}") for value in values_up_to(end))


def _numbers(step: Step, boxes: Sequence[Box]) -> list[Markup]:
    """Return the number of each micro-batch above the picture, and the degree of each group on
    its boxes, where there is room."""
    texts = []
    free = 0.0
    for index, (start, stop) in enumerate(_batch_spans(step.timeline)):
        middle = (start + stop) / 2 / UNITS
        if middle - ROOM / 2 >= free:
            texts.append(label(str(index), "batch", f"left:{percent(middle)}"))
            free = middle + ROOM
    for (_, _), (start, stop, first, past, degree) in _group_spans(boxes).items():
        wide = (stop - start) / UNITS
        if wide >= ROOM and (past - first) / step.timeline.world_size >= ROOM_DOWN:
            left = percent((start + stop) / 2 / UNITS)
            top = percent((first + past) / 2 / step.timeline.world_size)
            texts.append(label(str(degree), "degree", f"left:{left};top:{top}"))
    return texts


def _batch_spans(timeline: Timeline) -> list[tuple[int, int]]:
    """Return where each micro-batch begins and where the next one does, in units."""
    starts = [_unit(timeline, at) for at in timeline.starts]
    return list(zip(starts, [*starts[1:], UNITS], strict=False))


def _group_spans(boxes: Sequence[Box]) -> dict[tuple[int, int], tuple[int, int, int, int, int]]:
    """Return (start, stop, first rank, the one past the last, degree) of the boxes of each
    (micro-batch, group)."""
    spans: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}
    for box in boxes:
        event = box.event
        if event.group is None:
            continue
        key = (event.micro_batch, event.group)
        new = (event.start, event.stop, box.first, box.stop, event.degree)
        start, stop, first, past, _ = spans.get(key, new)
        spans[key] = (
            min(start, event.start),
            max(stop, event.stop),
            min(first, box.first),
            max(past, box.stop),
            event.degree,
        )
    return spans


# ---- around the picture


def _toolbar(step: Step, boxes: Sequence[Box]) -> Markup:
    """Return the buttons that the script answers; paper has none."""
    buttons = [
        element("button", text, type="button", data_do=what, title=title)
        for what, text, title in (
            ("in", "+", "zoom in"),
            ("out", "\N{MINUS SIGN}", "zoom out"),
            ("left", "\N{LEFTWARDS ARROW}", "earlier"),
            ("right", "\N{RIGHTWARDS ARROW}", "later"),
            ("all", "whole step", "zoom out to the whole step"),
            ("tall", "taller", "make the rows of ranks twice as high, or as they were"),
        )
    ]
    choices = []
    if len(step.timeline.starts) > 1:
        options = [element("option", "micro-batch ...", value="")]
        for index in range(len(step.timeline.starts)):
            options.append(element("option", f"micro-batch {index}", value=index))
        choices.append(
            element("select", *options, data_do="batch", aria_label="zoom to a micro-batch")
        )
    if any(box.event.degree for box in boxes):
        choices.append(
            element(
                "select",
                element("option", "colours: degrees", value="by-degree"),
                element("option", "colours: kinds of work", value="by-work"),
                data_do="colours",
                aria_label="what colours tell",
            )
        )
    help_text = "drag to move; Ctrl and wheel, or + and - on the keyboard, to zoom"
    return element(
        "div", *buttons, *choices, element("small", help_text), class_="toolbar screen", hidden=""
    )


def _table(step: Step) -> list[Markup]:
    """Return the micro-batches of a step as a table, to be opened; nothing for a pipeline."""
    plan = step.plan
    if isinstance(plan, PipelinePlan) or not plan.micro_batches:
        return []
    timed = step.timeline.unit == "ns"
    rows = []
    starts = (*step.timeline.starts[1:], step.timeline.stop)
    spans = zip(plan.micro_batches, step.timeline.starts, starts, strict=True)
    for index, (micro_batch, start, stop) in enumerate(spans):
        counts: dict[str, int] = defaultdict(int)
        for group in micro_batch.groups:
            counts[f"{group.degree} {group.strategy}"] += 1
        members = [s for group in micro_batch.groups for s in group.sequences]
        of_batch = [plan.lengths[s] for s in members]
        cells = [
            str(index),
            seconds((stop - start) / 1e9) if timed else f"{stop - start:,}",
            ", ".join(f"{count} x degree {name}" for name, count in counts.items()),
            f"{len(members):,}",
            f"{sum(of_batch):,}",
            f"{max(of_batch, default=0):,}",
        ]
        if step.measured_s is not None:
            cells.append(seconds(step.measured_s[index]))
        rows.append(tuple(cells))
    head = [
        "micro-batch",
        "until the next begins" if timed else "tokens of the fullest rank",
        "groups",
        "sequences",
        "tokens",
        "longest",
    ]
    if step.measured_s is not None:
        head.append("measured")
    caption = ""
    if len(rows) > ROWS_OF_TABLE:
        caption = f"The first {ROWS_OF_TABLE} of {len(rows):,}."
    made = table(tuple(head), rows[:ROWS_OF_TABLE], caption=caption)
    title = f"{counted(len(rows), 'micro-batch')}".replace("batchs", "batches")
    return [element("details", element("summary", f"{title} in numbers"), made)]


# ---- records for the script


def _data(step: Step, boxes: Sequence[Box]) -> Markup:
    """Return what the script knows: scale, labels, and a record of each group or chunk."""
    timeline = step.timeline
    record = {
        "stop": timeline.stop / (1e9 if timeline.unit == "ns" else 1),
        "unit": "s" if timeline.unit == "ns" else "tokens",
        "units": UNITS,
        "ranks": timeline.world_size,
        "starts": [start for start, _ in _batch_spans(timeline)],
        "labels": [_label_text(text) for text in _label_numbers(boxes)],
        "groups": _groups(step, boxes),
        "chunks": _chunks(step.plan),
    }
    return data(record)


def data(record: dict[str, Any]) -> Markup:
    """Return a record for the script; nothing in it can end the element that holds it."""
    text = json.dumps(record, separators=(",", ":"))
    for one in "<>&":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return element("script", Markup(text), type="application/json", id="data")


def _label_text(text: str) -> str:
    """Return what the page calls a label of the timeline."""
    names = {"linear": "linear layers", "scan": "recurrent layers", "group": "a group's work"}
    return names.get(text, text)


def _groups(step: Step, boxes: Sequence[Box]) -> dict[str, list[Any]]:
    """Return a record of each group that is drawn, under its micro-batch and index: where its
    boxes are, its degree and strategy, its tokens, how many sequences, and the longest of them as
    (id, tokens)."""
    plan = step.plan
    if isinstance(plan, PipelinePlan):
        return {}
    records: dict[str, list[Any]] = {}
    for (batch, index), span in _group_spans(boxes).items():
        group = plan.micro_batches[batch].groups[index]
        longest = sorted(group.sequences, key=lambda s: (-plan.lengths[s], s))[:SEQUENCES_NAMED]
        start, stop, _, _, degree = span
        records[f"{batch}.{index}"] = [
            start,
            stop,
            group.start,
            degree,
            group.strategy,
            group.tokens(plan.lengths),
            len(group.sequences),
            [[s, plan.lengths[s]] for s in longest],
        ]
    return records


def _chunks(plan: Plan | PipelinePlan) -> list[str]:
    """Return what each chunk of a pipeline holds; nothing for other plans."""
    if isinstance(plan, Plan):
        return []
    texts = []
    for chunk in plan.chunks:
        first = chunk.slices[0]
        others = len(chunk.slices) - 1
        more = f" and {counted(others, 'other')}" if others else ""
        texts.append(
            f"chunk {chunk.index} of unit {chunk.unit}: {chunk.tokens:,} tokens, sequence "
            f"{first.sequence} from {first.start:,} to {first.stop:,}{more}"
        )
    return texts
