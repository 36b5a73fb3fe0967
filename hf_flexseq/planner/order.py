"""The order of a step's micro-batches: those whose ranks communicate most come first.

In lockstep it makes no difference to the sum. Ranks that meet only in their groups wait in each of
these for the one that had more to do alone before; what they do alone comes last, where such
differences cancel out. And gradients are reduced while the last micro-batch computes, best on a
link that it leaves alone.
"""

from collections.abc import Sequence
from operator import itemgetter

from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.topology import Topology


def best_order(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    sync: str,
) -> tuple[int, tuple[MicroBatch, ...]]:
    """Nanoseconds of the step, and the micro-batches with quiet ones last; or as they come, where
    the cost model says that this is faster."""
    given = tuple(micro_batches)
    quiet_last = tuple(sorted(given, key=lambda micro_batch: _quietness(micro_batch, lengths)))
    orders = (quiet_last,) if sync == "lockstep" else dict.fromkeys((quiet_last, given))
    timed = ((step_ns(cost, made, lengths, topology, sync=sync), made) for made in orders)
    return min(timed, key=itemgetter(0))


def _quietness(micro_batch: MicroBatch, lengths: Sequence[int]) -> tuple[bool, int, float, int]:
    """Remapping is loudest, since it moves tokens over all ranks; narrow groups are quieter than
    wide ones, fewer tokens in the widest than more; of those alike the one with most tokens has
    most to hide a reduction under."""
    widest = micro_batch.groups[0].degree
    tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
    shared = sum(group.tokens(lengths) for group in micro_batch.groups if group.degree == widest)
    return not micro_batch.remap, -widest, -shared / tokens, tokens
