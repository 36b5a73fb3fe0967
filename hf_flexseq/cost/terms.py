"""Seconds of each term of the cost model on each rank in a micro-batch, and cost models whose
terms are multiplied."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.evaluate import experts_ns, rank_ns
from hf_flexseq.cost.kinds import FloatArray
from hf_flexseq.cost.model import CostModel
from hf_flexseq.plan import MicroBatch

TERMS = ("token", "attention", "transfers", "group", "experts", "micro_batch")

_ENDLESS = 1e18  # bytes per second


def term_seconds(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> FloatArray:
    """Return the seconds of each term on each rank in a micro-batch, [world_size, terms]."""
    priced = with_choice(cost, micro_batch.memory)
    speeds = tuple((degree, _ENDLESS) for degree, _ in cost.bandwidths)
    without_host = replace(priced, group_s=0.0, launch_s=0.0, post_s=0.0, message_s=0.0)
    without_links = replace(without_host, bandwidths=speeds)
    kinds = tuple(replace(kind, attention_s=0.0) for kind in priced.kinds)
    of_tokens = replace(without_links, attention_s=0.0, kinds=kinds)
    before = np.zeros(topology.world_size)
    columns = []
    for one in (of_tokens, without_links, without_host, priced):
        seconds = np.array(rank_ns(one, micro_batch.groups, lengths, topology)) / 1e9
        columns.append(seconds - before)
        before = seconds
    together = np.zeros(topology.world_size)
    if cost.experts is not None:
        of_groups = experts_ns(cost, micro_batch, lengths, topology) / 1e9
        together = np.repeat(of_groups, topology.world_size // len(of_groups))
    constant = np.full(topology.world_size, cost.micro_batch_s)
    return np.stack([*columns, together, constant], axis=1)


def scaled(cost: CostModel, factors: Sequence[float]) -> CostModel:
    """Return `cost` with the coefficient of each term multiplied by its factor."""
    token, attention, transfers, group, experts, constant = factors
    token, transfers, experts = max(token, 1e-3), max(transfers, 1e-3), max(experts, 1e-3)
    of_experts = cost.experts
    if of_experts is not None:
        of_experts = replace(
            of_experts, token_s=of_experts.token_s * experts, rate=of_experts.rate / experts
        )
    return replace(
        cost,
        linear_s=cost.linear_s * token,
        recurrent=tuple(
            replace(one, token_s=one.token_s * token, again_s=one.again_s * token)
            for one in cost.recurrent
        ),
        attention_s=cost.attention_s * attention,
        kinds=tuple(replace(one, attention_s=one.attention_s * attention) for one in cost.kinds),
        bandwidths=tuple((degree, speed / transfers) for degree, speed in cost.bandwidths),
        group_s=cost.group_s * group,
        launch_s=cost.launch_s * group,
        post_s=cost.post_s * group,
        message_s=cost.message_s * group,
        experts=of_experts,
        micro_batch_s=cost.micro_batch_s * constant,
    )
