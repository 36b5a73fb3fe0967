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
    kinds = []
    for kind in cost.kinds:
        kinds.append(replace(kind, attention_s=kind.attention_s * of_attention))
    recurrent = []
    for layers in cost.recurrent:
        recurrent.append(
            replace(
                layers,
                token_s=layers.token_s * of_others,
                again_s=layers.again_s * of_others,
                # what goes there in a forward comes back in a backward
                summary_bytes=layers.summary_bytes / 2,
                halo_bytes=layers.halo_bytes / 2,
                row_bytes=layers.row_bytes / 2,
            )
        )
    return replace(
        cost,
        name=f"{cost.name}, forward only",
        attention_s=cost.attention_s * of_attention,
        linear_s=cost.linear_s * of_others,
        micro_batch_s=cost.micro_batch_s * of_others,
        group_s=cost.group_s * of_others,
        all_to_all_bytes=cost.all_to_all_bytes / ALL_TO_ALLS,
        ring_bytes=None if cost.ring_bytes is None else cost.ring_bytes / RING_TRIPS,
        query_bytes=cost.query_bytes / RING_TRIPS,
        launch_s=cost.launch_s * of_others,
        post_s=cost.post_s * of_others,
        message_s=cost.message_s * of_others,
        kinds=tuple(kinds),
        recurrent=tuple(recurrent),
        experts=None
        if cost.experts is None
        else cost.experts.scaled(computing=of_others, exchanges=1 / ALL_TO_ALLS),
        tower=None if cost.tower is None else cost.tower.forward_only(),
        activations=None,  # nothing waits for a backward
    )
