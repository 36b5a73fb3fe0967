"""The order of a step's micro-batches: those whose ranks communicate most come first.

In lockstep the order makes no difference to the sum. Ranks that meet only in their groups wait in
each of these for the one that had more to do alone before; what they do alone comes last, where
such differences cancel out. And gradients are reduced while the last micro-batch computes, best on
a link that it leaves alone.
"""

from collections.abc import Sequence

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.plan import MicroBatch


def best_order(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    sync: str,
) -> tuple[int, tuple[MicroBatch, ...]]:
    """Return the nanoseconds of the step, and its micro-batches in the best order.

    Micro-batches that communicate least come last, unless the ranks are free and the cost model
    says that the given order is faster. lengths: tokens of every sequence, by sequence id.
    """
    given = tuple(micro_batches)
    # sorted() is stable: equal micro-batches stay in the planner's order
    ordered = tuple(sorted(given, key=lambda micro_batch: _communication(micro_batch, lengths)))
    nanoseconds = step_ns(cost, ordered, lengths, topology, sync=sync)
    if sync == "lockstep" or ordered == given:
        return nanoseconds, ordered  # every order of lockstep micro-batches takes as long
    given_ns = step_ns(cost, given, lengths, topology, sync=sync)
    if given_ns < nanoseconds:
        return given_ns, given
    return nanoseconds, ordered


def _communication(micro_batch: MicroBatch, lengths: Sequence[int]) -> tuple[int, float, int]:
    """Return a key that sorts micro-batches by falling communication.

    1. Wide groups communicate more than narrow ones.
    2. A larger share of the tokens in the widest groups means more communication.
    3. Of equal ones the micro-batch with most tokens comes last: it has most to hide a reduction
       of gradients under.
    """
    widest = micro_batch.groups[0].degree
    tokens = 0
    widest_tokens = 0
    for group in micro_batch.groups:
        tokens += group.tokens(lengths)
        if group.degree == widest:
            widest_tokens += group.tokens(lengths)
    return -widest, -widest_tokens / tokens, tokens
