"""A page to send to somebody: lengths, planners, the steps of a run, one step drawn.

    page(parts)    one HTML file without scripts, which fetches nothing

The page follows the reader's light or dark colour scheme. `report.html.jinja` is the template; it
escapes all values. Figures are SVG in images, so that a script in one would not run either.
"""

import base64
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

import numpy as np

from hf_flexseq.plan.files import RecordedStep
from hf_flexseq.plan.images import TowerLoad
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.view.picture import INK, LABEL, colour_of, new_figure, style_axes, svg_of

# Bytes of an SVG above which a figure is embedded as PNG.
MOST_SVG_BYTES = 400_000
# Points of a line of a run's steps at most; longer runs are drawn by means of neighbours.
POINTS = 200
# Rows of the table of steps.
ROWS = 200
# Share of the sequences, from the longest on, whose tokens are given.
LONGEST = 0.05

MEASURED, PREDICTED, FEW, MUCH = "#3d8fbf", "#e8924a", "#9aa5b4", "#3d8fbf"
TOWER = "#7a9e5f"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """A step of a file, or of a plan, in numbers."""

    number: int
    """Number of the step."""
    sequences: int
    """Sequences of the step."""
    degree2tokens: dict[int, int]
    """Tokens in groups of each degree, ascending; of a pipeline all under its number of stages."""
    how: str
    """Number of groups of each degree, or the pipeline's chunks and stages."""
    predicted_s: float
    """Predicted seconds, the tower's included."""
    measured_s: float | None
    """Measured seconds; None if unknown."""
    waited_s: float | None
    """Seconds that training waited for the plan; None if unknown."""
    tower: TowerLoad | None
    """The tower's work; None without images."""

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(self.degree2tokens.values())


def step_row(replicas: Sequence[RecordedStep]) -> StepRow:
    """Return a step in numbers. replicas: plans that run at the same time, one without pipelines.

    Seconds are the slowest replica's.
    """
    degree2tokens: dict[int, int] = defaultdict(int)
    degree2groups: dict[int, int] = defaultdict(int)
    hows = []
    for one in replicas:
        plan = one.plan
        if not isinstance(plan, Plan):
            degree2tokens[plan.stages] += sum(plan.lengths)
            hows.append(plan.how)
            continue
        for group in (group for batch in plan.micro_batches for group in batch.groups):
            degree2tokens[group.degree] += group.tokens(plan.lengths)
            degree2groups[group.degree] += 1
    hows += [f"{count:,} x {degree}" for degree, count in sorted(degree2groups.items())]
    measured = [sum(one.measured_s) for one in replicas if one.measured_s is not None]
    tower = replicas[0].tower
    tower_s = 0.0 if tower is None else tower.seconds
    return StepRow(
        number=replicas[0].number,
        sequences=sum(len(one.plan.lengths) for one in replicas),
        degree2tokens=dict(sorted(degree2tokens.items())),
        how=", ".join(hows),
        predicted_s=max(one.plan.objective_s for one in replicas) + tower_s,
        measured_s=max(measured) if len(measured) == len(replicas) else None,
        waited_s=replicas[0].waited_s,
        tower=tower,
    )


# ---- sentences


def lengths_text(lengths: Sequence[int]) -> str:
    """Return some lengths, at least one, in a sentence or two."""
    ascending = np.sort(np.array(lengths, dtype=np.int64))
    long = max(1, round(LONGEST * len(ascending)))
    share = int(ascending[-long:].sum()) / int(ascending.sum())
    return (
        f"{len(ascending):,} sequences with {ascending.sum():,} tokens: {ascending.mean():,.0f} "
        f"on average, {np.median(ascending):,.0f} at the median, {ascending[-1]:,} at most. "
        f"The longest {100 * LONGEST:.0f} % have {100 * share:.0f} % of the tokens."
    )


def tower_text(rows: Sequence[StepRow]) -> str:
    """Return the tower's work in some steps, in a sentence; "" without images."""
    loads = [row.tower for row in rows if row.tower is not None]
    if not loads:
        return ""
    seconds = [load.seconds for load in loads]
    twice = sum(load.forwards > 1 for load in loads)
    again = f" In {twice:,} steps it runs forward twice, to hold no graph." if twice else ""
    return (
        f"The vision tower encodes {sum(load.images for load in loads):,} images, each on one "
        f"rank, in predicted {sum(seconds) / len(seconds):.3g} s per step with images. The rank "
        f"with the most has {max(load.imbalance for load in loads):.3f}x of the mean at most."
        f"{again}"
    )


def run_text(rows: Sequence[StepRow]) -> str:
    """Return the seconds of a run's steps, in a few sentences; "" without measured seconds."""
    measured = [row for row in rows if row.measured_s]
    if not measured:
        return ""
    took = sum(row.measured_s or 0.0 for row in measured)
    predicted = sum(row.predicted_s for row in measured)
    errors = [abs(row.predicted_s / (row.measured_s or 1.0) - 1) for row in measured]
    text = (
        f"{len(measured):,} measured steps took {took:,.1f} s, "
        f"{sum(row.tokens for row in measured) / took:,.0f} tokens per second. "
        f"Predicted were {predicted:,.1f} s; a step's prediction is {100 * median(errors):.0f} % "
        "off at the median."
    )
    waits = [row.waited_s for row in measured if row.waited_s is not None]
    if len(waits) == len(measured):
        text += f" Training waited for plans for {100 * sum(waits) / took:.1f} % of that time."
    return text


# ---- figures


def lengths_figure(lengths: Sequence[int]) -> Any:
    """Return a histogram: shares of the sequences and of the tokens, by powers of two."""
    made = np.array(lengths, dtype=np.int64)
    powers = np.floor(np.log2(made)).astype(int)  # [sequences]
    bins = np.arange(powers.min(), powers.max() + 1)
    few = [float((powers == one).mean()) for one in bins]
    much = [float(made[powers == one].sum() / made.sum()) for one in bins]
    figure = new_figure(9.0, 2.6)
    axes = figure.add_subplot()
    axes.bar(bins + 0.3, 100 * np.array(few), 0.4, color=FEW, label="% of the sequences")
    axes.bar(bins + 0.7, 100 * np.array(much), 0.4, color=MUCH, label="% of the tokens")
    ticks = [*bins, bins[-1] + 1]
    axes.set_xticks(ticks, [_short(2 ** int(tick)) for tick in ticks])
    axes.set_xlabel("tokens of a sequence", color=INK)
    _finish(axes)
    return figure


def steps_figure(rows: Sequence[StepRow]) -> Any:
    """Return the seconds of each step, and below them its tokens by degree."""
    figure = new_figure(9.0, 4.4)
    seconds, tokens = figure.subplots(2, 1, sharex=True)
    numbers = _means([row.number for row in rows])
    seconds.plot(numbers, _means([row.predicted_s for row in rows]), ".-", color=PREDICTED,
                 label="predicted")  # fmt: skip
    if all(row.measured_s is not None for row in rows):
        measured = _means([row.measured_s or 0.0 for row in rows])
        seconds.plot(numbers, measured, ".-", color=MEASURED, label="measured")
    if any(row.tower is not None for row in rows):
        of_tower = _means([row.tower.seconds if row.tower else 0.0 for row in rows])
        seconds.plot(numbers, of_tower, ".-", color=TOWER, label="tower")
    seconds.set_ylim(bottom=0)
    seconds.set_ylabel("seconds", color=INK)
    degrees = sorted({degree for row in rows for degree in row.degree2tokens})
    below = np.zeros(len(numbers))
    width = (numbers[-1] - numbers[0]) / max(1, len(numbers) - 1) or 1.0
    for degree in degrees:
        of_degree = _means([row.degree2tokens.get(degree, 0) for row in rows])
        colour = colour_of(degree)
        tokens.bar(numbers, of_degree, 0.8 * width, below, color=colour, label=f"degree {degree}")
        below += of_degree
    tokens.set_ylabel("tokens", color=INK)
    tokens.set_xlabel("step", color=INK)
    tokens.xaxis.get_major_locator().set_params(integer=True)
    _finish(seconds)
    _finish(tokens)
    return figure


def _means(values: Sequence[float]) -> np.ndarray:
    """Return values, or at most `POINTS` means of neighbours."""
    parts = np.array_split(np.array(values, dtype=np.float64), min(POINTS, len(values)))
    return np.array([part.mean() for part in parts])


def _finish(axes: Any) -> None:
    """Style axes that have everything, and add their legend on the right."""
    style_axes(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.legend(
        frameon=False,
        fontsize=LABEL,
        labelcolor=INK,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )


def _short(tokens: int) -> str:
    """Return a power of two that is short on an axis: 512, 1K, 128K, 2M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def data_uri(figure: Any) -> str:
    """Return a figure as the address of an image: SVG, or PNG if that would be large."""
    data, kind = svg_of(figure).encode(), "svg+xml"
    if len(data) > MOST_SVG_BYTES:
        written = io.BytesIO()
        figure.savefig(written, format="png")
        data, kind = written.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


# ---- the page


def page(**parts: Any) -> str:
    """Return the page as HTML. parts: the values that `report.html.jinja` names."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (files(__package__) / "report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(parts)
