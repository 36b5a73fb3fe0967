"""The price of a micro-batch as a sum of terms, one for each number behind it.

Pictures show these terms, and a fit compares them with measured seconds (`correction.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.evaluate import experts_ns
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.cost.model import SEQUENCE_TERMS, TERMS, TOKEN, CostModel
from hf_flexseq.plan import Group, MicroBatch

GROUP, EXPERTS = TERMS.index("group"), TERMS.index("experts")
OF_SEQUENCES = slice(1, 1 + len(SEQUENCE_TERMS))

LEAST_FACTOR = 1e-3


def term_seconds(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> FloatArray:
    """Return the seconds of each term on each rank in a micro-batch, [world_size, TERMS]; a row
    sums up to the rank's seconds. lengths: tokens per sequence of the plan, by id."""
    cost = with_choice(cost, micro_batch.memory)
    terms = np.zeros((topology.world_size, len(TERMS)))
    terms[:, 0] = cost.micro_batch_s
    for group in micro_batch.groups:
        terms[group.start : group.stop] += group_terms(cost, group, lengths, topology)
    if cost.experts is not None:
        together = experts_ns(cost, micro_batch, lengths, topology)  # [expert groups]
        terms[:, EXPERTS] = 1e-9 * np.repeat(together, topology.world_size // len(together))
    return terms


def group_terms(
    cost: CostModel, group: Group, lengths: Sequence[int], topology: Topology
) -> FloatArray:
    """Return the seconds of each term of a group, alike on all of its ranks, [TERMS]."""
    kind = (group.degree, group.strategy, topology.spans_nodes(group.start, group.stop))
    tokens = np.array([lengths[one] for one in group.sequences], dtype=np.int64)
    each = cost.terms(tokens, *kind, shares_of(lengths, group.sequences))
    terms = np.zeros(len(TERMS))
    terms[OF_SEQUENCES] = each.sum(axis=1)
    cover = round(1e9 * (terms.sum() - terms[1 + TOKEN]))
    terms[GROUP] = 1e-9 * float(cost.waits(*kind).beyond(np.array([cover]))[0])
    return terms


def scaled(cost: CostModel, factors: Sequence[float]) -> CostModel:
    """Return the cost model whose number behind each term is multiplied, [TERMS] factors of at
    least 0; a token takes some time, whatever its factor."""
    of = dict(zip(TERMS, factors, strict=True))
    experts = cost.experts
    if experts is not None:
        experts = experts.scaled(computing=of["experts"], exchanges=of["experts"])
    return replace(
        cost,
        micro_batch_s=cost.micro_batch_s * of["micro_batch"],
        linear_s=cost.linear_s * max(of["token"], LEAST_FACTOR),
        attention_s=cost.attention_s * of["attention"],
        all_to_all_bytes=cost.all_to_all_bytes * of["all_to_all"],
        ring_bytes=None if cost.ring_bytes is None else cost.ring_bytes * of["ring"],
        summary_bytes=cost.summary_bytes * of["states"],
        pass_s=cost.pass_s * of["copies"],
        group_s=cost.group_s * of["group"],
        group_rank_s=cost.group_rank_s * of["group"],
        experts=experts,
    )
