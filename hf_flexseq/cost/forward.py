"""Costs of a forward without a backward: of a reference model, of an evaluation, or of samples
whose log-probabilities are wanted."""

from dataclasses import replace

from hf_flexseq.cost.model import ATTENTION_BACKWARD, LINEAR_PASSES, CostModel

# Ulysses exchanges heads four times in a forward and four times in a backward; the keys of a ring
# make one trip, and two in the backward.
ALL_TO_ALLS = 2
RING_TRIPS = 3


def forward_only(cost: CostModel) -> CostModel:
    """Return the cost model of forwards alone, from that of forwards with their backwards.

    Linear layers take a third, attention two of seven matrix products, transfers a half or a
    third, and the host what linear layers take. Bytes of memory stay: the most tokens of a rank
    are what they are in training.
    """
    of_attention = 1 / (1 + ATTENTION_BACKWARD)
    of_others = 1 / LINEAR_PASSES
    return replace(
        cost,
        name=f"{cost.name}, forward only",
        attention_s=cost.attention_s * of_attention,
        linear_s=cost.linear_s * of_others,
        micro_batch_s=cost.micro_batch_s * of_others,
        group_s=cost.group_s * of_others,
        group_rank_s=cost.group_rank_s * of_others,
        all_to_all_bytes=cost.all_to_all_bytes / ALL_TO_ALLS,
        ring_bytes=None if cost.ring_bytes is None else cost.ring_bytes / RING_TRIPS,
        summary_bytes=cost.summary_bytes / 2,  # what goes there comes back in a backward
        pass_s=cost.pass_s * of_others,
        experts=None
        if cost.experts is None
        else cost.experts.scaled(computing=of_others, exchanges=1 / ALL_TO_ALLS),
        tower=None if cost.tower is None else cost.tower.forward_only(),
        activations=None,  # nothing waits for a backward
    )
