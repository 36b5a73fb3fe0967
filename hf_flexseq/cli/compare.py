"""`compare`: every planner on the same lengths, by the closed form of the cost model.

`static` stands for the best single degree of the whole run, or the one of --sp-degree: what a run
without flexible groups can have. A planner that cannot plan a step has its reason in the table
instead of figures. So has one with a solver that would take minutes, unless --planners names it.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.cli.plan import in_steps, planned, read_rows
from hf_flexseq.cli.progress import Progress
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.planner.shared import SharedRows
from hf_flexseq.view import timeline_of

# Columns of the table, and their widths.
COLUMNS = {
    "planner": 18,
    "seconds": 8,
    "gap": 7,
    "exposed": 8,
    "idle": 7,
    "GiB": 7,
    "micro-batches": 13,
    "planning": 9,
}
# Sequences of all steps up to which planners with a solver are compared unasked: 512 on 64 ranks
# take 5 s or more (scripts/benchmarks/planners.py --flexsp 12), 2,000 in one step minutes.
SOLVER_SEQUENCES = 512
SHARING = "auto"  # also compared without sharing prefixes, as
ROW_BY_ROW = ", row by row"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of a planner, means over all steps, or its reason for having none."""

    name: str
    """Name of the planner, with the degree of `static`."""
    seconds: float = 0.0
    """Predicted seconds of a step."""
    gap: float = 0.0
    """Share by which `seconds` exceed the lower bound."""
    exposed: float = 0.0
    """Share of all ranks' time in transfers and launches that no computing hides."""
    idle: float = 0.0
    """Share of all ranks' time in waits for other ranks."""
    peak_bytes: int = 0
    """Most bytes that any rank holds in any step."""
    micro_batches: float = 0.0
    """Micro-batches of a step."""
    planning_s: float = 0.0
    """Seconds that planning a step took."""
    plans: tuple[Plan, ...] = ()
    """Plan of each step."""
    problem: str | None = None
    """Reason for having no figures; None with figures."""

    def cells(self) -> tuple[str, ...]:
        """Return the planner's line of the table, in the order of `COLUMNS`."""
        return (
            self.name,
            f"{self.seconds:.3f}",
            f"{100 * self.gap:.1f} %",
            f"{100 * self.exposed:.1f} %",
            f"{100 * self.idle:.1f} %",
            f"{self.peak_bytes / 2**30:.2f}",
            f"{self.micro_batches:.1f}",
            f"{1e3 * self.planning_s:.0f} ms",
        )


def compare(options: Namespace) -> None:
    """Print the table, each planner as soon as it is done."""
    cost = load_cost_model(options.cost_model)
    rows = read_rows(options.lengths, options)
    steps = list(islice(in_steps(rows, options), options.steps))
    topology = options.topology
    sequences = sum(len(step.rows) for step in steps)
    tokens = sum(sum(step.rows) for step in steps)
    print(
        f"{len(steps)} step{'s' * (len(steps) != 1)}, {sequences:,} sequences, {tokens:,} tokens "
        f"on {topology.nodes} x {topology.ranks_per_node} ranks, "
        f"{cost.name}{cost.layers_text(before=', ')}, {options.sync}; per step:"
    )
    print(_line(tuple(COLUMNS)), flush=True)

    def show(result: Result) -> None:
        line = _line(result.cells())
        if result.problem is not None:
            line = f"{result.name:{COLUMNS['planner']}}  {result.problem}"
        print(line, flush=True)

    results_of(steps, options, show)


def results_of(
    steps: Sequence[SharedRows],
    options: Namespace,
    show: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Return the figures of each planner that the options name, and `show` each when it is done.

    Raises ValueError with the first planner's reason if none can plan.
    """
    cost = load_cost_model(options.cost_model)
    results = []
    with Progress() as progress:
        for planner in options.planners or PLANNERS:
            results.append(_result_of(planner, steps, options, cost, progress))
            progress.clear()
            show(results[-1])
            if planner == SHARING and any(step.units for step in steps):
                apart = [SharedRows(rows=step.rows) for step in steps]
                result = _result_of(planner, apart, options, cost, progress)
                results.append(replace(result, name=planner + ROW_BY_ROW))
                progress.clear()
                show(results[-1])
    if all(result.problem is not None for result in results):
        raise ValueError(f"no planner can plan this: {results[0].problem}")
    return results


def _result_of(
    planner: str,
    steps: Sequence[SharedRows],
    options: Namespace,
    cost: CostModel,
    progress: Progress,
) -> Result:
    """Return the figures of one planner, or its reason for having none."""
    sequences = sum(len(step.rows) for step in steps)
    slow = PLANNERS[planner].needs_solver and sequences > SOLVER_SEQUENCES
    if slow and not options.planners:
        problem = (
            f"left out: {sequences:,} sequences may take minutes; ask with --planners {planner}"
        )
        return Result(name=planner, problem=problem)
    try:
        if planner == "static":
            name, plans = _best_static(steps, options, cost, progress)
        else:
            name, plans = planner, _plans(steps, options, cost, progress, planner=planner)
    except (ValueError, ImportError, NotImplementedError) as error:
        return Result(name=planner, problem=" ".join(str(error).split()))
    return _measure(name, plans, options, cost)


def _best_static(
    steps: Sequence[SharedRows], options: Namespace, cost: CostModel, progress: Progress
) -> tuple[str, list[Plan]]:
    """Return the name and the plans of the degree with the fewest seconds over all steps, among
    those that can hold every sequence. Raises the last degree's reason if none can."""
    degrees = options.topology.degrees()
    if options.sp_degree:
        degrees = [options.sp_degree]
    runs: list[tuple[float, int, list[Plan]]] = []
    problem: ValueError | None = None
    for degree in degrees:
        try:
            plans = _plans(steps, options, cost, progress, planner="static", sp_degree=degree)
            runs.append((sum(plan.objective_s for plan in plans), degree, plans))
        except ValueError as error:
            problem = error
    if not runs:
        assert problem is not None, "there is always a degree to try"
        raise problem
    _, degree, plans = min(runs, key=lambda run: run[:2])
    return f"static, degree {degree}", plans


def _plans(
    steps: Sequence[SharedRows],
    options: Namespace,
    cost: CostModel,
    progress: Progress,
    *,
    planner: str,
    sp_degree: int | None = None,
) -> list[Plan]:
    """Return the plan of every step. Raises ValueError that names a step without a plan."""
    name = planner if sp_degree is None else f"{planner}, degree {sp_degree}"
    plans = []
    for number, step in enumerate(steps):
        progress.now(f"{name}: planning step {number}, {number} of {len(steps)} done")
        try:
            plans.append(planned(step, options, cost, planner=planner, sp_degree=sp_degree))
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from error
    return plans


def _measure(name: str, plans: Sequence[Plan], options: Namespace, cost: CostModel) -> Result:
    """Return the figures of the plans of all steps under `name`."""
    timelines = [timeline_of(plan, options.topology, cost, sync=options.sync) for plan in plans]
    nanoseconds = sum(timeline.stop for timeline in timelines)
    seconds = sum(plan.objective_s for plan in plans)
    return Result(
        name=name,
        seconds=seconds / len(plans),
        gap=seconds / sum(plan.lower_bound_s for plan in plans) - 1,
        exposed=sum(one.share("transfer") * one.stop for one in timelines) / nanoseconds,
        idle=sum(one.share("wait") * one.stop for one in timelines) / nanoseconds,
        peak_bytes=max(timeline.peak_bytes for timeline in timelines),
        micro_batches=sum(len(plan.micro_batches) for plan in plans) / len(plans),
        planning_s=sum(plan.planning_s for plan in plans) / len(plans),
        plans=tuple(plans),
    )


def _line(cells: Sequence[str]) -> str:
    """Return one line of the table: the first cell to the left, the others to the right."""
    first, *rest = cells
    name, *widths = COLUMNS.values()
    return "  ".join([first.ljust(name), *map(str.rjust, rest, widths)])
