"""Remapping (Zeppelin, arXiv 2509.21841), where it pays: tokens stand evenly on all ranks outside
of attention.

A plan that levels attention and linear layers together leaves little to gain, and moving tokens
twice a layer is not free; a plan that levels attention alone, as Zeppelin's, may gain. Each
micro-batch is decided by the cost model.
"""

from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.cost import CostModel, lockstep_ns, remapped_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.topology import Topology

REMAPPING = ("auto", "zeppelin")  # planners that may remap


def with_remap(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches, those remapped that are faster so.

    lengths: tokens of every sequence, by sequence id.
    """
    as_they_are = [replace(micro_batch, remap=False) for micro_batch in micro_batches]
    uneven_ns = lockstep_ns(cost, as_they_are, lengths, topology)
    decided = []
    for micro_batch, uneven in zip(as_they_are, uneven_ns, strict=True):
        even_ns = sum(remapped_ns(cost, micro_batch, lengths, topology)) + cost.micro_batch_ns
        tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
        # With fewer tokens than ranks some rank would have no token at all.
        remap = even_ns < uneven and tokens >= topology.world_size
        decided.append(replace(micro_batch, remap=remap))
    return tuple(decided)
