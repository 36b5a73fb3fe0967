"""Refuse a plan of groups that a topology cannot run.

`Plan.check_form` holds what a plan must be anywhere; here stand the rules that need to know the
machine. A pipeline's plan has its own rules: `PipelinePlan.check_form`, and
`hf_flexseq/schedule/pipeline/check.py` for those that walk through its actions.
"""

from hf_flexseq.plan.sequences import MicroBatch, Plan
from hf_flexseq.topology import Topology


def check(plan: Plan, topology: Topology, max_tokens_per_rank: int | None = None) -> None:
    """Raise ValueError, saying where, unless `plan` is legal on `topology`.

    A legal plan has every sequence in exactly one group; groups allowed by the topology, laminar
    and widest first in each micro-batch; a token for every rank where a micro-batch is remapped;
    and no rank above `max_tokens_per_rank` tokens in a micro-batch, if that is given.
    """
    plan.check_form()
    for index, micro_batch in enumerate(plan.micro_batches):
        where = f"micro-batch {index}"
        _check_ranks(micro_batch, topology, where)
        if micro_batch.remap:
            _check_remap(micro_batch, plan.lengths, topology, where)
        if max_tokens_per_rank is not None:
            tokens = micro_batch.tokens_per_rank(plan.lengths, topology.world_size)
            _check_memory(tokens, max_tokens_per_rank, where)


def _check_ranks(micro_batch: MicroBatch, topology: Topology, where: str) -> None:
    """Raise ValueError for a group that is neither inside one node nor made of whole nodes."""
    for group in micro_batch.groups:
        if not topology.allows(group.start, group.stop):
            raise ValueError(
                f"{where}: ranks {group.start}..{group.stop - 1} are neither inside one node "
                f"nor whole nodes of {topology.nodes} x {topology.ranks_per_node}"
            )


def _check_remap(
    micro_batch: MicroBatch, lengths: tuple[int, ...], topology: Topology, where: str
) -> None:
    """Raise ValueError when evenly spread tokens would leave a rank without any."""
    tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
    if tokens < topology.world_size:
        raise ValueError(
            f"{where}: fewer tokens than ranks cannot be spread over all of them (remap)"
        )


def _check_memory(tokens: tuple[int, ...], max_tokens_per_rank: int, where: str) -> None:
    """Raise ValueError naming the fullest rank when it holds too much. tokens: [world_size]."""
    fullest = max(range(len(tokens)), key=tokens.__getitem__)
    if tokens[fullest] > max_tokens_per_rank:
        raise ValueError(
            f"{where}: rank {fullest} holds {tokens[fullest]} tokens, the limit is "
            f"{max_tokens_per_rank}"
        )
