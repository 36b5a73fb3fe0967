"""The step from a command's options to plans."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from hf_flexseq.cost import CostModel
from hf_flexseq.lengths import read_lengths
from hf_flexseq.plan import Plan
from hf_flexseq.plan_options import PlanOptions
from hf_flexseq.planner import make_plan


def steps_of(options: Namespace) -> Iterator[list[int]]:
    """Return the lengths of each optimizer step of a file."""
    return in_steps(read_lengths(options.lengths, options.column, options.limits), options)


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
