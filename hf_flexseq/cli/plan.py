"""`plan`: which ranks work together on which sequences, and the plans that other commands need."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_flexseq.base.lengths import read_lengths
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.planner import make_plan


def plan(options: Namespace) -> None:
    """Plan every step of the lengths, write the plans, and print a line for each."""
    cost = load_cost_model(options.cost_model)
    lengths = read_lengths(options.lengths, options.column, options.limits)
    plans = []
    for of_step in in_steps(lengths, options):
        plans.append(
            planned(of_step, options, cost, planner=options.planner, sp_degree=options.sp_degree)
        )
    if options.json is not None:
        _write(options.json, plans)
    if options.json != "-":
        for number, made in enumerate(plans):
            milliseconds = 1e3 * made.planning_s
            print(f"step {number}: {summary(made)}, planned in {milliseconds:.0f} ms")
            if number == 0:
                for note in made.notes:
                    print(f"    {note}")


def in_steps(lengths: Sequence[int], options: Namespace) -> Iterator[list[int]]:
    """Return the lengths of each optimizer step; the last one may hold fewer."""
    size = min(options.sequences_per_step or len(lengths), len(lengths))
    options.limits.refuse_above(
        "sequences",
        size,
        f"{size:,} sequences in one step: --sequences-per-step makes several steps of them",
    )
    return (list(lengths[at : at + size]) for at in range(0, len(lengths), size))


def planned(
    lengths: list[int],
    options: Namespace,
    cost: CostModel,
    *,
    planner: str,
    sp_degree: int | None = None,
) -> Plan:
    """Plan one step as the options say."""
    return make_plan(
        lengths,
        options.topology,
        cost,
        PlanOptions(
            planner=planner,
            strategy=options.strategy,
            sp_degree=sp_degree,
            max_tokens_per_rank=options.max_tokens_per_rank,
            sync=options.sync,
        ),
    )


def summary(made: Plan | PipelinePlan) -> str:
    """Return a plan in one line: its contents, its parts, and its predicted seconds."""
    contents = f"{len(made.lengths):,} sequences, {sum(made.lengths):,} tokens"
    if isinstance(made, PipelinePlan):
        return (
            f"{contents} in {len(made.chunks):,} chunks through {made.stages} stages by "
            f"{made.schedule}, predicted {made.objective_s:.3f} s"
        )
    return (
        f"{contents}, {len(made.micro_batches)} micro-batch(es) by {made.planner}, "
        f"predicted {made.objective_s:.3f} s ({100 * _gap(made):.1f} % above the bound)"
    )


def _gap(made: Plan) -> float:
    """Return the share by which a plan's seconds exceed their lower bound, 0 without a bound."""
    if made.lower_bound_s < 1e-9:
        return 0.0
    return made.objective_s / made.lower_bound_s - 1


def _write(path: str, plans: Sequence[Plan]) -> None:
    """Write one plan as JSON, several as JSON lines. path: a file; `-` is stdout."""
    text = "".join(plan.to_json() + "\n" for plan in plans)
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
