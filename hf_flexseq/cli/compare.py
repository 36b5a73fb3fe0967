"""`compare`: every planner on the same lengths, by the closed form and by simulation.

`static` stands for the best single degree of the whole run, or the one of --sp-degree: what a run
without flexible groups can have. A planner that cannot plan a step has its reason in the table
instead of figures. So has one with a solver that would take minutes, unless --planners names it.
"""

from argparse import Namespace
from collections.abc import Sequence
from itertools import islice

from hf_flexseq.cli.planning import planned, steps_of
from hf_flexseq.cli.progress import Progress
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.registry import PLANNERS
from hf_flexseq.simulate import simulate
from hf_flexseq.view.results import Result

COLUMNS = (
    "planner",
    "seconds",
    "gap",
    "simulated",
    "transfers",
    "idle",
    "GiB",
    "micro-batches",
    "planning",
)
WIDTHS = (18, 8, 7, 9, 9, 7, 7, 13, 9)
# Sequences of all steps up to which planners with a solver are compared unasked: 512 on 64 ranks
# take 5 s or more (scripts/benchmarks/planners.py --flexsp 12), 2,000 in one step minutes.
SOLVER_SEQUENCES = 512


def compare(options: Namespace) -> None:
    """Print the table, each planner as soon as it is done. Raises the first one's reason when none
    can plan."""
    cost = load_cost_model(options.cost_model)
    steps = list(islice(steps_of(options), options.steps))
    topology = options.topology
    print(
        f"{len(steps)} step{'s' * (len(steps) != 1)}, {sum(map(len, steps)):,} sequences, "
        f"{sum(map(sum, steps)):,} tokens on {topology.nodes} x {topology.ranks_per_node} ranks, "
        f"{cost.name}{cost.layers_text(before=', ')}, {options.sync}; per step:"
    )
    print(_line(COLUMNS), flush=True)
    problems = []
    with Progress() as progress:
        for planner in options.planners or PLANNERS:
            result = result_of(planner, steps, options, cost, progress)
            if result.problem is None:
                line = _line(_row(result))
            else:
                line = f"{planner:{WIDTHS[0]}}  {result.problem}"
            progress.clear()
            print(line, flush=True)
            problems.append(result.problem)
    if all(problems):
        raise ValueError(f"no planner can plan this: {problems[0]}")


def result_of(
    planner: str,
    steps: Sequence[list[int]],
    options: Namespace,
    cost: CostModel,
    progress: Progress,
) -> Result:
    """Return the figures of one planner, or its reason for having none."""
    sequences = sum(map(len, steps))
    slow = PLANNERS[planner].needs_solver and sequences > SOLVER_SEQUENCES
    if slow and not options.planners:
        problem = (
            f"left out: {sequences:,} sequences may take minutes; ask with --planners {planner}"
        )
        return Result(name=planner, problem=problem)
    try:
        if planner == "static":
            degrees = options.topology.degrees()
            if options.sp_degree:
                degrees = [options.sp_degree]
            return _best_static(degrees, steps, options, cost, progress)
        plans = _plans(steps, options, cost, progress, planner=planner)
        return _measure(planner, plans, options, cost, progress)
    except (ValueError, ImportError, NotImplementedError) as error:
        return Result(name=planner, problem=" ".join(str(error).split()))


def _best_static(
    degrees: Sequence[int],
    steps: Sequence[list[int]],
    options: Namespace,
    cost: CostModel,
    progress: Progress,
) -> Result:
    """Return the figures of the degree with the fewest seconds over all steps, among those that
    can hold every sequence. Raises the last degree's reason when none can."""
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
    return _measure(f"static, degree {degree}", plans, options, cost, progress)


def _plans(
    steps: Sequence[list[int]],
    options: Namespace,
    cost: CostModel,
    progress: Progress,
    *,
    planner: str,
    sp_degree: int | None = None,
) -> list[Plan]:
    """Return the plan of every step. Raises ValueError, naming the step, where there is none."""
    name = planner if sp_degree is None else f"{planner}, degree {sp_degree}"
    plans = []
    for number, lengths in enumerate(steps):
        progress.now(f"{name}: planning step {number}, {number} of {len(steps)} done")
        try:
            plans.append(planned(lengths, options, cost, planner=planner, sp_degree=sp_degree))
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from error
    return plans


def _measure(
    name: str, plans: Sequence[Plan], options: Namespace, cost: CostModel, progress: Progress
) -> Result:
    """Simulate the plans of all steps and return the figures under `name`."""
    timelines = []
    for number, plan in enumerate(plans):
        progress.now(f"{name}: simulating step {number}, {number} of {len(plans)} done")
        timelines.append(simulate(plan, options.topology, cost, sync=options.sync))
    count = len(plans)
    simulated = sum(timeline.stop for timeline in timelines)
    closed = sum(plan.objective_s for plan in plans)
    return Result(
        name=name,
        closed_s=closed / count,
        gap=closed / sum(plan.lower_bound_s for plan in plans) - 1,
        simulated_s=simulated / 1e9 / count,
        transfers=sum(t.share("transfer") * t.stop for t in timelines) / simulated,
        idle=sum(t.share("wait") * t.stop for t in timelines) / simulated,
        peak_bytes=max(t.peak_bytes for t in timelines),
        micro_batches=sum(len(plan.micro_batches) for plan in plans) / count,
        planning_s=sum(plan.planning_s for plan in plans) / count,
        plans=tuple(plans),
    )


def _line(cells: Sequence[str]) -> str:
    """Return one line of the table: the first cell to the left, the others to the right."""
    first, *rest = cells
    return "  ".join([first.ljust(WIDTHS[0]), *map(str.rjust, rest, WIDTHS[1:])])


def _row(result: Result) -> tuple[str, ...]:
    """Return the cells of one planner, in the order of `COLUMNS`."""
    return (
        result.name,
        f"{result.closed_s:.3f}",
        f"{100 * result.gap:.1f} %",
        f"{result.simulated_s:.3f}",
        f"{100 * result.transfers:.1f} %",
        f"{100 * result.idle:.1f} %",
        f"{result.peak_bytes / 2**30:.2f}",
        f"{result.micro_batches:.1f}",
        f"{1e3 * result.planning_s:.0f} ms",
    )
