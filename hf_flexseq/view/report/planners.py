"""The planners: seconds of a step, what they consist of, and all other figures of `compare`."""

from collections.abc import Sequence
from itertools import accumulate

from hf_flexseq.view.report.charts import key, pattern, percent
from hf_flexseq.view.report.markup import Markup, element, joined, table
from hf_flexseq.view.report.words import seconds, share
from hf_flexseq.view.results import Result

HEAD = (
    "planner",
    "seconds",
    "of the fixed degree's",
    "gap",
    "simulated",
    "communication",
    "idle",
    "GiB",
    "micro-batches",
    "planning",
)
# Parts of a bar: their class in the style sheet, and their name.
PARTS = (
    ("busy", "compute, and what every micro-batch costs"),
    ("moving", "communication"),
    ("idle", "idle"),
)


def fixed_degree(results: Sequence[Result]) -> Result | None:
    """Return what the best fixed degree reached; None where none could."""
    for result in results:
        if result.name.startswith("static") and result.problem is None:
            return result
    return None


def planning(results: Sequence[Result]) -> Result | None:
    """Return what planning reached: the default planner, or else the fastest other one that is no
    fixed degree; None where there is none."""
    able = [r for r in results if r.problem is None and not r.name.startswith("static")]
    by_name = {result.name: result for result in able}
    return by_name.get("auto") or min(able, key=lambda result: result.closed_s, default=None)


def planners_part(results: Sequence[Result]) -> Markup:
    """Return the part of the page about planners."""
    able = [result for result in results if result.problem is None]
    fixed = fixed_degree(results)
    problems = [
        element("li", element("strong", result.name), f": {result.problem}")
        for result in results
        if result.problem is not None
    ]
    return element(
        "section",
        element("h2", "Planners"),
        _legend(),
        _bars(able),
        table(HEAD, [_row(result, fixed) for result in able], caption=EXPLAINED),
        element("p", "Without figures:") if problems else None,
        element("ul", *problems) if problems else None,
        id="planners",
    )


EXPLAINED = (
    "Means over the steps. Seconds: by the closed form of the cost model, as planners count. Gap: "
    "how far they lie above a bound that no plan can undercut. Simulated: with the waits between "
    "ranks that the closed form cannot see. Communication and idle: shares of all ranks' "
    "simulated time in which they only send and receive, or wait. GiB: the most that any rank "
    "holds in any step. Planning: seconds to make a step's plan, beside training in a run."
)


def _row(result: Result, fixed: Result | None) -> tuple[str, ...]:
    """Return the cells of a planner, in the order of `HEAD`."""
    ratio = "" if fixed is None else f"{result.closed_s / fixed.closed_s:.2f}"
    return (
        result.name,
        f"{result.closed_s:.3f}",
        ratio,
        share(result.gap),
        f"{result.simulated_s:.3f}",
        share(result.transfers),
        share(result.idle),
        f"{result.peak_bytes / 2**30:.2f}",
        f"{result.micro_batches:.1f}",
        seconds(result.planning_s),
    )


def _legend() -> Markup:
    """Return what the parts of a bar are."""
    keys = (key(class_, name) for class_, name in PARTS)
    return element("p", "Simulated seconds of a step: ", *keys, class_="legend")


def _bars(results: Sequence[Result]) -> Markup:
    """Return a bar for each planner, as long as its simulated seconds."""
    most = max((result.simulated_s for result in results), default=0.0)
    rows = []
    for result in results:
        length = result.simulated_s / most if most else 0.0
        widths = (1 - result.transfers - result.idle, result.transfers, result.idle)
        starts = accumulate(widths, initial=0.0)
        boxes = []
        for (class_, _), width, start in zip(PARTS, widths, starts, strict=False):
            boxes.append(
                element(
                    "rect",
                    x=percent(length * start),
                    width=percent(length * max(0.0, width)),
                    height="100%",
                    class_=class_,
                )
            )
        rows += [
            element("span", result.name, class_="name"),
            element("svg", *boxes, role="img", aria_label=_says(result)),
            element("span", seconds(result.simulated_s), class_="value"),
        ]
    moving = pattern("moving", "#f3b85f", 2, "#6b4310")
    defs = element("svg", element("defs", moving), width=0, height=0, class_="defs")
    return joined(defs, element("div", *rows, class_="bars"))


def _says(result: Result) -> str:
    """Return a bar in a sentence."""
    return (
        f"{result.name}: {seconds(result.simulated_s)} simulated, communication "
        f"{share(result.transfers)}, idle {share(result.idle)}"
    )
