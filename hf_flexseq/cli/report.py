"""`report`: one HTML page about lengths that nobody has trained on yet, or about a run's trace.

Lengths are planned by all planners, as `compare` does with the first steps of the file, and one of
the steps is drawn as `auto` plans it. A trace has its own plans and measured seconds; with a
topology and a cost model its first steps are planned anew by all planners, too.
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hf_flexseq import __version__
from hf_flexseq.cli.commands import timeline_of
from hf_flexseq.cli.compare import result_of
from hf_flexseq.cli.files import PlannedStep, StepsFile, parse_steps, tell_broken_lines
from hf_flexseq.cli.planning import in_steps
from hf_flexseq.cli.progress import Progress
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.lengths import parse_lengths, read_lengths
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.reading import BeyondLimit, read_text
from hf_flexseq.registry import PLANNERS
from hf_flexseq.view.report import Report, RunStep, Step, lengths_of, page
from hf_flexseq.view.report.page import summary
from hf_flexseq.view.report.planners import planning
from hf_flexseq.view.report.words import counted
from hf_flexseq.view.results import Result

STEPS = 5  # steps that are planned unless --steps says otherwise

# Every line of a trace has this key, and no line of a data set that anybody has.
_PLAN = re.compile(r'"objective_s"\s*:')

# Mean lengths of the planned steps and of the file that differ by more are told.
UNLIKE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a file holds."""

    lengths: list[int]
    """Lengths of all sequences."""
    file: StepsFile | None
    """The steps of a plan trace; None for lengths."""


def report(options: Namespace) -> None:
    """Write the page, and print its summary."""
    folder = Path(options.html).parent
    if not folder.is_dir():
        raise ValueError(f"--html {options.html}: {folder} is no folder")
    source = _source(options)
    if source.file is None:
        made = _of_lengths(source.lengths, options)
    else:
        made = _of_trace(source.file, source.lengths, options)
    text = page(made)
    Path(options.html).write_text(text, encoding="utf-8")
    for sentence in summary(made):
        print(sentence)
    print(f"{options.html}: {len(text.encode()) / 1e3:,.0f} KB")
    if source.file is not None:
        tell_broken_lines(source.file, options)


def _source(options: Namespace) -> Source:
    """Return what the file holds: lengths in any form, or the steps of a run."""
    path = Path(options.plan)
    if path.is_dir() or path.suffix == ".parquet":
        return Source(lengths=read_lengths(path, options.column, options.limits), file=None)
    try:
        text = read_text(options.plan, options.limits)
        if not text.lstrip().startswith("{") or not _PLAN.search(text):
            return Source(lengths=parse_lengths(text, options.column, options.limits), file=None)
        file = parse_steps(text, options.limits)
        lengths = [length for step in _last_runs(file) for length in step.plan.lengths]
        if not lengths:
            raise ValueError("no step has a sequence")
    except ValueError as error:
        raise ValueError(f"{options.plan}: {error}") from error
    return Source(lengths=lengths, file=file)


# ---- lengths


def _of_lengths(lengths: list[int], options: Namespace) -> Report:
    """Return the report about lengths."""
    if options.topology is None or options.cost_model is None:
        raise ValueError(
            f"{options.plan} holds lengths: to plan them, give --topology and --cost-model"
        )
    steps = list(in_steps(lengths, options))
    planned = steps[: options.steps]
    results = _results(planned, options)
    best = planning(results)
    by_seconds = best or next((result for result in results if result.problem is None), None)
    assert by_seconds is not None, "without figures there is an error"
    drawn = [
        PlannedStep(number=number, plan=plan, measured_s=None)
        for number, plan in enumerate(by_seconds.plans)
    ]
    chosen, reason = _chosen(drawn, options, lambda step: step.plan.objective_s, "planned seconds")
    step, remark = _step(chosen, reason, options)
    return Report(
        source=_name(options),
        lengths=lengths_of(lengths),
        length_remarks=_length_remarks(lengths, planned),
        results=tuple(results),
        planned=_planned(planned, len(steps), options),
        step=step,
        step_remark=remark,
        made_by=_made_by(options),
    )


def _results(steps: Sequence[list[int]], options: Namespace) -> list[Result]:
    """Return what each planner reaches on some steps. Raises ValueError where none can plan."""
    cost = load_cost_model(options.cost_model)
    names = options.planners or tuple(PLANNERS)
    with Progress() as progress:
        results = [result_of(name, steps, options, cost, progress) for name in names]
    if all(result.problem is not None for result in results):
        raise ValueError(f"no planner can plan this: {results[0].problem}")
    return results


def _planned(planned: Sequence[list[int]], steps: int, options: Namespace) -> str:
    """Return what the planners planned, and for what, in a sentence or two."""
    cost = load_cost_model(options.cost_model)
    nodes, ranks = options.topology.nodes, options.topology.ranks_per_node
    first = "One step was planned" if steps == 1 else f"All {steps} steps were planned"
    if len(planned) < steps:
        several = "was" if len(planned) == 1 else f"{len(planned)} were"
        first = f"Of {steps:,} steps the first {several} planned"
    more = f" (--steps {steps} plans all)" if len(planned) < steps else ""
    return (
        f"{first}{more}: {sum(map(len, planned)):,} sequences, {sum(map(sum, planned)):,} tokens, "
        f"on {nodes} x {ranks} ranks in {options.sync}, with the cost model {cost.name}"
        f"{cost.layers_text(before=', ')}."
    )


def _length_remarks(lengths: list[int], planned: Sequence[list[int]]) -> tuple[str, ...]:
    """Return what is to be said of steps whose lengths are unlike those of the whole file."""
    mean = sum(lengths) / len(lengths)
    count = sum(map(len, planned))
    of_planned = sum(map(sum, planned)) / count
    if abs(of_planned / mean - 1) <= UNLIKE:
        return ()
    return (
        f"The {count:,} sequences that were planned have {of_planned:,.0f} tokens on average, all "
        f"have {mean:,.0f}: the planners' figures are for the former. A file in random order, or "
        "more steps with --steps, brings the two together.",
    )


# ---- a trace


def _of_trace(file: StepsFile, lengths: list[int], options: Namespace) -> Report:
    """Return the report about a run."""
    last = _last_runs(file)
    run = _run(last)
    measured = all(step.measured_s is not None for step in run)
    took = {step.number: step.measured_s if measured else step.predicted_s for step in run}
    first_lines = [step for step in last if step.replica == 0]
    chosen, reason = _chosen(
        first_lines,
        options,
        lambda step: took[step.number] or 0.0,
        "measured seconds" if measured else "planned seconds",
    )
    step, remark = _step(chosen, reason, options)
    results: list[Result] = []
    planned = ""
    pipelined = any(isinstance(step.plan, PipelinePlan) for step in last)
    if options.topology is not None and options.cost_model is not None and not pipelined:
        steps = [list(step.plan.lengths) for step in islice(last, options.steps)]
        widest = max(map(len, steps))
        options.limits.refuse_above("sequences", widest, f"a step has {widest:,} sequences")
        results = _results([one for one in steps if one], options)
        planned = _planned(steps, len(last), options)
    return Report(
        source=_name(options),
        lengths=lengths_of(lengths),
        results=tuple(results),
        planned=planned,
        step=step,
        step_remark=remark,
        run=tuple(run),
        run_remarks=_run_remarks(file, last, pipelined, options),
        made_by=_made_by(options),
    )


def _last_runs(file: StepsFile) -> list[PlannedStep]:
    """Return the lines whose result training kept, by the number of their step: of a step that ran
    again the last ones, a line for each replica."""
    by_number: dict[int, list[PlannedStep]] = {}
    for step in file.steps:
        if step.replica == 0:  # the first line of a step
            by_number[step.number] = []
        by_number.setdefault(step.number, []).append(step)
    return [line for number in sorted(by_number) for line in by_number[number]]


def _run(lines: Sequence[PlannedStep]) -> list[RunStep]:
    """Return the steps of a run in numbers; the replicas of a step run at the same time."""
    by_number: dict[int, list[PlannedStep]] = {}
    for line in lines:
        by_number.setdefault(line.number, []).append(line)
    steps = []
    for number, replicas in by_number.items():
        first = replicas[0]
        measured = [sum(line.measured_s) for line in replicas if line.measured_s is not None]
        steps.append(
            RunStep(
                number=number,
                tokens=sum(sum(line.plan.lengths) for line in replicas),
                predicted_s=max(line.plan.objective_s for line in replicas),
                measured_s=max(measured) if len(measured) == len(replicas) else None,
                waited_s=first.waited_s,
                planning_s=sum(line.plan.planning_s for line in replicas),
                passes=first.passes,
            )
        )
    return steps


def _run_remarks(
    file: StepsFile, last: Sequence[PlannedStep], pipelined: bool, options: Namespace
) -> tuple[str, ...]:
    """Return what is to be said of a trace beside its figures."""
    remarks = []
    if file.broken:
        remarks.append(f"{_name(options)}: {file.remark()}.")
    if len(last) < len(file.steps):
        again = counted(len(file.steps) - len(last), "line")
        remarks.append(f"{again} of steps that ran again later are left out.")
    passes = max(step.passes for step in last)
    if passes > 1:
        remarks.append(
            f"Micro-batches ran up to {passes} times in a step; predicted seconds count a forward "
            "and a backward, measured ones all of them."
        )
    if pipelined:
        remarks.append("The steps are pipelines', which planners of groups are not compared on.")
    elif options.topology is None or options.cost_model is None:
        remarks.append(
            "With --topology and --cost-model the page also compares all planners on these "
            "lengths, and simulates the step that it draws."
        )
    return tuple(remarks)


# ---- the step that is drawn


def _chosen(
    steps: Sequence[PlannedStep],
    options: Namespace,
    seconds: Callable[[PlannedStep], float],
    of_what: str,
) -> tuple[PlannedStep, str]:
    """Return the step to draw, and why it is that one: the one of --step, or the median one.

    seconds: of a step, of_what: their name.
    """
    if options.step is not None:
        for step in steps:
            if step.number == options.step:
                return step, "The step that --step names."
        numbers = f"{steps[0].number} to {steps[-1].number}"
        if len(steps) == 1:
            numbers = f"{steps[0].number} alone"
        raise ValueError(f"{options.plan}: there is no step {options.step}: steps are {numbers}")
    if len(steps) == 1:
        return steps[0], "The only step."
    in_order = sorted(steps, key=lambda step: (seconds(step), step.number))
    return in_order[(len(steps) - 1) // 2], (
        f"The median of {len(steps):,} steps by {of_what}; --step draws another."
    )


def _step(chosen: PlannedStep, reason: str, options: Namespace) -> tuple[Step | None, str]:
    """Return the step to draw, or None and why it cannot be."""
    try:
        timeline = timeline_of(chosen, options, layers=0)
    except BeyondLimit as error:
        return None, f"No step is drawn: {error}."
    node = options.topology.ranks_per_node if options.topology else None
    return (
        Step(
            number=chosen.number,
            plan=chosen.plan,
            timeline=timeline,
            title=_title(chosen, options),
            reason=reason,
            ranks_per_node=node,
            measured_s=None if isinstance(chosen.plan, PipelinePlan) else chosen.measured_s,
        ),
        "",
    )


def _title(step: PlannedStep, options: Namespace) -> str:
    """Return what a timeline shows, in a sentence or two."""
    plan = step.plan
    tokens = f"{counted(len(plan.lengths), 'sequence')}, {sum(plan.lengths):,} tokens"
    if isinstance(plan, PipelinePlan):
        how = f"{len(plan.chunks):,} chunks through {plan.stages} stages by {plan.schedule}"
        if step.cost is None and options.cost_model is None:
            return f"{tokens} in {how}; a token forward stands for a microsecond."
        return f"{tokens} in {how}, simulated with the cost of its stages."
    batches = len(plan.micro_batches)
    how = f"{batches} micro-batch{'es' * (batches != 1)} by {plan.planner}"
    if options.cost_model is not None:
        return f"{tokens} in {how}, simulated with the cost model."
    if step.measured_s is not None:
        return (
            f"{tokens} in {how}. Each micro-batch is as long as it was measured; inside it ranks "
            "are busy in proportion to their tokens."
        )
    return f"{tokens} in {how}; ranks are busy in proportion to their tokens."


# ---- names


def _name(options: Namespace) -> str:
    """Return the file's name, without the folders that nobody else has."""
    return "stdin" if options.plan == "-" else Path(options.plan).name


def _made_by(options: Namespace) -> str:
    """Return the version and the command that made the page, files by their names alone."""
    words = []
    for word in options.argv:
        words.append(Path(word).name if "/" in word else word)
    return f"Made by hf_flexseq {__version__}: flexseq {shlex.join(words)}"
