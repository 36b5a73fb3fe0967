"""A timeline as a picture: ranks downwards, time to the right, a colour for each degree, idle time
empty.

    save_picture(timeline, path)    a file in any of matplotlib's formats
    picture_of(timeline)            a matplotlib figure
    svg_of(figure)                  SVG that follows the reader's light or dark colour scheme

matplotlib is imported when a picture is asked for, and used without its state machine: no display
is needed.
"""

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_flexseq.view.shares import boundaries, degrees, shares
from hf_flexseq.view.timeline import ACTION_KINDS, Event, Timeline

# Degrees 1, 2, 4, ... from light to dark, told apart in grey and by colour-blind eyes; those
# between two of them have a colour between.
COLOURS = (
    "#f2c45a",
    "#e8924a",
    "#d4604f",
    "#a8417a",
    "#6f3c93",
    "#3f4a9c",
    "#24698f",
    "#1d8a86",
    "#2f5d50",
    "#23303a",
)
ACTION_COLOURS = dict(zip(ACTION_KINDS, ("#3f6fb0", "#23706b", "#3f9c86", "#e8b04a"), strict=True))
OTHER_COLOURS = {"experts": "#8a6d52", "constant": "#b9bfc8"}
INK = "#2b2f36"
# Colours of text and lines, and of the background, in an SVG: light scheme, then dark.
SCHEMES = ((INK, "#ffffff"), ("#dfe3ea", "#16191f"))
GAP = 0.06  # white space above and below a group, in ranks
PALER = 0.55  # how far towards white the colour of a transfer lies
SHADE = 0.25  # the same of every other chunk's
DPI = 150  # pixels per inch of a PNG
# Inches: of a picture with few micro-batches, of each micro-batch where there are many, at most.
WIDTH, WIDTH_OF_MICRO_BATCH, MOST_WIDTH = 12.0, 0.8, 40.0
LABEL = 8.0  # size of small text, in points
CHARACTER = 0.65 * LABEL  # room for a character of it, in points
POINTS = 72  # points per inch


def require(what: str, *modules: str) -> None:
    """Raise ModuleNotFoundError if a module that `what` need is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{what} need {' and '.join(missing)}, which cannot be imported: "
            'pip install "hf_flexseq[pictures]"'
        )


def save_picture(
    timeline: Timeline, path: str | Path, *, title: str = "", ranks_per_node: int | None = None
) -> None:
    """Write a picture of the timeline; the ending of `path` chooses the format."""
    require("pictures", "matplotlib")
    figure = picture_of(timeline, title=title, ranks_per_node=ranks_per_node)
    if Path(path).suffix == ".svg":
        Path(path).write_text(svg_of(figure), encoding="utf-8")
    else:
        figure.savefig(path)


def svg_of(figure: Any) -> str:
    """Return a matplotlib figure as SVG, the same for equal figures.

    Texts stay texts, and everything drawn in `INK` follows the colour scheme of the reader.
    """
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_flexseq"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    tag_end = text.index(">", text.index("<svg")) + 1
    (ink, paper), (dark_ink, dark_paper) = SCHEMES
    style = (
        f"<style>svg{{color:{ink};background:{paper}}}@media (prefers-color-scheme:dark)"
        f"{{svg{{color:{dark_ink};background:{dark_paper}}}}}</style>"
    )
    return text[:tag_end] + style + text[tag_end:].replace(INK, "currentColor")


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of that size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_of(timeline: Timeline, *, title: str = "", ranks_per_node: int | None = None) -> Any:
    """Return a picture of the timeline as a matplotlib figure."""
    width = min(MOST_WIDTH, max(WIDTH, WIDTH_OF_MICRO_BATCH * len(timeline.starts)))
    height = min(9.0, 2.0 + 0.1 * max(timeline.world_size, 8))
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    _draw_events(axes, timeline)
    for at in boundaries(timeline):
        axes.axvline(at / _scale(timeline), color=INK, linewidth=0.7)
    _number_micro_batches(axes, timeline, width * POINTS)
    for rank in range(0, timeline.world_size, ranks_per_node or timeline.world_size)[1:]:
        axes.axhline(rank - 0.5, color=INK, linewidth=0.5, alpha=0.45)  # between nodes
    _label_axes(axes, timeline, ranks_per_node, width)
    _draw_legend(figure, timeline, columns=int(width / 2))
    axes.set_title(
        f"{title}\n{shares(timeline)}".strip(),
        loc="left",
        fontsize=10,
        color=INK,
        linespacing=1.5,
        pad=16,
        parse_math=False,  # the title has names from files
    )
    return figure


def _draw_events(axes: Any, timeline: Timeline) -> None:
    """Draw a box for every block of equal events, with white space between groups."""
    from matplotlib.collections import PolyCollection

    drawn = [event for event in timeline.events if event.kind != "wait"]
    edges = _group_edges(drawn)
    scale = _scale(timeline)
    colour2boxes: dict[str, list[Any]] = {}
    for first, stop, event in blocks(drawn):
        if event.kind in ACTION_COLOURS:
            lowest, highest = first, stop  # a stage has no group: white space around each block
        else:
            lowest, highest = edges[event.micro_batch, event.group]
        low = first - 0.5
        high = stop - 0.5
        if first == lowest:
            low += GAP
        if stop == highest:
            high -= GAP
        left = event.start / scale
        right = event.stop / scale
        corners = [(left, low), (left, high), (right, high), (right, low)]
        colour2boxes.setdefault(_colour(event), []).append(corners)
    for colour, boxes in colour2boxes.items():
        axes.add_collection(
            PolyCollection(boxes, facecolors=colour, edgecolors="none", antialiaseds=False)
        )


def _group_edges(events: Sequence[Event]) -> dict[tuple[int, int | None], tuple[int, int]]:
    """Return the first rank and the one past the last of each (micro-batch, group).

    Events without a group have (-1, -1): no rank is at their edge.
    """
    edges: dict[tuple[int, int | None], tuple[int, int]] = {}
    for event in events:
        key = (event.micro_batch, event.group)
        if event.group is None:
            edges[key] = (-1, -1)
        else:
            low, high = edges.get(key, (event.rank, event.rank + 1))
            edges[key] = (min(low, event.rank), max(high, event.rank + 1))
    return edges


def blocks(events: Sequence[Event]) -> list[tuple[int, int, Event]]:
    """Join events that neighbouring ranks have at the same time in the same group.

    Returns (first rank, the one past the last, one of the events) of every block.
    """

    def identity(event: Event) -> tuple[Any, ...]:
        group = -1 if event.group is None else event.group
        return event.start, event.stop, event.micro_batch, group, event.kind, event.label

    blocks: list[tuple[int, int, Event]] = []
    for event in sorted(events, key=lambda e: (identity(e), e.rank)):
        if blocks:
            first, stop, member = blocks[-1]
            if stop == event.rank and identity(member) == identity(event):
                blocks[-1] = (first, stop + 1, member)
                continue
        blocks.append((event.rank, event.rank + 1, event))
    return blocks


def _number_micro_batches(axes: Any, timeline: Timeline, width: float) -> None:
    """Write the number of each micro-batch above it, unless it would touch the previous one.

    width: of the picture, in points.
    """
    marks = [0, *boundaries(timeline), timeline.stop]
    if len(marks) == 2:
        return
    free = 0.0  # where the text before ends, in points
    for start, stop in pairwise(marks):
        number = timeline.starts.index(start) if start else 0
        text = str(number) if number else "micro-batch 0"
        middle = (start + stop) / 2
        at = middle / timeline.stop * width
        half = CHARACTER * len(text) / 2
        if number and at - half < free:
            continue
        free = at + half + CHARACTER
        axes.annotate(
            text,
            (middle / _scale(timeline), 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=LABEL,
            color=INK,
        )


def _label_axes(axes: Any, timeline: Timeline, ranks_per_node: int | None, width: float) -> None:
    """Label the axes; beyond 16 ranks only the first of each node, or every eighth, has a tick.

    width: of the picture, in inches; each has a tick of the time axis.
    """
    axes.locator_params(axis="x", nbins=int(width))
    axes.set_xlim(0, max(timeline.stop, 1) / _scale(timeline))
    axes.set_ylim(timeline.world_size - 0.5, -0.5)  # rank 0 on top
    step = ranks_per_node or max(1, timeline.world_size // 8)
    axes.set_yticks(range(0, timeline.world_size, step if timeline.world_size > 16 else 1))
    axes.set_ylabel("rank", color=INK)
    axes.set_xlabel("seconds" if timeline.unit == "ns" else f"{timeline.unit} per rank", color=INK)
    style_axes(axes)


def style_axes(axes: Any) -> None:
    """Give axes small ticks in `INK`, and lines on the left and at the bottom alone."""
    axes.tick_params(colors=INK, labelsize=LABEL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def _draw_legend(figure: Any, timeline: Timeline, columns: int) -> None:
    """Draw a legend of the degrees and kinds that the timeline has, in at most `columns`."""
    from matplotlib.patches import Patch

    kinds = {event.kind for event in timeline.events}
    patches = [
        Patch(
            facecolor=colour_of(degree),
            label=f"degree {degree} ({count} group{'s' * (count > 1)})",
        )
        for degree, count in degrees(timeline).items()
    ]
    patches += [
        Patch(facecolor=ACTION_COLOURS[kind], label=kind) for kind in ACTION_KINDS if kind in kinds
    ]
    for kind, colour, label in (
        ("experts", OTHER_COLOURS["experts"], "experts"),
        ("transfer", _paler(colour_of(4)), "exposed transfers (paler)"),
        ("constant", OTHER_COLOURS["constant"], "constant per micro-batch"),
    ):
        if kind in kinds:
            patches.append(Patch(facecolor=colour, label=label))
    patches.append(Patch(facecolor="none", edgecolor=INK, linewidth=0.5, label="idle"))
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=min(columns, len(patches)),
        fontsize=LABEL,
        frameon=False,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.6,
    )


def colour_of(degree: int) -> str:
    """Return the colour of groups of `degree` ranks, written #rrggbb."""
    lower = min(max(degree, 1).bit_length(), len(COLOURS)) - 1
    upper = min(lower + 1, len(COLOURS) - 1)
    return _mixed(COLOURS[lower], COLOURS[upper], math.log2(max(degree, 1)) - lower)


def _colour(event: Event) -> str:
    """Return an event's colour: by its kind, and by its group's degree."""
    if event.kind in OTHER_COLOURS:
        return OTHER_COLOURS[event.kind]
    if event.kind in ACTION_COLOURS:
        return _paler(ACTION_COLOURS[event.kind], SHADE * (event.micro_batch % 2))
    if event.kind == "transfer":
        return _paler(colour_of(event.degree))
    return colour_of(event.degree)


def _paler(colour: str, share: float = PALER) -> str:
    """Return a colour, written #rrggbb, moved towards white by `share`."""
    return _mixed(colour, "#ffffff", share)


def _mixed(colour: str, other: str, share: float) -> str:
    """Return a colour, written #rrggbb, moved towards the other one by `share`; at most 1."""
    found = "#"
    for at in (1, 3, 5):
        part, target = int(colour[at : at + 2], 16), int(other[at : at + 2], 16)
        found += f"{round(part + min(share, 1.0) * (target - part)):02x}"
    return found


def _scale(timeline: Timeline) -> float:
    """Return timeline units per unit of the time axis."""
    return 1e9 if timeline.unit == "ns" else 1.0
