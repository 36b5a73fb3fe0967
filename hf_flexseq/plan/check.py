"""Refuse a plan of groups that a topology cannot run.

`Plan.check_form` holds what a plan must be anywhere; here stand the rules that need to know the
machine. A pipeline's plan has its own rules: `PipelinePlan.check_form`, and
`hf_flexseq/schedule/pipeline/check.py` for those that walk through its actions.
"""

from hf_flexseq.plan.groups import MicroBatch
from hf_flexseq.plan.sequences import Plan
from hf_flexseq.plan.wire import Ints
from hf_flexseq.topology import Topology


def check(plan: Plan, topology: Topology, max_tokens_per_rank: int | None = None) -> None:
    """Raise ValueError, saying where, unless `plan` is legal on `topology`.

    A legal plan has every sequence in exactly one group; groups allowed by the topology, laminar
    and widest first in each micro-batch; a token for every rank where a micro-batch is remapped;
    and no rank above `max_tokens_per_rank` tokens in a micro-batch, if that is given.
    """
    plan.check_form()
    _check_ranks(plan, topology)
    for index, micro_batch in enumerate(plan.micro_batches):
        if micro_batch.remap:
            _check_remap(micro_batch, plan.lengths, topology, f"micro-batch {index}")
    if max_tokens_per_rank is not None:
        for index, tokens in enumerate(plan.arrays.tokens_per_rank(topology.world_size)):
            _check_memory(tokens, max_tokens_per_rank, f"micro-batch {index}")


def _check_ranks(plan: Plan, topology: Topology) -> None:
    """Raise ValueError for a group that is neither inside one node nor made of whole nodes."""
    arrays = plan.arrays
    # Many groups are of the same ranks: each range of ranks is looked at once, by its first group.
    first_groups: dict[tuple[int, int], int] = {}
    stops = arrays.starts + arrays.degrees
    ranges = zip(arrays.starts.tolist(), stops.tolist(), strict=True)
    for group, ends in enumerate(ranges):
        first_groups.setdefault(ends, group)
    for (start, stop), group in first_groups.items():
        if not topology.allows(start, stop):
            raise ValueError(
                f"micro-batch {arrays.batch_of[group]}: ranks {start}..{stop - 1} are neither "
                f"inside one node nor whole nodes of {topology.nodes} x {topology.ranks_per_node}"
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


def _check_memory(tokens: Ints, max_tokens_per_rank: int, where: str) -> None:
    """Raise ValueError naming the fullest rank when it holds too much. tokens: [world_size]."""
    fullest = int(tokens.argmax())
    if tokens[fullest] > max_tokens_per_rank:
        raise ValueError(
            f"{where}: rank {fullest} holds {tokens[fullest]} tokens, the limit is "
            f"{max_tokens_per_rank}"
        )
