"""Charts of a page: inline SVG that stretches with the page, and texts around it that do not.

A plot's shapes stand in a box `WIDE` units wide and `HIGH` high, which is drawn as wide as the
page; texts are HTML at a percentage of it, so that they are legible on a telephone, too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_flexseq.view.report.markup import Markup, element, joined

WIDE, HIGH = 1000.0, 100.0  # units of a plot

TICKS = 5  # about so many on an axis

# Marks in a tile of 8 by 8 pixels, which tell colours apart for every eye and on every printer.
# None is a line up or across: those would look like borders of time or of ranks.
TILE = 8
MARKS = (
    "",
    "M3 4h2",
    "M0 8L8 0M-1 1L1 -1M7 9L9 7",
    "M0 0L8 8M-1 7L1 9M7 -1L9 1",
    "M0 0L8 8M8 0L0 8",
    "M4 1.5v5M1.5 4h5",
    "M2 2h4v4h-4z",
    "M0 6L4 2L8 6",
    "M1.5 2h5M-2.5 6h5M5.5 6h5",
    "M0.5 2h2M4.5 2h2M2.5 6h2M6.5 6h2",
)


@dataclass(frozen=True, slots=True)
class Tick:
    """A value on an axis."""

    share: float
    """Where it stands, from 0 at the beginning of the axis to 1 at its end."""
    text: str
    """What stands there."""


def chart(
    shapes: str,
    *,
    x_ticks: Sequence[Tick],
    y_ticks: Sequence[Tick],
    x_label: str,
    y_label: str,
    says: str,
    height: int = 200,
) -> Markup:
    """Return a chart with its axes.

    shapes: SVG in the units of a plot, y downwards. says: the chart in a sentence, for those who
    cannot see it. height: of the plot in pixels.
    """
    lines = (
        element("path", d=f"M0 {number(HIGH * (1 - tick.share))}h{WIDE:g}", class_="grid")
        for tick in y_ticks
    )
    return element(
        "div",
        element("div", y_label, class_="y-label"),
        element(
            "div",
            canvas(joined(*lines, shapes), f"0 0 {WIDE:g} {HIGH:g}", says=says),
            *along(x_ticks),
            *(label(tick.text, "y", f"top:{percent(1 - tick.share)}") for tick in y_ticks),
            class_="plot",
            style=f"height:{height}px",
        ),
        element("div", x_label, class_="x-label"),
        class_="chart",
    )


def canvas(shapes: str, view_box: str, *, says: str, class_: str | None = None) -> Markup:
    """Return an SVG that stretches to its surroundings. says: what it shows, in a sentence."""
    return element(
        "svg",
        shapes,
        viewBox=view_box,
        preserveAspectRatio="none",
        role="img",
        aria_label=says,
        class_=class_,
    )


def along(ticks: Iterable[Tick]) -> list[Markup]:
    """Return the texts of a horizontal axis; every other one is left out on narrow pages."""
    texts = []
    for index, tick in enumerate(ticks):
        kind = "x odd" if index % 2 else "x"
        texts.append(label(tick.text, kind, f"left:{percent(tick.share)}"))
    return texts


def label(text: str, kind: str, place: str) -> Markup:
    """Return a text beside a plot. kind: of the text, in the style sheet. place: a CSS style."""
    return element("span", text, class_=f"t {kind}", style=place)


def key(class_: str, text: str) -> Markup:
    """Return an entry of a legend: a sample of a class's colour, and what it stands for."""
    return element("span", element("span", class_=f"key {class_}"), f"{text} ", class_="entry")


def bar(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """Return a bar in the units of a plot."""
    return element(
        "rect", x=number(x), y=number(y), width=number(width), height=number(height), class_=class_
    )


def line(points: Iterable[tuple[float, float]], class_: str) -> Markup:
    """Return a line through points, each from 0 to 1 to the right and upwards."""
    path = " ".join(_at(point) for point in points)
    return element("path", d=f"M{path}", class_=class_)


def band(
    lows: Sequence[tuple[float, float]], highs: Sequence[tuple[float, float]], class_: str
) -> Markup:
    """Return the surface between two lines of points."""
    path = " ".join(_at(point) for point in (*lows, *reversed(highs)))
    return element("path", d=f"M{path}z", class_=class_)


def pattern(
    name: str, colour: str, index: int, ink: str, *, transform: str | None = None
) -> Markup:
    """Return a colour with the marks number `index`, to be used as `url(#name)`.

    ink: colour of the marks. transform: from pixels to the units of what is filled.
    """
    return element(
        "pattern",
        element("rect", width=TILE, height=TILE, fill=colour),
        element("path", d=MARKS[index], stroke=ink, fill="none", stroke_width="1.2"),
        id=name,
        width=TILE,
        height=TILE,
        patternUnits="userSpaceOnUse",
        patternTransform=transform,
    )


# ---- numbers


def values_up_to(most: float) -> list[float]:
    """Return round values from 0 to at most `most`, in equal steps."""
    if most <= 0:
        return [0.0]
    step = _round_step(most / TICKS)
    return [step * index for index in range(math.floor(most / step * (1 + 1e-9)) + 1)]


def ticks_up_to(most: float) -> list[Tick]:
    """Return the ticks of an axis from 0 to `most`."""
    if most <= 0:
        return [Tick(0.0, "0")]
    return [Tick(value / most, f"{value:,.10g}") for value in values_up_to(most)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    for factor in (1, 2, 5):
        if factor * power >= least:
            return factor * power
    return 10 * power


def number(value: float) -> str:
    """Return a coordinate with as many digits as can be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """Return a share as CSS has it."""
    return f"{100 * share:.3g}%"


def _at(point: tuple[float, float]) -> str:
    """Return a point, from 0 to 1 to the right and upwards, in the units of a plot."""
    x, y = point
    return f"{number(WIDE * x)} {number(HIGH * (1 - y))}"
