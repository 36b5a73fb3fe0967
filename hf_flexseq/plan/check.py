"""Refuse a plan of groups that a topology cannot run.

`Plan.check_form` has the rules that need no topology. A pipeline's plan has its own rules,
in `hf_flexseq/pipeline/planning/plan.py` and `walk.py` beside it.
"""

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.sequences import Plan


def check(plan: Plan, topology: Topology, max_tokens_per_rank: int | None = None) -> None:
    """Raise ValueError, naming the place, unless `plan` is legal on `topology`.

    A legal plan has every sequence in exactly one group; groups allowed by the topology, laminar
    and widest first in each micro-batch; and at most `max_tokens_per_rank` tokens per rank and
    micro-batch, if given.
    """
    plan.check_form()
    _check_ranks(plan, topology)
    if max_tokens_per_rank is not None:
        for index, micro_batch in enumerate(plan.micro_batches):
            tokens = micro_batch.tokens_per_rank(plan.lengths, topology.world_size)
            fullest = tokens.index(max(tokens))
            if tokens[fullest] > max_tokens_per_rank:
                raise ValueError(
                    f"micro-batch {index}: rank {fullest} holds {tokens[fullest]} tokens, the "
                    f"limit is {max_tokens_per_rank}"
                )


def _check_ranks(plan: Plan, topology: Topology) -> None:
    """Raise ValueError for a group that is neither inside one node nor made of whole nodes."""
    for index, micro_batch in enumerate(plan.micro_batches):
        for group in micro_batch.groups:
            if not topology.allows(group.start, group.stop):
                raise ValueError(
                    f"micro-batch {index}: ranks {group.start}..{group.stop - 1} are neither "
                    f"inside one node nor whole nodes of {topology}"
                )
