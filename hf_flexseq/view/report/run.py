"""A run, step by step: predicted against measured, tokens per second, waiting for plans.

A run of thousands of steps is drawn as some hundred points, each the mean of neighbouring steps,
with a band from the least of them to the most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hf_flexseq.view.report.charts import Tick, band, chart, key, line, ticks_up_to, values_up_to
from hf_flexseq.view.report.markup import Markup, element, joined, table
from hf_flexseq.view.report.words import counted, seconds, share

POINTS = 250  # of a line at most
# What lies above so many times the 98th percentile is cut: a first step may take a hundred others.
CUT = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A step of a run in numbers."""

    number: int
    """Its number, as counted by the run."""
    tokens: int
    """Tokens that it trained on."""
    predicted_s: float
    """Seconds that the plan promised."""
    measured_s: float | None
    """Seconds that it took: of a micro-batch those of its slowest rank; None where unknown."""
    waited_s: float | None
    """Seconds that training waited for the plan; None where unknown."""
    planning_s: float
    """Seconds that planning took, mostly beside training."""
    passes: int = 1
    """How often its micro-batches ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """A run in numbers."""

    measured: tuple[RunStep, ...]
    """The steps that somebody measured."""
    ratio: float
    """Measured seconds of these steps over predicted ones; 0 where nothing was predicted."""
    error: float
    """Median of the steps' distances between measured and predicted, over measured."""
    tokens_per_s: float
    """Tokens per measured second."""
    waited: float | None
    """Seconds of waiting for plans over measured seconds; None where unknown."""


def totals(steps: Sequence[RunStep]) -> Totals | None:
    """Return the totals of a run; None where no step was measured."""
    measured = tuple(step for step in steps if step.measured_s)
    if not measured:
        return None
    took = sum(_measured(step) for step in measured)
    predicted = sum(step.predicted_s for step in measured)
    distances = [abs(_measured(s) - s.predicted_s) / _measured(s) for s in measured]
    waits = [step.waited_s for step in measured if step.waited_s is not None]
    return Totals(
        measured=measured,
        ratio=took / predicted if predicted else 0.0,
        error=median(distances),
        tokens_per_s=sum(step.tokens for step in measured) / took,
        waited=sum(waits) / took if len(waits) == len(measured) else None,
    )


def run_part(steps: Sequence[RunStep], remarks: Sequence[str]) -> Markup:
    """Return the part of the page about a run. remarks: paragraphs at its end."""
    total = totals(steps)
    if total is None:
        return element(
            "section",
            element("h2", "Run"),
            element("p", "No step has measured seconds: these are plans that nobody ran."),
            *(element("p", remark) for remark in remarks),
            id="run",
        )
    measured = total.measured
    return element(
        "section",
        element("h2", "Run"),
        element(
            "p",
            key("measured", "measured"),
            key("predicted", "predicted"),
            class_="legend",
        ),
        _lines(
            measured,
            (("measured", _measured), ("predicted", lambda step: step.predicted_s)),
            "seconds of a step",
        ),
        _lines(
            measured,
            (("measured", lambda step: step.tokens / _measured(step)),),
            "tokens per second",
        ),
        _waiting(measured),
        _numbers(steps, total),
        *(element("p", remark) for remark in remarks),
        id="run",
    )


def _measured(step: RunStep) -> float:
    """Return the measured seconds of a step that has them."""
    assert step.measured_s is not None, "only measured steps are drawn"
    return step.measured_s


def _waiting(steps: Sequence[RunStep]) -> Markup:
    """Return the chart of exposed planning, or a sentence where nothing is known of it."""
    if all(step.waited_s is None for step in steps):
        return element(
            "p",
            "How long training waited for plans is not in this trace: runs write it (waited_s) "
            "since this version.",
        )
    known = [step for step in steps if step.waited_s is not None]
    made = _lines(
        known, (("measured", lambda step: 1e3 * (step.waited_s or 0.0)),), "exposed planning, ms"
    )
    return joined(
        made,
        element(
            "p",
            "Exposed planning: milliseconds that training waited for the plan of a step. Planning "
            f"took {seconds(median(step.planning_s for step in known))} of a step in the median, "
            "the rest of it beside training.",
        ),
    )


def _numbers(steps: Sequence[RunStep], total: Totals) -> Markup:
    """Return the run in a table."""
    row = (
        f"steps {steps[0].number:,} to {steps[-1].number:,}",
        f"{len(total.measured):,} of {len(steps):,}",
        seconds(sum(_measured(step) for step in total.measured)),
        f"{total.ratio:.2f}",
        share(total.error),
        f"{total.tokens_per_s:,.0f}",
        "unknown" if total.waited is None else share(total.waited),
    )
    head = (
        "",
        "measured",
        "took",
        "over predicted",
        "median error",
        "tokens per second",
        "exposed planning",
    )
    caption = (
        "Seconds are those of the micro-batches on their slowest ranks, without what comes "
        "between steps (optimizer, logging, data). Median error: half of the steps are "
        "predicted better."
    )
    return table(head, [row], caption=caption)


# ---- lines


def _lines(
    steps: Sequence[RunStep],
    series: Sequence[tuple[str, Callable[[RunStep], float]]],
    y_label: str,
) -> Markup:
    """Return a chart over steps. series: class and values of each line, the first one with a
    band."""
    values = [np.array([value(step) for step in steps]) for _, value in series]  # [steps] each
    top = _top(values)
    above = max(int((one > top).sum()) for one in values)
    numbers = [step.number for step in steps]
    parts = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
    shapes: list[str] = []
    for (class_, _), of_steps in zip(series, values, strict=True):
        cut = np.minimum(of_steps, top) / top if top else of_steps
        xs = [_place(float(np.mean([numbers[i] for i in part])), numbers) for part in parts]
        if not shapes and len(parts) < len(steps):
            lows = [(x, float(cut[part].min())) for x, part in zip(xs, parts, strict=True)]
            highs = [(x, float(cut[part].max())) for x, part in zip(xs, parts, strict=True)]
            shapes.append(band(lows, highs, f"band {class_}"))
        points = [(x, float(cut[part].mean())) for x, part in zip(xs, parts, strict=True)]
        if len(points) == 1:  # one step: a line across the chart
            points = [(0.0, points[0][1]), (1.0, points[0][1])]
        shapes.append(line(points, f"line {class_}"))
    remark = ""
    if len(parts) < len(steps):
        remark = "; lines are means of neighbouring steps, the band goes from least to most"
    if above:
        most = max(float(one.max()) for one in values)
        remark += f"; {counted(above, 'step')} above the chart, the highest at {most:,.4g}"
    return chart(
        joined(*shapes),
        x_ticks=_step_ticks(numbers),
        y_ticks=ticks_up_to(top),
        x_label=f"step{remark}",
        y_label=y_label,
        says=f"{y_label} from step {numbers[0]} to step {numbers[-1]}, up to {top:,.4g}.",
        height=180,
    )


def _top(values: Sequence[np.ndarray]) -> float:
    """Return the top of a chart: the largest value, or less where few values lie far above all
    others."""
    together = np.concatenate(values)
    most = float(together.max())
    usual = CUT * float(np.percentile(together, 98))
    return 1.05 * (usual if 0 < usual < most else most)


def _place(number: float, numbers: Sequence[int]) -> float:
    """Return where a step stands on the axis, from 0 to 1."""
    first, last = numbers[0], numbers[-1]
    return (number - first) / (last - first) if last > first else 0.5


def _step_ticks(numbers: Sequence[int]) -> list[Tick]:
    """Return the ticks of an axis of steps."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return [Tick(0.5, f"{first:,}")]
    ticks = []
    for value in values_up_to(float(last)):
        if value >= first and value == int(value):
            ticks.append(Tick(_place(value, numbers), f"{int(value):,}"))
    return ticks
