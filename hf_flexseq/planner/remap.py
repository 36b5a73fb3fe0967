"""Remapping (Zeppelin, arXiv 2509.21841), where it pays: tokens stand evenly on all ranks outside
of attention.

A plan that levels attention and linear layers together leaves little to gain, and moving tokens
twice a layer is not free; a plan that levels attention alone, as Zeppelin's, may gain. Each
micro-batch is decided by the cost model.
"""

from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.cost import CostModel, RemappedNs, lockstep_ns, remapped_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.topology import Topology

REMAPPING = ("auto", "zeppelin")  # planners that may remap


def with_remap(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
) -> tuple[tuple[MicroBatch, ...], str]:
    """Return the micro-batches, those remapped that are faster so, and the reason.

    The reason is one line for people: what even tokens gain and what moving them costs. lengths:
    tokens of every sequence, by sequence id.
    """
    as_they_are = [replace(micro_batch, remap=False) for micro_batch in micro_batches]
    uneven_ns = []
    for nanoseconds in lockstep_ns(cost, as_they_are, lengths, topology):
        uneven_ns.append(nanoseconds - cost.micro_batch_ns)
    decided = []
    even_ns: list[RemappedNs] = []
    for micro_batch, uneven in zip(as_they_are, uneven_ns, strict=True):
        even = remapped_ns(cost, micro_batch, lengths, topology)
        tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
        # With fewer tokens than ranks some rank would have no token at all.
        remap = sum(even) < uneven and tokens >= topology.world_size
        decided.append(replace(micro_batch, remap=remap))
        even_ns.append(even)
    count = sum(micro_batch.remap for micro_batch in decided)
    computed_ns = sum(even.attention + even.linear for even in even_ns)
    moves_ns = sum(even.moves for even in even_ns)
    reason = (
        f"remap in {count} of {len(decided)} micro-batches: even tokens everywhere take "
        f"{_ms(computed_ns)} instead of {_ms(sum(uneven_ns))}, and moving them {_ms(moves_ns)}"
    )
    return tuple(decided), reason


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
