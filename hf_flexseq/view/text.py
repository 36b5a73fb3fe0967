"""A timeline as a grid of characters.

A cell shows what its rank does for most of that time. Neighbouring ranks that do the same in the
same groups share a line, so 64 ranks rarely need 64 lines.
"""

from itertools import groupby

import numpy as np

from hf_flexseq.timeline import ACTION_KINDS, Event, Timeline
from hf_flexseq.view.shares import boundaries, degrees, duration, shares

TRANSFER, CONSTANT, IDLE, BOUNDARY = "~", "-", ".", "|"
ACTIONS = dict(zip(ACTION_KINDS, "FBIW", strict=True))
MOST_LINES = 64


def text_grid(timeline: Timeline, *, title: str = "", width: int = 100) -> str:
    """The timeline in lines of at most `width` characters."""
    symbols = _symbols(timeline)
    margin = 2 * len(str(timeline.world_size - 1)) + 3
    columns = max(10, width - margin)
    by_rank = [list(events) for _, events in groupby(timeline.events, key=lambda e: e.rank)]
    rows = [
        (_cells(events, timeline.stop, columns, symbols), _groups(events)) for events in by_rank
    ]
    marks = (
        {start * columns // timeline.stop for start in boundaries(timeline)}
        if timeline.stop
        else set()
    )
    lines = [
        f"{_ranks(first, last):>{margin - 1}} {_marked(cells, marks)}"
        for first, last, cells in _merged(rows)
    ]
    axis = " " * margin + _axis(timeline, columns)
    return "\n".join(filter(None, (title, *lines, axis, *_legend(timeline, symbols, width))))


def _symbols(timeline: Timeline) -> dict[int, str]:
    """One character per degree: itself up to 9, then letters."""
    letters = iter(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" * (1 + timeline.world_size // 52)
    )
    return {degree: str(degree) if degree < 10 else next(letters) for degree in degrees(timeline)}


def _cells(events: list[Event], stop: int, columns: int, symbols: dict[int, str]) -> str:
    """What a rank does most of the time in each of `columns` equal parts of the step."""
    names = [*dict.fromkeys(symbols.values()), *ACTIONS.values(), TRANSFER, CONSTANT, IDLE]
    spent = np.zeros((len(names), columns))
    edges = np.arange(columns + 1) * (stop / columns)
    for event in events:
        if event.kind == "overlapped":
            continue
        row = spent[names.index(_symbol(event, symbols))]
        first = int(event.start * columns // stop)
        last = min(columns, int(-(-event.stop * columns // stop)))
        cell = slice(first, last)
        row[cell] += np.minimum(edges[first + 1 : last + 1], event.stop) - np.maximum(
            edges[cell], event.start
        )
    return "".join(names[index] for index in spent.argmax(axis=0))


def _symbol(event: Event, symbols: dict[int, str]) -> str:
    if event.kind == "compute":
        return symbols[event.degree]
    return {"transfer": TRANSFER, "constant": CONSTANT, "wait": IDLE, **ACTIONS}[event.kind]


def _groups(events: list[Event]) -> tuple[tuple[int, int], ...]:
    """The groups that a rank shares with others, as (micro-batch, group)."""
    return tuple(
        sorted({(e.micro_batch, e.group) for e in events if e.group is not None and e.degree > 1})
    )


def _merged(rows: list[tuple[str, tuple[tuple[int, int], ...]]]) -> list[tuple[int, int, str]]:
    """(first rank, last rank, cells) of ranks that look the same; of every few ranks where that is
    still too much."""
    merged = []
    first = 0
    for (cells, _), same in groupby(rows):
        count = len(list(same))
        merged.append((first, first + count - 1, cells))
        first += count
    every = max(1, -(-len(merged) // MOST_LINES))
    parts = [merged[at : at + every] for at in range(0, len(merged), every)]
    return [(part[0][0], part[-1][1], part[0][2]) for part in parts]


def _ranks(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _marked(cells: str, marks: set[int]) -> str:
    return "".join(BOUNDARY if at in marks else cell for at, cell in enumerate(cells))


def _axis(timeline: Timeline, columns: int) -> str:
    end = duration(timeline, timeline.stop)
    return "0" + end.rjust(columns - 1)


def _legend(timeline: Timeline, symbols: dict[int, str], width: int) -> list[str]:
    counts = degrees(timeline)
    parts = [f"{symbol} {counts[degree]} x degree {degree}" for degree, symbol in symbols.items()]
    kinds = {event.kind for event in timeline.events}
    named = (
        *((kind, symbol, kind) for kind, symbol in ACTIONS.items()),
        ("transfer", TRANSFER, "transfer"),
        ("constant", CONSTANT, "constant"),
        ("wait", IDLE, "idle"),
    )
    parts += [f"{symbol} {name}" for kind, symbol, name in named if kind in kinds]
    parts += [f"{BOUNDARY} next micro-batch"] if boundaries(timeline) else []
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + 3 + len(part) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + part
    return [*lines, shares(timeline)]
