"""`report`: one HTML page about lengths that are not trained on yet, or about a run's trace.

Lengths are planned by all planners, as `compare` does with the first steps of the file, and one of
the steps is drawn as `auto` plans it. A trace has its own plans and measured seconds; with a
topology and a cost model its first steps are planned again by all planners, too.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hf_flexseq import __version__
from hf_flexseq.base.reading import BeyondLimit
from hf_flexseq.base.values import in_errors, printable, several
from hf_flexseq.cli.compare import COLUMNS, ROW_BY_ROW, Result, columns_of, results_of
from hf_flexseq.cli.plan import in_steps, parse_rows, read_rows, summary, text_of
from hf_flexseq.cli.view import drawn
from hf_flexseq.command_line import say
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.plan.files import RecordedStep, StepsFile, parse_steps
from hf_flexseq.planner.shared_rows import SharedRows
from hf_flexseq.view.picture import picture_of, require
from hf_flexseq.view.report import (
    ROWS,
    StepRow,
    data_uri,
    lengths_figure,
    lengths_text,
    page,
    run_text,
    step_row,
    steps_figure,
    tower_text,
)

STEPS = 5  # steps that are planned unless --steps says otherwise

# A key of every line of a trace, and of no line of a data set.
_PLAN = re.compile(r'"objective_s"\s*:')


def report(options: Namespace) -> None:
    """Write the page, and print its summary."""
    require("reports", "jinja2", "matplotlib")
    folder = Path(options.html).parent
    if not folder.is_dir():
        raise ValueError(f"--html {options.html}: directory {folder} does not exist")
    given, file = _source(options)
    remarks: list[str] = []
    results: list[Result] = []
    columns = tuple(COLUMNS)
    if file is None:
        if options.topology is None or options.cost_model is None:
            raise ValueError(
                f"{options.plan} holds lengths: to plan them, give --topology and --cost-model"
            )
        steps = list(in_steps(given, options))
        first = steps[: options.steps]
        results = results_of(first, options)
        columns = tuple(columns_of(first, load_cost_model(options.cost_model)))
        lines = _best_plans(results)
        if len(lines) < len(steps):
            remarks.append(f"The first {len(lines)} of {len(steps):,} steps were planned.")
    else:
        lines = _last_runs(file)
        remarks += _trace_remarks(file, lines)
        groups = all(isinstance(line.plan, Plan) for line in lines)
        if options.topology is not None and options.cost_model is not None and groups:
            plans = [line.plan for line in lines[: options.steps]]
            planned = [SharedRows.of_plan(plan) for plan in plans if isinstance(plan, Plan)]
            most = max(len(step.rows) for step in planned)
            options.limits.refuse_above("sequences", most, f"a step has {most:,} sequences")
            steps = [step for step in planned if step.rows]
            if steps:
                results = results_of(steps, options)
                columns = tuple(columns_of(steps, load_cost_model(options.cost_model)))
                remarks.append(f"The table of planners is of the first {len(planned)} steps.")
                if any(line.tower is not None for line in lines):
                    remarks.append("It has sequences alone, without images.")
            else:
                remarks.append(f"The first {several(len(planned), 'step')} had no sequences.")
    rows = _rows(lines)
    sentences = [
        lengths_text(given.rows),
        run_text(rows),
        _planners_text(results, options),
        tower_text(rows),
        _in_groups_text(results),
    ]
    sentences = [sentence for sentence in sentences if sentence]
    title, figure = _drawn_step(lines, rows, options)
    able = [result for result in results if result.problem is None]
    text = page(
        source=_name(options),
        made_by=_made_by(options),
        summary=sentences,
        remarks=remarks,
        lengths_figure=data_uri(lengths_figure(given.rows)),
        columns=columns,
        rows=[result.cells() for result in able],
        problems=[(result.name, result.problem) for result in results if result.problem],
        steps=rows[:ROWS],
        left_out=len(rows[ROWS:]),
        steps_figure=data_uri(steps_figure(rows)) if len(rows) > 1 else "",
        step_title=title,
        step_figure=figure,
    )
    Path(options.html).write_text(text, encoding="utf-8")
    for sentence in sentences:
        print(sentence)
    print(f"{options.html}: {len(text.encode()) / 1e3:,.0f} KB")
    if file is not None and file.broken:
        say(options, f"{options.plan}: {file.remark()}")


def _source(options: Namespace) -> tuple[SharedRows, StepsFile | None]:
    """Return all rows, and the steps of a trace or None."""
    path = Path(options.plan)
    if path.is_dir() or path.suffix == ".parquet":
        return read_rows(options.plan, options), None
    text = text_of(options.plan, options)
    if not text.lstrip().startswith("{") or not _PLAN.search(text):
        return parse_rows(text, options.plan, options), None
    with in_errors(options.plan):
        file = parse_steps(text, options.limits)
        rows: list[int] = []
        for line in _last_runs(file):
            plan = line.plan
            rows += SharedRows.of_plan(plan).rows if isinstance(plan, Plan) else plan.lengths
        if not rows:
            raise ValueError("no step has a sequence")
    return SharedRows(rows=tuple(rows)), file


# ---- planners


def _best_plans(results: Sequence[Result]) -> list[RecordedStep]:
    """Return the plans of `auto`, or else of the fastest planner with plans."""
    able = [result for result in results if result.problem is None]
    best = min(able, key=lambda result: (result.name != "auto", result.seconds))
    return [
        RecordedStep(number=number, plan=plan, measured_s=None, tower=tower)
        for number, (plan, tower) in enumerate(zip(best.plans, best.towers, strict=True))
    ]


def _planners_text(results: Sequence[Result], options: Namespace) -> str:
    """Return the gain of planning over the best single degree, in a few sentences."""
    able = {}
    apart = None  # `auto` without shared prefixes
    for result in results:
        if result.name.endswith(ROW_BY_ROW):
            apart = result
        elif result.problem is None:
            able[result.name.split(",")[0]] = result
    flexible = [result for name, result in able.items() if name != "static"]
    if not flexible:
        return ""
    best = able.get("auto") or min(flexible, key=lambda result: result.seconds)
    beside = " without the tower" if best.tower_s else ""
    text = f"{best.name} takes {best.seconds:.3g} s per step{beside}"
    if "static" in able:
        fixed = able["static"]
        degree = fixed.name.removeprefix("static, ")
        text += (
            f", {best.seconds / fixed.seconds:.2f}x of the {fixed.seconds:.3g} s of the best "
            f"single degree ({degree})"
        )
    elif any(result.name == "static" for result in results):
        text += "; no single degree can run these lengths"
    if apart is not None and apart.problem is None:
        gain = best.seconds / apart.seconds
        text += f", and {gain:.2f}x of the {apart.seconds:.3g} s row by row"
    cost = load_cost_model(options.cost_model)
    return (
        f"{text}. That is predicted by the cost model {cost.name}"
        f"{cost.experts_text(options.topology.world_size, before=', ')}, on "
        f"{options.topology} in {options.sync}, and not measured."
    )


def _in_groups_text(results: Sequence[Result]) -> str:
    """Return, in a sentence, the seconds of a tower run as in other stacks; "" without images."""
    able = [result for result in results if result.problem is None and result.tower_s]
    if not able:
        return ""
    seconds = ", ".join(f"{result.in_groups_s:.3g} s ({result.name})" for result in able)
    return (
        f"A tower that encodes the images of a group's sequences on every rank of the group would "
        f"add to a step: {seconds}."
    )


# ---- steps


def _last_runs(file: StepsFile) -> list[RecordedStep]:
    """Return the kept lines by step: the last run of each, a line per replica."""
    by_number: dict[int, list[RecordedStep]] = {}
    for step in file.steps:
        if step.replica == 0:  # the first line of a step
            by_number[step.number] = []
        by_number.setdefault(step.number, []).append(step)
    return [line for number in sorted(by_number) for line in by_number[number]]


def _rows(lines: Sequence[RecordedStep]) -> list[StepRow]:
    """Return the steps in numbers; the replicas of a step are one."""
    by_number: dict[int, list[RecordedStep]] = {}
    for line in lines:
        by_number.setdefault(line.number, []).append(line)
    return [step_row(replicas) for replicas in by_number.values()]


def _trace_remarks(file: StepsFile, lines: Sequence[RecordedStep]) -> list[str]:
    """Return remarks on the lines and seconds that a trace's figures do not cover."""
    remarks = []
    if file.broken:
        remarks.append(f"{file.remark().capitalize()}.")
    if len(lines) < len(file.steps):
        again = len(file.steps) - len(lines)
        remarks.append(f"Left out: {again:,} lines of steps that ran again later.")
    passes = max(line.passes for line in lines)
    if passes > 1:
        remarks.append(
            f"Micro-batches ran up to {passes} times in a step: measured seconds count all of "
            "them, predicted ones a forward and a backward."
        )
    return remarks


def _drawn_step(
    lines: Sequence[RecordedStep], rows: Sequence[StepRow], options: Namespace
) -> tuple[str, str]:
    """Return the title and the figure of one step; the figure is "" beyond a limit."""
    number = options.step
    why = "the step of --step"
    if number is None:
        in_order = sorted(rows, key=lambda row: (row.measured_s or row.predicted_s, row.number))
        number = in_order[(len(rows) - 1) // 2].number
        why = "the only step" if len(rows) == 1 else "the median step by its seconds"
    chosen = next((line for line in lines if line.number == number), None)
    if chosen is None:
        raise ValueError(
            f"{options.plan}: expected --step from {rows[0].number} to {rows[-1].number}, "
            f"got {number}"
        )
    title = f"Step {number}, {why}: {summary(chosen.plan, chosen.tower)}."
    try:
        timeline = drawn(chosen, options)
    except BeyondLimit as error:
        return f"{title} Not drawn: {error}.", ""
    node = options.topology.ranks_per_node if options.topology else None
    return title, data_uri(picture_of(timeline, ranks_per_node=node))


# ---- names


def _name(options: Namespace) -> str:
    """Return the file's name without its folder."""
    return "stdin" if options.plan == "-" else printable(Path(options.plan).name)


def _made_by(options: Namespace) -> str:
    """Return the version and the command that made the page, files by their names alone."""
    words = [Path(word).name if "/" in word else word for word in options.argv]
    return printable(f"Made by hf_flexseq {__version__}: flexseq {shlex.join(words)}")
