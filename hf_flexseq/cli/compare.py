"""`compare`: every planner on the same lengths, by the closed form of the cost model.

`static` is the best single degree of the whole run, or the one of --sp-degree: the best choice
without flexible groups. A planner that cannot plan a step has its reason in the table instead of
figures. So has one with a solver that would take minutes, unless --planners names it.

With experts on several ranks, the table has the share of the ranks' time that they take. With
images it has the seconds that the tower adds to a plan's: with each image on one rank, which no
plan changes, and, as other stacks run it, on every rank of a group. With --tight it has the gap to
a bound by an integer program (`planner/tight_bound.py`), too.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.values import in_errors, several
from hf_flexseq.cli.plan import (
    in_steps,
    plan_options,
    planned,
    planned_images,
    read_rows,
)
from hf_flexseq.cli.progress import Progress
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.plan.images import TowerLoad
from hf_flexseq.planner.make import loosest_task
from hf_flexseq.planner.shared_rows import SharedRows
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
# Another column where experts lie on several ranks.
EXPERT_COLUMNS = {"experts": 7}
# Further columns where there are images.
TOWER_COLUMNS = {"tower": 7, "imbalance": 9, "in groups": 9}
# The last one with --tight.
TIGHT_COLUMN = {"tight gap": 9}
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
    experts: float | None = None
    """Share of all ranks' time in experts; None where each rank computes its own."""
    peak_bytes: int = 0
    """Most bytes that any rank holds in any step."""
    micro_batches: float = 0.0
    """Micro-batches of a step."""
    planning_s: float = 0.0
    """Seconds that planning a step took."""
    plans: tuple[Plan, ...] = ()
    """Plan of each step."""
    towers: tuple[TowerLoad | None, ...] = ()
    """The tower's load in each step; None in a step without images."""
    in_groups_s: float = 0.0
    """Seconds that the tower would add to a step if every rank of a group encoded the images of
    all sequences of the group."""
    problem: str | None = None
    """Reason for having no figures; None with figures."""

    @property
    def tower_s(self) -> float:
        """Seconds of the tower in a step, each image on one rank; 0 without images."""
        return sum(one.seconds for one in self.towers if one) / max(1, len(self.towers))

    def cells(self) -> tuple[str, ...]:
        """Return the planner's line of the table, in the order of `COLUMNS`, then of the further
        columns that it has."""
        of_experts = () if self.experts is None else (f"{100 * self.experts:.1f} %",)
        of_tower: tuple[str, ...] = ()
        loads = [one for one in self.towers if one is not None]
        if loads:
            even_s = sum(one.seconds / one.imbalance for one in loads)
            imbalance = sum(one.seconds for one in loads) / even_s
            of_tower = (f"{self.tower_s:.3f}", f"{imbalance:.3f}", f"{self.in_groups_s:.3f}")
        return (
            self.name,
            f"{self.seconds:.3f}",
            f"{100 * self.gap:.1f} %",
            f"{100 * self.exposed:.1f} %",
            f"{100 * self.idle:.1f} %",
            f"{self.peak_bytes / 2**30:.2f}",
            f"{self.micro_batches:.1f}",
            f"{1e3 * self.planning_s:.0f} ms",
            *of_experts,
            *of_tower,
        )


def compare(options: Namespace) -> None:
    """Print the table, each planner as soon as it is done."""
    cost = load_cost_model(options.cost_model)
    rows = read_rows(options.lengths, options)
    steps = list(islice(in_steps(rows, options), options.steps))
    if options.tight:
        _check_tight(steps, options)
    topology = options.topology
    sequences = sum(len(step.rows) for step in steps)
    tokens = sum(sum(step.rows) for step in steps)
    images = sum(len(step.images) for step in steps)
    with_images = f" with {several(images, 'image')}" if images else ""
    print(
        f"{several(len(steps), 'step')}, {several(sequences, 'sequence')}, "
        f"{several(tokens, 'token')}{with_images} "
        f"on {topology}, "
        f"{cost.name}{cost.experts_text(topology.world_size, before=', ')}, {options.sync}; "
        "per step:"
    )
    columns = columns_of(steps, cost)
    if options.tight:
        columns |= TIGHT_COLUMN
    print(_line(tuple(columns), columns), flush=True)
    tight: tuple[float, bool] | None = None  # mean seconds of the tight bound, and if it is solved

    def show(result: Result) -> None:
        nonlocal tight
        cells = result.cells()
        if options.tight and result.problem is None:
            tight = tight or _tight_bound(steps, result.plans, options, cost)
            seconds, solved = tight
            gap = 100 * (result.seconds / seconds - 1)
            cells = (*cells, f"{'' if solved else '<= '}{gap:.1f} %")
        line = _line(cells, columns)
        if result.problem is not None:
            line = f"{result.name:{COLUMNS['planner']}}  {result.problem}"
        print(line, flush=True)

    results_of(steps, options, show)


def _check_tight(steps: Sequence[SharedRows], options: Namespace) -> None:
    """Raise ValueError where there is no tight bound."""
    if find_spec("highspy") is None:
        raise ValueError('--tight needs highspy, not installed: pip install "hf_flexseq[planner]"')
    if options.sync != "lockstep":
        raise ValueError(f"--tight bounds steps in lockstep: leave out --sync {options.sync}")
    if any(step.units for step in steps):
        raise ValueError("--tight bounds rows that share no prefix: give their lengths alone")


def _tight_bound(
    steps: Sequence[SharedRows], plans: Sequence[Plan], options: Namespace, cost: CostModel
) -> tuple[float, bool]:
    """Return the mean seconds of the tight bounds, and whether all are solved. plans: any."""
    from hf_flexseq.planner.tight_bound import tight_bound_ns  # imports the solver

    bounds = []
    for step, plan in zip(steps, plans, strict=True):
        task = loosest_task(step.rows, options.topology, cost, plan_options(options))
        bounds.append(tight_bound_ns(task, round(plan.objective_s * 1e9)))
    nanoseconds = sum(bound for bound, _ in bounds) / len(bounds)
    return nanoseconds / 1e9, all(solved for _, solved in bounds)


def columns_of(steps: Sequence[SharedRows], cost: CostModel) -> dict[str, int]:
    """Return the columns of the table, and their widths."""
    columns = dict(COLUMNS)
    if cost.experts is not None:
        columns |= EXPERT_COLUMNS
    if any(step.images for step in steps):
        columns |= TOWER_COLUMNS
    return columns


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
    return _measure(name, plans, steps, options, cost)


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
        with in_errors(f"step {number}"):
            plans.append(planned(step, options, cost, planner=planner, sp_degree=sp_degree))
    return plans


def _measure(
    name: str,
    plans: Sequence[Plan],
    steps: Sequence[SharedRows],
    options: Namespace,
    cost: CostModel,
) -> Result:
    """Return the figures of the plans of all steps under `name`."""
    timelines = [timeline_of(plan, options.topology, cost, sync=options.sync) for plan in plans]
    of_images = [planned_images(step, options, cost) for step in steps]
    in_groups = [_in_groups_s(*one, options, cost) for one in zip(plans, steps, strict=True)]
    nanoseconds = sum(timeline.stop for timeline in timelines)
    seconds = sum(plan.objective_s for plan in plans)
    return Result(
        name=name,
        seconds=seconds / len(plans),
        gap=seconds / sum(plan.lower_bound_s for plan in plans) - 1,
        exposed=sum(one.share("transfer") * one.stop for one in timelines) / nanoseconds,
        idle=sum(one.share("wait") * one.stop for one in timelines) / nanoseconds,
        experts=None
        if cost.experts is None
        else sum(one.share("experts") * one.stop for one in timelines) / nanoseconds,
        peak_bytes=max(
            timeline.peak_bytes + (0 if one is None else round(one.held_bytes))
            for timeline, one in zip(timelines, of_images, strict=True)
        ),
        micro_batches=sum(len(plan.micro_batches) for plan in plans) / len(plans),
        planning_s=sum(plan.planning_s for plan in plans) / len(plans),
        plans=tuple(plans),
        towers=tuple(None if one is None else TowerLoad.of(one) for one in of_images),
        in_groups_s=sum(in_groups) / len(plans),
    )


def _in_groups_s(plan: Plan, step: SharedRows, options: Namespace, cost: CostModel) -> float:
    """Return the seconds that the tower would add on every rank of a group, 0 without images."""
    if not step.images or cost.tower is None:
        return 0.0
    nanoseconds = step_ns(
        cost,
        plan.micro_batches,
        plan.lengths,
        options.topology,
        sync=options.sync,
        image_ns=cost.tower.sequences_ns(step.images),
    )
    return nanoseconds / 1e9 - plan.objective_s


def _line(cells: Sequence[str], columns: dict[str, int]) -> str:
    """Return one line of the table: the first cell to the left, the others to the right."""
    first, *rest = cells
    name, *widths = columns.values()
    return "  ".join([first.ljust(name), *map(str.rjust, rest, widths)])
