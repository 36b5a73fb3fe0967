"""What of a plan is routed, and why the rest is not, in one line for people."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import remap_moves
from hf_flexseq.schedule.loans import group_loans
from hf_flexseq.schedule.routing import NicFigures, Routing, make_routing
from hf_flexseq.schedule.transfers import loan_transfers, move_transfers
from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTokenBytes:
    """Bytes of a token in one layer: of its queries, and of its keys and values."""

    queries: int
    keys: int


def routing_reason(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    links: NicFigures | None,
    token: LayerTokenBytes,
) -> str:
    """Of the exchanges between nodes in the forward of a layer. lengths: of the plan's
    sequences."""
    if links is None:
        return "routing off: all ranks are on one node"
    if (objection := links.objection()) is not None:
        return f"routing off: {objection}"
    found = [
        routing
        for micro_batch in micro_batches
        for routing in _routings(micro_batch, lengths, topology, links, token)
    ]
    return _summary([routing for routing in found if routing.direct_s])


def _routings(
    micro_batch: MicroBatch,
    lengths: Sequence[int],
    topology: Topology,
    links: NicFigures,
    token: LayerTokenBytes,
) -> Iterator[Routing]:
    for group in micro_batch.groups:
        if group.strategy in ("zigzag", "balanced"):
            for turn in group_loans(group, [lengths[i] for i in group.sequences]):
                transfers = loan_transfers(
                    turn, group.start, (token.queries,), (token.keys,), returns=False
                )
                yield make_routing(transfers, links)
    if micro_batch.remap:
        moves = remap_moves(micro_batch, lengths, topology)
        yield make_routing(move_transfers(moves, token.queries + token.keys, back=True), links)
        yield make_routing(move_transfers(moves, token.queries, back=False), links)


def _summary(crossing: Sequence[Routing]) -> str:
    if not crossing:
        return "routing nothing: no ring and no remapping crosses nodes"
    routed = [routing for routing in crossing if routing.paths]
    straight_s = sum(routing.direct_s for routing in crossing)
    now_s = sum(routing.routed_s if routing.paths else routing.direct_s for routing in crossing)
    why_not = Counter(routing.why_not for routing in crossing if routing.why_not)
    of_all = f"routing {len(routed)} of {len(crossing)} exchanges between nodes"
    gain = (
        f"they take {now_s * 1e3:.2f} ms instead of {straight_s * 1e3:.2f} ms "
        "in the forward of a layer"
    )
    return "; ".join(
        [f"{of_all}: {gain}", *(f"{reason} in {count}" for reason, count in why_not.items())]
    )
