"""`plan`, `simulate` and `view`."""

from argparse import Namespace
from pathlib import Path

from hf_flexseq.cli.files import (
    PlannedStep,
    StepsFile,
    asked_step,
    read_steps,
    tell_broken_lines,
    write_plans,
)
from hf_flexseq.cli.planning import planned, steps_of
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.schedule.pipeline.check import check as check_pipeline
from hf_flexseq.simulate import Detail, most_events
from hf_flexseq.simulate import simulate as simulate_plan
from hf_flexseq.simulate.pipeline import simulate_pipeline, tokens_as_time
from hf_flexseq.timeline import Timeline, sketch
from hf_flexseq.view import chrome_text, save_picture, text_grid
from hf_flexseq.view.chrome import MOST_BYTES
from hf_flexseq.view.shares import shares


def plan(options: Namespace) -> None:
    """Plan every step of the lengths, write the plans and say what they promise."""
    cost = load_cost_model(options.cost_model)
    plans = []
    for lengths in steps_of(options):
        plans.append(
            planned(lengths, options, cost, planner=options.planner, sp_degree=options.sp_degree)
        )
    if options.json is not None:
        write_plans(options.json, plans)
    if options.json != "-":
        for number, made in enumerate(plans):
            print(f"step {number}: {_summary(made)}, planned in {1e3 * made.planning_s:.0f} ms")
            if number == 0:  # as in a run's log: why the plan is as it is, how near to a bound
                for note in made.notes:
                    print(f"    {note}")


def simulate(options: Namespace) -> None:
    """Simulate every step of a file and print its seconds, shares and memory."""
    cost = load_cost_model(options.cost_model)
    topology, sync = options.topology, options.sync
    file = read_steps(options.plan, options.limits)
    for number, decided in _plans_to_simulate(file, options):
        timeline = simulate_plan(decided, topology, cost, sync=sync)
        closed_ns = step_ns(cost, decided.micro_batches, decided.lengths, topology, sync=sync)
        print(
            f"step {number}: simulated {timeline.stop / 1e9:.3f} s, "
            f"closed form {closed_ns / 1e9:.3f} s; {shares(timeline)}; "
            f"transfers beside compute {100 * timeline.share('overlapped'):.1f} %; "
            f"peak memory {timeline.peak_bytes / 2**30:.2f} GiB"
        )
        if sync == "lockstep":
            _print_micro_batches(timeline)
    tell_broken_lines(file, options)


def _plans_to_simulate(file: StepsFile, options: Namespace) -> list[tuple[int, Plan]]:
    """Return the number and the plan of each step of a file, all of which are legal and no more
    work than the limit."""
    plans = []
    work = 0
    for step in file.steps:
        decided = step.plan
        if isinstance(decided, PipelinePlan):
            raise ValueError(
                f"{options.plan}: step {step.number} is a pipeline's, which `flexseq view` shows"
            )
        check(decided, options.topology)
        plans.append((step.number, decided))
        work += most_events(decided, options.topology, Detail())
    options.limits.refuse_above("work", work, f"{options.plan}: may be {work:,} events")
    return plans


def _print_micro_batches(timeline: Timeline) -> None:
    """Print when each micro-batch begins and how long it takes; in lockstep they do not
    overlap."""
    stops = (*timeline.starts[1:], timeline.stop)
    for index, (start, stop) in enumerate(zip(timeline.starts, stops, strict=True)):
        print(f"  micro-batch {index}: from {start / 1e9:.3f} s, {(stop - start) / 1e9:.3f} s")


def view(options: Namespace) -> None:
    """Draw one step of a file: on the terminal, or into the files asked for."""
    file = read_steps(options.plan, options.limits)
    step = asked_step(file, options)
    node = options.topology.ranks_per_node if options.topology else None
    title = f"Step {step.number}: {_summary(step.plan)}{_measured(step)}{_layers(options)}"
    pictures = [path for path in (options.png, options.svg) if path]
    for path in pictures:
        save_picture(timeline_of(step, options, layers=0), path, title=title, ranks_per_node=node)
    if options.chrome:
        _write_chrome(step, options, node)
    if not pictures and not options.chrome:
        print(text_grid(timeline_of(step, options, layers=0), title=title))
    tell_broken_lines(file, options)


def _write_chrome(step: PlannedStep, options: Namespace, node: int | None) -> None:
    """Write the trace for Perfetto, and say what was left out of it. node: ranks per node."""
    text, left_out = chrome_text(
        lambda layers: timeline_of(step, options, layers=layers),
        layers=Detail().layers,
        ranks_per_node=node,
    )
    Path(options.chrome).write_text(text, encoding="utf-8")
    if left_out:
        print(f"{options.chrome} shows {left_out}, to stay below {MOST_BYTES / 1e6:g} MB")


def timeline_of(step: PlannedStep, options: Namespace, *, layers: int) -> Timeline:
    """Return the timeline to draw: simulated where there is a cost model, else by tokens.

    Without a cost model the measured seconds of the step, if it has any, are its time.
    layers: simulated layers of a micro-batch; see `Detail`.
    """
    if isinstance(step.plan, PipelinePlan):
        return simulate_pipeline(step.plan, _stage_costs(step, step.plan, options))
    limits = options.limits
    if options.cost_model is not None:
        if options.topology is None:
            raise ValueError("--cost-model also needs --topology")
        check(step.plan, options.topology)
        work = most_events(step.plan, options.topology, Detail(layers=layers))
        limits.refuse_above("work", work, f"step {step.number} may be {work:,} events")
        cost = load_cost_model(options.cost_model)
        return simulate_plan(
            step.plan, options.topology, cost, sync=options.sync, detail=Detail(layers=layers)
        )
    world = max((group.stop for mb in step.plan.micro_batches for group in mb.groups), default=1)
    if options.topology is not None:
        check(step.plan, options.topology)
        world = options.topology.world_size
    limits.refuse_above("ranks", world, f"step {step.number} is for {world:,} ranks")
    work = world * len(step.plan.micro_batches)
    limits.refuse_above("work", work, f"step {step.number} may be {work:,} events")
    return sketch(step.plan, world, step.measured_s)


def _stage_costs(step: PlannedStep, made: PipelinePlan, options: Namespace) -> PipelineCost:
    """Return the cost of the stages: from the cost model that was named, or else what the file
    says, or else tokens as time."""
    # Finding the next action may take a look at every rank, and a hundred looks take as long as an
    # event.
    actions = sum(map(len, made.actions))
    work = actions + actions * made.ranks // 100
    options.limits.refuse_above("work", work, f"step {step.number} may be {work:,} events")
    check_pipeline(made)
    if options.cost_model is not None:
        return PipelineCost.of_model(load_cost_model(options.cost_model), made.stages)
    return step.cost or tokens_as_time(made)


def _measured(step: PlannedStep) -> str:
    """Return the measured seconds of a step as the end of its title."""
    return "" if step.measured_s is None else f", measured {sum(step.measured_s):.3f} s"


def _layers(options: Namespace) -> str:
    """Return the kinds of the layers as the end of a title, where the cost model that was named
    has several."""
    if options.cost_model is None:
        return ""
    return load_cost_model(options.cost_model).layers_text(before="; ")


def _summary(made: Plan | PipelinePlan) -> str:
    """Return a plan in one line: what it holds, in how many parts, and its predicted seconds."""
    if isinstance(made, PipelinePlan):
        return (
            f"{len(made.lengths):,} sequences, {sum(made.lengths):,} tokens in "
            f"{len(made.chunks):,} chunks through {made.stages} stages by {made.schedule}, "
            f"predicted {made.objective_s:.3f} s"
        )
    # The bound is whole nanoseconds; without one there is nothing to be above of.
    gap = made.objective_s / made.lower_bound_s - 1 if made.lower_bound_s >= 1e-9 else 0.0
    return (
        f"{len(made.lengths):,} sequences, {sum(made.lengths):,} tokens, "
        f"{len(made.micro_batches)} micro-batch(es) by {made.planner}, "
        f"predicted {made.objective_s:.3f} s ({100 * gap:.1f} % above the bound)"
    )
