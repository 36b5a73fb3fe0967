"""Remapping (Zeppelin, arXiv 2509.21841), where it pays: tokens stand evenly on all ranks outside
of attention.

A plan that levels attention and linear layers together leaves little to gain, and moving tokens
twice a layer is not free; a plan that levels attention alone, as Zeppelin's, may gain. Each
micro-batch is decided by the cost model.
"""

from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.cost import CostModel, remapped_ns, slowest_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.topology import Topology

REMAPPING = ("auto", "zeppelin")  # planners that may remap


def with_remap(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
) -> tuple[MicroBatch, ...]:
    """The micro-batches, those remapped that are faster so."""
    return tuple(_decided(micro_batch, lengths, topology, cost) for micro_batch in micro_batches)


def remap_reason(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
) -> str:
    """One line for people: what remapping gains and costs in these micro-batches."""
    plain, remapped, moved = 0, 0, 0
    for micro_batch in micro_batches:
        plain += slowest_ns(cost, replace(micro_batch, remap=False), lengths, topology)
        *work, transfers = remapped_ns(cost, micro_batch, lengths, topology)
        remapped, moved = remapped + sum(work), moved + transfers
    count = sum(micro_batch.remap for micro_batch in micro_batches)
    of_all = f"remap in {count} of {len(micro_batches)} micro-batches"
    even, uneven, moving = (f"{ns / 1e6:.1f} ms" for ns in (remapped, plain, moved))
    return (
        f"{of_all}: even tokens everywhere take {even} instead of {uneven}, "
        f"and moving them {moving}"
    )


def _decided(
    micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology, cost: CostModel
) -> MicroBatch:
    remapped = replace(micro_batch, remap=True)
    if (
        sum(lengths[i] for group in micro_batch.groups for i in group.sequences)
        < topology.world_size
    ):
        return micro_batch  # some rank would have no token at all
    return min(micro_batch, remapped, key=lambda made: slowest_ns(cost, made, lengths, topology))
