"""Which turns of a ring are routed, found fast enough for rings of a thousand ranks.

`routing.make_routing` looks at every transfer of a turn, and a ring has about as many turns as
ranks. Here the same is found from integers, once for all turns:

1. In most turns of a large ring every rank reads from another node, and all about as much. The
   least and the most that a rank reads bound the level and the busiest NIC; where these are
   too close for paths to gain anything, that is all (`_alike_finder`).
2. Of another turn the transfers are arrays, and their level and busiest NIC are sums of these.
3. If other NICs could take some of it, the paths are needed. Nodes that exchange nothing have
   nothing to do with each other, so transfers fall into *parts*; a ring's are mostly the same
   but for the nodes in question, and each kind is looked at once.

A rank asks for the paths from and to its own node alone; that is all it has to do with. All ranks
find the same routing, and the same as `make_routing`, the slow twin
(tests/schedule/test_ring_routing.py).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.plan import Group
from hf_flexseq.plan.rings import Role, Round, ring_rounds
from hf_flexseq.plan.shard import cuts
from hf_flexseq.schedule.attention import in_turns, lanes_of
from hf_flexseq.schedule.ring_tokens import LaneTokens, TurnTokens
from hf_flexseq.schedule.routing import (
    LEGS_COST,
    NOTHING_CROSSES,
    NicFigures,
    Path,
    Router,
    Routing,
    Transfer,
    decided_routing,
    leg_bytes,
    straight_routing,
    without_straight,
    worth_it,
)
from hf_flexseq.schedule.routing_bounds import ROUNDING, least_seconds, may_gain
from hf_flexseq.schedule.transfers import ALIGNMENT, RowBytes, aligned

Ints = NDArray[np.int64]
TOO_ALIKE = "all NICs are about as busy"


class TransferArrays(NamedTuple):
    """The transfers of one exchange as arrays [transfers], in the order of `fetch_transfers`."""

    source: Ints
    """Global ranks that send."""

    target: Ints
    """Global ranks that receive."""

    nbytes: Ints


# transfers with their paths
_PartPaths = list[tuple[Transfer, tuple[Path, ...]]]


class _Turn(NamedTuple):
    """One turn of a ring: a round of a lane."""

    lane: LaneTokens
    one_round: Round


def ring_routings(
    group: Group,
    lengths: Sequence[int],
    links: NicFigures,
    query_bytes: RowBytes,
    key_bytes: RowBytes,
    *,
    returns: bool,
    rank: int,
    device: str = "cuda",
) -> tuple[Routing, ...]:
    """Return the routing of each turn of a `zigzag` or `balanced` group, as far as `rank` is
    concerned: with the paths from and to its node.

    lengths: tokens of each sequence of the group.
    query_bytes, key_bytes: bytes of a row of each tensor that travels for queries, and for keys.
    returns: whether results go back; otherwise it is what the calls read.
    device: "cpu" or "cuda", see `lanes_of`.
    """
    turns = _turns(group, lengths, device)
    if group.degree <= links.ranks_per_node:
        return (Routing(why_not=NOTHING_CROSSES),) * len(turns)
    objection = links.objection()
    if objection is not None:
        return (Routing(why_not=objection),) * len(turns)
    all_alike = _alike_finder(links, query_bytes, key_bytes)
    too_alike = Routing(why_not=TOO_ALIKE)
    routings = []
    for turn in turns:
        lane, (distance, earlier, later) = turn
        far = links.ranks_per_node <= distance <= group.degree - links.ranks_per_node
        if all_alike(lane, earlier, later, far):
            routings.append(too_alike)
            continue
        transfers = _transfers(group, turn, query_bytes, key_bytes, returns=returns)
        routings.append(route_arrays(transfers, links, rank=rank))
    return tuple(routings)


def all_ring_routings(
    group: Group,
    lengths: Sequence[int],
    links: NicFigures,
    token_bytes: tuple[RowBytes, RowBytes],
    device: str = "cuda",
) -> Iterator[Routing]:
    """Yield the routing of the fetch of each turn, with all its paths and its seconds.

    token_bytes: as `query_bytes` and `key_bytes` of `ring_routings`. device: as there.
    """
    for turn in _turns(group, lengths, device):
        transfers = _transfers(group, turn, *token_bytes, returns=False)
        yield route_arrays(transfers, links)


def _turns(group: Group, lengths: Sequence[int], device: str) -> list[_Turn]:
    """Return the turns of a group, in the order of all its ranks."""
    group_cuts = cuts(group.strategy, tuple(lengths), group.degree)
    by_lane = []
    for lane in lanes_of(group_cuts, device):
        lane_cuts = [group_cuts[sequence] for sequence in lane.sequences]
        tokens = LaneTokens(group.strategy, lane_cuts, group.degree, mirrored=lane.mirrored)
        rounds = ring_rounds(group.strategy, group.degree, chunk_by_chunk=lane.chunk_by_chunk)
        by_lane.append([_Turn(tokens, one_round) for one_round in rounds])
    return in_turns(by_lane)


# ---- the transfers of a turn


def _transfers(
    group: Group, turn: _Turn, query_bytes: RowBytes, key_bytes: RowBytes, *, returns: bool
) -> TransferArrays:
    """Return the transfers of a turn between any two ranks."""
    fetched: TurnTokens = turn.lane.fetched(turn.one_round)
    source, target = fetched.holder + group.start, fetched.worker + group.start
    if returns:
        source, target = target, source
    nbytes = _message_bytes(fetched.queries, query_bytes)
    nbytes = nbytes + _message_bytes(fetched.keys, key_bytes)
    return TransferArrays(source, target, nbytes)


def _message_bytes(tokens: Ints, row_bytes: RowBytes) -> Ints:
    """Return the bytes of messages with rows for `tokens` of several tensors, [messages]."""
    nbytes = np.zeros_like(tokens)
    for row in row_bytes:
        nbytes += -(-tokens * row // ALIGNMENT) * ALIGNMENT
    return nbytes


def _alike_finder(
    links: NicFigures, query_bytes: RowBytes, key_bytes: RowBytes
) -> Callable[[LaneTokens, Role | None, Role | None, bool], bool]:
    """Return a function that tells of a turn whether its fetches are surely too much alike.

    It takes the lane of the turn, the roles of its round, and whether every partner is in another
    node; and returns True where no paths could gain anything.
    """

    @functools.cache
    def all_alike(lane: LaneTokens, earlier: Role | None, later: Role | None, far: bool) -> bool:
        # 1. the most and the least bytes of a fetch, by role
        most = [0]
        least = [0]
        for role in (earlier, later):
            if role is None:
                continue
            row_bytes = query_bytes if role.helps else key_bytes
            least_tokens, most_tokens = lane.bounds(role)
            most.append(sum(aligned(most_tokens * row) for row in row_bytes))
            least.append(sum(aligned(least_tokens * row) for row in row_bytes))
        # 2. the busiest NIC serves no more ranks than this
        ranks_per_nic = -(-links.ranks_per_node // links.nics_per_node)
        # 3. Where every partner is in another node, the first node has one role alone and the
        #    last node the other.
        level = 0
        if far:
            level = -(-links.ranks_per_node * max(least) // links.nics_per_node)
        return not may_gain(ranks_per_nic * max(most), level, links)

    return all_alike


# ---- the routing of a turn


def route_arrays(
    transfers: TransferArrays, links: NicFigures, *, rank: int | None = None
) -> Routing:
    """Return how `transfers`, which run at the same time, travel over `links`.

    Where nothing is routed since it would not pay, `routed_s` is that of going straight.
    rank: only the paths of transfers from and to the node of this rank; None for all.
    """
    # 1. what crosses nodes, and how long that takes straight
    source_node = transfers.source // links.ranks_per_node
    target_node = transfers.target // links.ranks_per_node
    crosses = (source_node != target_node) & (transfers.nbytes > 0)
    if not crosses.any():
        return Routing(why_not=NOTHING_CROSSES)
    source, target, nbytes = (x[crosses] for x in transfers)
    source_node, target_node = source_node[crosses], target_node[crosses]
    sent = _most(_nics(source, links), nbytes)
    received = _most(_nics(target, links), nbytes)
    most_of_node = max(_most(source_node, nbytes), _most(target_node, nbytes))
    level = -(-most_of_node // links.nics_per_node)
    kept = straight_routing(max(sent, received), level, links)
    if kept.why_not is not None:
        return kept
    least_s = least_seconds(sent, received, level, links)
    if not worth_it(least_s * ROUNDING, kept.direct_s):
        return replace(kept, why_not=LEGS_COST)
    # 2. the legs of one part of each kind; a leg takes as long as in the slowest part
    parts = _Parts(TransferArrays(source, target, nbytes), level, links)
    worst = (0, 0, 0)
    for paths in parts.of_each_kind():
        scatter, cross, gather = leg_bytes(paths, links)
        worst = (max(worst[0], scatter), max(worst[1], cross), max(worst[2], gather))
    decided = decided_routing(worst, kept.direct_s, links)
    if decided.why_not is not None:
        return decided
    # 3. the paths that were asked for
    wanted = np.ones(len(nbytes), dtype=bool)
    if rank is not None:
        node = rank // links.ranks_per_node
        wanted = (source_node == node) | (target_node == node)
    return replace(decided, paths=without_straight(parts.paths_of(wanted)))


def _most(holders: Ints, nbytes: Ints) -> int:
    """Return the bytes of the holder (a NIC, a node) with most.

    holders: [transfers] of each transfer. nbytes: [transfers].
    """
    first = int(holders.min())
    # sums of float64 are exact below 2^53 bytes
    return int(np.bincount(holders - first, weights=nbytes).max())


def _nics(ranks: Ints, links: NicFigures) -> Ints:
    """Return the number of each rank's NIC among those of all nodes; see `NicFigures.nic`."""
    node, local_rank = np.divmod(ranks, links.ranks_per_node)
    local_nic: Ints = local_rank * links.nics_per_node // links.ranks_per_node
    return node * links.nics_per_node + local_nic


# ---- parts


class _Parts:
    """Transfers in parts that have no node in common: none sends from, or to, the same node.

    Parts are of one *kind* if they are the same but for the nodes. Their paths are then the same,
    too, and are found once, with ranks counted from the first nodes of the part.
    """

    def __init__(self, crossing: TransferArrays, level: int, links: NicFigures) -> None:
        """crossing: transfers between nodes. level: bytes, see `routing.py`."""
        self._level = level
        self._links = links
        per_node = links.ranks_per_node
        labels = _part_labels(crossing.source // per_node, crossing.target // per_node)
        # [transfers] indices of the transfers, part by part, ascending in each
        self._order = np.argsort(labels, kind="stable")
        ordered = labels[self._order]
        starts = np.concatenate(([0], 1 + np.flatnonzero(ordered[1:] != ordered[:-1])))
        # [parts + 1] part p is order[bounds[p] : bounds[p + 1]]
        self._bounds = [*starts.tolist(), len(labels)]
        source, target, nbytes = (column[self._order] for column in crossing)
        # [parts] the first rank of the nodes of each part's first transfer
        self._first_source = source[starts] // per_node * per_node
        self._first_target = target[starts] // per_node * per_node
        sizes = np.diff(self._bounds)
        source = source - np.repeat(self._first_source, sizes)
        target = target - np.repeat(self._first_target, sizes)
        # [transfers, 3] source, target and bytes of each transfer, part by part
        self._rows = np.stack((source, target, nbytes), axis=1)
        self._content = self._rows.tobytes()
        self._paths: dict[bytes, _PartPaths] = {}  # by kind

    def of_each_kind(self) -> Iterator[_PartPaths]:
        """Yield the paths of one part of each kind."""
        for part in range(len(self._first_source)):
            if self._kind(part) not in self._paths:
                yield self._of_part(part)

    def paths_of(self, wanted: NDArray[np.bool_]) -> _PartPaths:
        """Return the wanted transfers, [transfers], with their paths, in their order."""
        places = np.flatnonzero(wanted[self._order])
        parts = np.unique(np.searchsorted(self._bounds, places, side="right") - 1)
        found = {}
        for part in parts.tolist():
            indices = self._order[self._bounds[part] : self._bounds[part + 1]]
            ranks = int(self._first_source[part]), int(self._first_target[part])
            for index, counted in zip(indices.tolist(), self._of_part(part), strict=True):
                if wanted[index]:
                    found[index] = _from_ranks(counted, *ranks)
        return [found[index] for index in sorted(found)]

    def _kind(self, part: int) -> bytes:
        row_bytes = self._rows.strides[0]
        start, stop = self._bounds[part], self._bounds[part + 1]
        return self._content[start * row_bytes : stop * row_bytes]

    def _of_part(self, part: int) -> _PartPaths:
        """Return the transfers of a part with their paths, ranks counted from its first nodes."""
        kind = self._kind(part)
        if kind not in self._paths:
            rows = self._rows[self._bounds[part] : self._bounds[part + 1]].tolist()
            transfers = [Transfer(*row) for row in rows]
            self._paths[kind] = Router(transfers, self._level, self._links).paths
        return self._paths[kind]


def _from_ranks(
    counted: tuple[Transfer, tuple[Path, ...]], first_source: int, first_target: int
) -> tuple[Transfer, tuple[Path, ...]]:
    """Return a transfer and its paths with global ranks, from ranks counted from these."""
    transfer, paths = counted
    source, target, nbytes = transfer
    moved = []
    for exit_rank, entry_rank, start, stop in paths:
        moved.append(Path(first_source + exit_rank, first_target + entry_rank, start, stop))
    return Transfer(first_source + source, first_target + target, nbytes), tuple(moved)


def _part_labels(source_node: Ints, target_node: Ints) -> Ints:
    """Return the number of the part that each transfer between these nodes is in, [transfers].

    Two transfers are in one part if they leave the same node or enter the same node, or if others
    connect them so.
    """
    # 1. mostly each node has one target and each target one node: then it is its number
    nodes = 1 + max(int(source_node.max()), int(target_node.max()))
    target_of = np.zeros(nodes, dtype=np.int64)
    source_of = np.zeros(nodes, dtype=np.int64)
    target_of[source_node] = target_node  # any of several
    source_of[target_node] = source_node
    one_target = target_of[source_node] == target_node
    one_source = source_of[target_node] == source_node
    if one_target.all() and one_source.all():
        return source_node
    # 2. otherwise pairs of nodes that are connected
    pairs, pair_of = np.unique(source_node * nodes + target_node, return_inverse=True)
    sources, targets = np.divmod(pairs, nodes)
    labels: Ints = np.array(_connected(sources.tolist(), targets.tolist(), nodes))[pair_of]
    return labels


def _connected(sources: Sequence[int], targets: Sequence[int], nodes: int) -> list[int]:
    """Return a label for each pair of nodes, [pairs] each, the same for pairs that are connected.

    A node as a source and as a target are two things.
    """
    leader = list(range(2 * nodes))

    def find(thing: int) -> int:
        while leader[thing] != thing:
            leader[thing] = leader[leader[thing]]
            thing = leader[thing]
        return thing

    for source, target in zip(sources, targets, strict=True):
        leader[find(source)] = find(nodes + target)
    return [find(source) for source in sources]
