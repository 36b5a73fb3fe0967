"""A timeline as a grid of characters.

A cell shows the action that takes most of its rank's time there. Neighbouring ranks that do the
same in the same groups share a line, so 64 ranks rarely need 64 lines.
"""

from itertools import cycle, groupby
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from hf_flexseq.view.shares import boundaries, degrees, duration, shares
from hf_flexseq.view.timeline import KINDS, Event, Timeline

# By kind of event, but for computing, whose symbol is its degree's.
SYMBOLS = dict(zip(KINDS[1:], "=FBIW~-.", strict=True))
BOUNDARY = "|"
MOST_LINES = 64


def text_grid(timeline: Timeline, *, title: str = "", width: int = 100) -> str:
    """Return the timeline in lines of at most `width` characters."""
    symbols = _symbols(timeline)
    margin = 2 * len(str(timeline.world_size - 1)) + 3
    columns = max(10, width - margin)

    # 1. one row of cells for each rank
    rows = []
    for _, of_rank in groupby(timeline.events, key=lambda event: event.rank):
        events = list(of_rank)
        rows.append((_cells(events, timeline.stop, columns, symbols), _groups(events)))

    # 2. one line for neighbouring ranks that look the same, with marks between micro-batches
    marks = set()
    if timeline.stop:
        marks = {start * columns // timeline.stop for start in boundaries(timeline)}
    lines = []
    for first, last, cells in _merged(rows):
        ranks = str(first) if first == last else f"{first}-{last}"
        marked = "".join(BOUNDARY if at in marks else cell for at, cell in enumerate(cells))
        lines.append(f"{ranks:>{margin - 1}} {marked}")

    # 3. title above, axis and legend below
    end = duration(timeline, timeline.stop)
    axis = " " * margin + "0" + end.rjust(columns - 1)
    return "\n".join(filter(None, (title, *lines, axis, *_legend(timeline, symbols, width))))


def _symbols(timeline: Timeline) -> dict[int, str]:
    """Return one character for each degree: the degree itself up to 9, then letters."""
    letters = cycle(ascii_uppercase + ascii_lowercase)
    symbols = {}
    for degree in degrees(timeline):
        symbols[degree] = str(degree) if degree < 10 else next(letters)
    return symbols


def _cells(events: list[Event], stop: int, columns: int, symbols: dict[int, str]) -> str:
    """Return the action that takes most of a rank's time in each of `columns` equal parts of the
    step."""
    names = [*dict.fromkeys(symbols.values()), *SYMBOLS.values()]
    spent = np.zeros((len(names), columns))  # time in each cell
    edges = np.arange(columns + 1) * (stop / columns)  # [columns + 1] where cells begin and end
    for event in events:
        symbol = symbols[event.degree] if event.kind == "compute" else SYMBOLS[event.kind]
        row = spent[names.index(symbol)]
        first = int(event.start * columns // stop)
        last = min(columns, int(-(-event.stop * columns // stop)))
        begins = np.maximum(edges[first:last], event.start)
        ends = np.minimum(edges[first + 1 : last + 1], event.stop)
        row[first:last] += ends - begins
    return "".join(names[index] for index in spent.argmax(axis=0))


def _groups(events: list[Event]) -> tuple[tuple[int, int], ...]:
    """Return the groups that a rank shares with others, as (micro-batch, group)."""
    shared = set()
    for event in events:
        if event.group is not None and event.degree > 1:
            shared.add((event.micro_batch, event.group))
    return tuple(sorted(shared))


def _merged(rows: list[tuple[str, tuple[tuple[int, int], ...]]]) -> list[tuple[int, int, str]]:
    """Join neighbouring ranks that look the same, as (first rank, last rank, cells).

    Where that leaves too many lines, every few of them become one and show the first.
    """
    merged = []
    first = 0
    for (cells, _), same in groupby(rows):
        count = len(list(same))
        merged.append((first, first + count - 1, cells))
        first += count
    every = max(1, -(-len(merged) // MOST_LINES))
    parts = [merged[at : at + every] for at in range(0, len(merged), every)]
    return [(part[0][0], part[-1][1], part[0][2]) for part in parts]


def _legend(timeline: Timeline, symbols: dict[int, str], width: int) -> list[str]:
    """Return the lines that explain the symbols, and the one that says where time goes."""
    counts = degrees(timeline)
    parts = [f"{symbol} {counts[degree]} x degree {degree}" for degree, symbol in symbols.items()]
    kinds = {event.kind for event in timeline.events}
    for kind, symbol in SYMBOLS.items():
        if kind in kinds:
            parts.append(f"{symbol} {'idle' if kind == 'wait' else kind}")
    parts += [f"{BOUNDARY} next micro-batch"] if boundaries(timeline) else []
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + 3 + len(part) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + part
    return [*lines, shares(timeline)]
