"""`view`: one step of a file, as text, as a picture, or as a trace for Perfetto."""

from argparse import Namespace
from pathlib import Path

from hf_flexseq.base.registry import PIPELINE_TIMELINE, object_of
from hf_flexseq.cli.plan import summary
from hf_flexseq.command_line import say
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.files import RecordedStep, read_steps
from hf_flexseq.view import (
    chrome_text,
    save_picture,
    sketch,
    text_grid,
    timeline_of,
)
from hf_flexseq.view.chrome import MOST_BYTES
from hf_flexseq.view.closed_form import most_events
from hf_flexseq.view.timeline import Timeline


def view(options: Namespace) -> None:
    """Draw one step of a file: on the terminal, or into the files asked for."""
    file = read_steps(options.plan, options.limits)
    step = file.step(options.step)
    timeline = drawn(step, options)
    node = options.topology.ranks_per_node if options.topology else None
    title = _title(step, options)
    pictures = [path for path in (options.png, options.svg) if path]
    for path in pictures:
        save_picture(timeline, path, title=title, ranks_per_node=node)
    if options.chrome:
        text, shown = chrome_text(timeline, ranks_per_node=node)
        Path(options.chrome).write_text(text, encoding="utf-8")
        if shown:
            print(f"{options.chrome} shows {shown}, to stay below {MOST_BYTES / 1e6:g} MB")
    if not pictures and not options.chrome:
        print(text_grid(timeline, title=title))
    if file.broken:
        say(options, f"{options.plan}: {file.remark()}")


def drawn(step: RecordedStep, options: Namespace) -> Timeline:
    """Return a step's timeline: by the cost model, by measured seconds, or by tokens."""
    limits = options.limits
    if not isinstance(step.plan, Plan):
        cost = None if options.cost_model is None else load_cost_model(options.cost_model)
        timeline: Timeline = object_of(PIPELINE_TIMELINE)(step, cost, limits)
        return timeline
    if options.cost_model is not None and options.topology is None:
        raise ValueError("--cost-model also needs --topology")
    world = max((group.stop for mb in step.plan.micro_batches for group in mb.groups), default=1)
    if options.topology is not None:
        check(step.plan, options.topology)
        world = options.topology.world_size
    limits.refuse_above("ranks", world, f"step {step.number} is for {world:,} ranks")
    work = most_events(step.plan, world)
    limits.refuse_above("work", work, f"step {step.number} may be {work:,} events")
    if options.cost_model is None:
        return sketch(step.plan, world, step.measured_s)
    cost = load_cost_model(options.cost_model)
    return timeline_of(step.plan, options.topology, cost, sync=options.sync)


def _title(step: RecordedStep, options: Namespace) -> str:
    """Return a step in one line, with its measured seconds and its experts' ranks."""
    measured = "" if step.measured_s is None else f", measured {sum(step.measured_s):.3f} s"
    experts = ""
    if options.cost_model is not None:
        # only pipelines, whose cost models have no experts over ranks, are drawn without
        ranks = options.topology.world_size if options.topology else 0
        experts = load_cost_model(options.cost_model).experts_text(ranks, before="; ")
    return f"Step {step.number}: {summary(step.plan, step.tower)}{measured}{experts}"
