"""The page: a summary to read first, then the parts, in one file.

What the page may do stands in its Content-Security-Policy: load nothing, and run the one script
whose digest it names. Whatever a file or an option brings is escaped in `markup.py`, too.
"""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from hf_flexseq.view.report.lengths import LONGEST, Lengths, lengths_part
from hf_flexseq.view.report.markup import Markup, bullets, element, joined
from hf_flexseq.view.report.planners import fixed_degree, planners_part, planning
from hf_flexseq.view.report.run import RunStep, run_part, totals
from hf_flexseq.view.report.step import Step, step_part
from hf_flexseq.view.report.words import counted, seconds, share
from hf_flexseq.view.results import Result

# Less than this share of the fixed degree's seconds away from them is no difference.
LITTLE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a page shows; each part but the lengths may be absent."""

    source: str
    """Name of the file that the page is about."""
    lengths: Lengths
    """All lengths of the file."""
    length_remarks: tuple[str, ...] = ()
    """What else is to be said of them."""
    results: tuple[Result, ...] = ()
    """What each planner reached."""
    planned: str = ""
    """What the planners planned, in a sentence."""
    step: Step | None = None
    """The step that is drawn."""
    step_remark: str = ""
    """Why none is drawn."""
    run: tuple[RunStep, ...] = ()
    """The steps of a run, ascending; () for lengths that nobody ran."""
    run_remarks: tuple[str, ...] = ()
    """What else is to be said of the run."""
    made_by: str = ""
    """The version and the command that made the page."""


def page(report: Report) -> str:
    """Return the page as HTML."""
    style = _resource("style.css")
    script = _resource("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"hf_flexseq: {report.source}"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", _headline(report)),
            *(element("p", sentence) for sentence in summary(report)),
        ),
        run_part(report.run, report.run_remarks) if report.run else None,
        planners_part(report.results) if report.results else None,
        step_part(report.step) if report.step else element("p", report.step_remark),
        lengths_part(report.lengths, report.length_remarks),
        _words(report),
        element("footer", report.made_by),
        element("script", Markup(script)),
    )
    return "<!doctype html>\n" + element("html", head, "\n", body, lang="en") + "\n"


def _headline(report: Report) -> str:
    """Return what the page is about."""
    what = "What planning brings"
    if report.run:
        what = "What a run did" if totals(report.run) else "What was planned"
    return f"{what}: {report.source}"


# ---- the summary


def summary(report: Report) -> list[str]:
    """Return the page in a few paragraphs for somebody who reads no chart."""
    return [
        *_of_run(report),
        *_of_planners(report),
        *report.length_remarks,
        _of_lengths(report.lengths),
    ]


def _of_planners(report: Report) -> list[str]:
    """Return what planning brings over the best fixed degree."""
    if not report.results:
        return []
    made, fixed = planning(report.results), fixed_degree(report.results)
    if made is None:
        return ["No planner but a fixed degree has figures for these lengths; the reasons stand "
                "below."]  # fmt: skip
    bound = (
        f"Its plans lie {share(made.gap)} above a bound that no plan can undercut. It holds at "
        f"most {made.peak_bytes / 2**30:.1f} GiB on a rank."
    )
    if fixed is None:
        return [
            f"On these lengths planning takes {seconds(made.closed_s)} a step. No fixed degree "
            f"can run them; the reason stands below. {bound}",
            report.planned,
        ]
    degree = fixed.name.removeprefix("static, ")
    ratio = made.closed_s / fixed.closed_s
    against = f"{seconds(made.closed_s)} a step against {seconds(fixed.closed_s)}"
    if ratio < 1 - LITTLE:
        first = (
            f"On these lengths planning takes {ratio:.2f} of the seconds of the best fixed degree "
            f"({degree}): {against}."
        )
    else:
        first = (
            f"On these lengths planning brings little: it takes {ratio:.2f} of the seconds of the "
            f"best fixed degree ({degree}), {against}."
        )
    spent = (
        f"Ranks spend {share(made.transfers)} of the simulated time in communication, with the "
        f"fixed degree {share(fixed.transfers)}; they idle {share(made.idle)}, with the fixed "
        f"degree {share(fixed.idle)}."
    )
    return [f"{first} {spent} {bound}", f"{report.planned} {PREDICTED}"]


PREDICTED = (
    "All of this is predicted from the cost model, not measured: the figures are as good as that "
    "is for your machine and model, and flexseq calibrate measures it there."
)


def _of_run(report: Report) -> list[str]:
    """Return how a run went."""
    if not report.run:
        return []
    steps = counted(len(report.run), "step")
    total = totals(report.run)
    if total is None:
        return [f"{steps}, none of them measured."]
    text = (
        f"{steps} at {total.tokens_per_s:,.0f} tokens per second. They took {total.ratio:.2f} of "
        f"the predicted seconds; half of the steps are predicted within {share(total.error)}."
    )
    if total.waited is not None:
        text += (
            f" Training waited for plans for {share(total.waited)} of the time that steps took."
        )
    return [text]


def _of_lengths(lengths: Lengths) -> str:
    """Return what the lengths are."""
    return (
        f"{counted(lengths.sequences, 'sequence')} of {lengths.mean:,.0f} tokens on average, the "
        f"longest {lengths.longest:,}. The longest {100 * LONGEST:.0f} % of the sequences hold "
        f"{share(lengths.share_of_longest)} of the tokens."
    )


# ---- the end of the page


def _words(report: Report) -> Markup:
    """Return what the words on the page mean."""
    words = [
        ("rank", "one process with one device. A node is a machine with several."),
        ("degree", "how many ranks share the attention of a sequence."),
        ("group", "neighbouring ranks that work together on some sequences in a micro-batch."),
        ("micro-batch", "the groups that run together in one forward and backward."),
        ("step", "the micro-batches between two updates of the optimizer."),
        (
            "idle",
            "ranks that are done wait for the slowest one; white in the timeline.",
        ),
        (
            "fixed degree",
            "what a run without flexible groups can have: one degree for all sequences, of all "
            "that fit the one with the fewest seconds over the steps.",
        ),
    ]
    items = [joined(element("strong", name), f": {text}") for name, text in words]
    return element("section", element("h2", "Words"), bullets(*items), id="words")


def _resource(name: str) -> str:
    """Return a file that stands beside this module."""
    return (files(__package__) / name).read_text(encoding="utf-8")
