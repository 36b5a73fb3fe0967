"""One line for people on what of a plan is routed over other ranks' NICs, and why the rest is not.

The line counts the exchanges between nodes in the forward of one layer: the turns of rings across
nodes, and the moves of remapped micro-batches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import remap_moves
from hf_flexseq.schedule.ring_routing import all_ring_routings
from hf_flexseq.schedule.routing import NicFigures, Routing, make_routing
from hf_flexseq.schedule.transfers import move_transfers
from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTokenBytes:
    """Bytes of one token in one layer."""

    queries: int
    """Bytes of the token's queries."""
    keys: int
    """Bytes of the token's keys and values."""


def routing_reason(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    links: NicFigures | None,
    token: LayerTokenBytes,
) -> str:
    """Return the reason why exchanges between nodes are routed, or are not.

    lengths: tokens of every sequence of the plan, by sequence id. links: None on one node.
    """
    if links is None:
        return "routing off: all ranks are on one node"
    objection = links.objection()
    if objection is not None:
        return f"routing off: {objection}"
    crossing = []
    for micro_batch in micro_batches:
        for routing in _routings(micro_batch, lengths, topology, links, token):
            if routing.direct_s:  # something crosses nodes
                crossing.append(routing)
    return _summary(crossing)


def _routings(
    micro_batch: MicroBatch,
    lengths: Sequence[int],
    topology: Topology,
    links: NicFigures,
    token: LayerTokenBytes,
) -> Iterator[Routing]:
    """Yield the routing of each exchange in the forward of one layer."""
    for group in micro_batch.groups:
        if group.strategy in ("zigzag", "balanced"):
            group_lengths = [lengths[sequence] for sequence in group.sequences]
            row_bytes = ((token.queries,), (token.keys,))
            yield from all_ring_routings(group, group_lengths, links, row_bytes)
    if micro_batch.remap:
        moves = remap_moves(micro_batch, lengths, topology)
        # to the groups: queries, keys and values; back to the even layout: the output
        to_groups = move_transfers(moves, token.queries + token.keys, back=True)
        to_even = move_transfers(moves, token.queries, back=False)
        yield make_routing(to_groups, links)
        yield make_routing(to_even, links)


def _summary(crossing: Sequence[Routing]) -> str:
    """Return the line on the exchanges that cross nodes."""
    if not crossing:
        return "routing nothing: no ring and no remapping crosses nodes"
    routed = [routing for routing in crossing if routing.paths]
    direct_s = 0.0
    planned_s = 0.0
    for routing in crossing:
        direct_s += routing.direct_s
        planned_s += routing.routed_s if routing.paths else routing.direct_s
    parts = [
        f"routing {len(routed)} of {len(crossing)} exchanges between nodes: they take "
        f"{planned_s * 1e3:.2f} ms instead of {direct_s * 1e3:.2f} ms in the forward of a layer"
    ]
    reasons = Counter(routing.why_not for routing in crossing if routing.why_not)
    for reason, count in reasons.items():
        parts.append(f"{reason} in {count}")
    return "; ".join(parts)
