"""Routing of transfers between nodes over several NICs: Zeppelin's (arXiv 2509.21841).

Every rank sends to other nodes over one NIC. Where a few ranks of a node have something to send
and the others have not, NICs stand idle. Then a transfer is split into *paths*, and every path
takes three *legs*:

    source --scatter--> exit rank --cross--> entry rank --gather--> target
    [ node of the source            ]        [ node of the target            ]

Exit rank and entry rank may be the source and the target themselves; such a leg is empty. A turn
of a ring across nodes is such a case: nearly all of its ranks read from a neighbour.

1. Compute the *level*, the least that the busiest NIC can carry: the bytes that leave or enter a
   node, divided by its NICs.
2. Send straight from source to target all bytes that fit under the level.
3. Send the rest over the NICs that have the most room left under the level. It leaves (enters) by
   the source's (target's) own NIC as long as that has any room.
4. Cut the paths into *packets* that follow each other through the legs, and route only if the legs
   then take less time than the busiest NIC would need otherwise. Where all NICs are equally busy
   nothing is above the level, and nothing is routed.

The paper splits every transfer evenly over all NICs, so that the legs inside the nodes carry
nearly all of it twice, and adds up the times of the legs: it gains only if a byte takes more than
twice as long between nodes as inside one. That stays a condition here, but less is moved, and legs
overlap.

The result is a function of byte counts that all ranks know, so all ranks find the same routing.
`routes.py` rewrites their programs.
"""

import functools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel

MOST_PACKETS = 8  # packets of a path
LEAST_GAIN = 0.1  # part of the straight seconds; a smaller gain is not worth the messages
TRANSFER_S = 3e-5  # of a transfer besides its bytes, on NCCL
LEAST_SHARE = 16  # a path carries at least 1/16 of the level, so that a transfer does not crumble

Nic = tuple[int, int]  # (node, index of the NIC in the node)
NicEnd = tuple[bool, Nic]  # (True: what the NIC sends, False: what it receives; the NIC)


@dataclass(frozen=True, kw_only=True, slots=True)
class NicFigures:
    """The links that move bytes between ranks: inside a node, and over NICs between nodes."""

    ranks_per_node: int

    nics_per_node: int
    """NICs of a node; ranks next to each other share one where there are more ranks than NICs."""
    inside_s: float
    """Seconds that a byte takes between two ranks of a node."""
    across_s: float
    """Seconds that a byte takes between two nodes, over one NIC."""
    transfer_s: float
    """Seconds of a transfer besides the time of its bytes."""

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def nic(self, rank: int) -> Nic:
        """Return the NIC over which `rank` sends to and receives from other nodes."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        return node, local_rank * self.nics_per_node // self.ranks_per_node

    def ranks_of(self, nic: Nic) -> range:
        """Return the ranks that share `nic`."""
        node, index = nic
        start = node * self.ranks_per_node
        first = -(-index * self.ranks_per_node // self.nics_per_node)
        stop = -(-(index + 1) * self.ranks_per_node // self.nics_per_node)
        return range(start + first, start + stop)

    @property
    def may_route(self) -> bool:
        """True if other NICs can ever carry a byte faster."""
        return self.nics_per_node > 1 and self.across_s > 2 * self.inside_s


def links_of(cost: CostModel, topology: Topology) -> NicFigures | None:
    """Return the links between and inside the nodes of `topology`; None for a single node.

    `cost` has the bandwidth between nodes of a rank which sends to all ranks alike: with n nodes,
    1 / n of its bytes stay inside its own node. Each rank of a device has its own NIC; ranks on
    processors share one, which has a multiple of their bandwidth.
    """
    if topology.nodes == 1:
        return None
    per_node = topology.ranks_per_node
    nics = per_node if cost.overlap else 1
    inside_s = 1 / cost.bandwidth(per_node, False)
    stays = 1 / topology.nodes
    across_s = (1 / cost.bandwidth(topology.world_size, True) - stays * inside_s) / (1 - stays)
    return NicFigures(
        ranks_per_node=per_node,
        nics_per_node=nics,
        inside_s=inside_s,
        across_s=nics / per_node * max(across_s, inside_s),
        transfer_s=TRANSFER_S,
    )


class Transfer(NamedTuple):
    """Bytes that go from one rank to another in one exchange."""

    source: int
    """Global rank that sends."""
    target: int
    """Global rank that receives."""
    nbytes: int


class Path(NamedTuple):
    """Bytes [start, stop) of a transfer and the two ranks over whose NICs they travel."""

    exit_rank: int
    """Rank of the source's node that sends them to the other node."""
    entry_rank: int
    """Rank of the target's node that receives them there."""
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Paths = Sequence[tuple[Transfer, tuple[Path, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The paths on which the transfers of one exchange travel."""

    paths: tuple[tuple[Transfer, tuple[Path, ...]], ...] = ()
    """Each transfer that does not go straight, with its paths in the order of the bytes."""
    packets: int = 1
    """Packets into which each path is cut."""


STRAIGHT = Routing()


@functools.lru_cache(maxsize=128)
def make_routing(
    transfers: tuple[Transfer, ...], links: NicFigures, relays: frozenset[int] | None = None
) -> Routing:
    """Return how `transfers`, which run at the same time, travel over `links`.

    relays: the ranks that may pass on the bytes of others; None for all.
    """
    # 1. what crosses nodes, and how long that takes straight
    crossing = []
    for t in transfers:
        if t.nbytes and links.node(t.source) != links.node(t.target):
            crossing.append(t)
    if not crossing or not links.may_route:
        return STRAIGHT
    straight = [(t, (Path(t.source, t.target, 0, t.nbytes),)) for t in crossing]
    level = _level(crossing, links)
    if max(_nic_loads(straight, links).values()) <= level:
        return STRAIGHT  # all NICs are busy
    direct_s = _pipelined(_leg_seconds(straight, links), 1, links)
    # 2. the paths, in as many packets as are fastest
    paths = Router(crossing, level, links, relays).paths
    legs = _leg_seconds(paths, links)
    packets = min(range(1, MOST_PACKETS + 1), key=lambda count: _pipelined(legs, count, links))
    # 3. only if they are worth their messages
    if _pipelined(legs, packets, links) > (1 - LEAST_GAIN) * direct_s:
        return STRAIGHT
    routed = []
    for t, found in paths:
        goes_straight = len(found) == 1 and found[0][:2] == t[:2]
        if not goes_straight:
            routed.append((t, found))
    return Routing(paths=tuple(routed), packets=packets)


class Router:
    """Finds the paths of all transfers of an exchange: steps 2 and 3 of the module's list."""

    def __init__(
        self,
        crossing: Sequence[Transfer],
        level: int,
        links: NicFigures,
        relays: Collection[int] | None,
    ) -> None:
        """crossing: transfers between nodes. level: bytes, step 1. relays: see `make_routing`."""
        self._links = links
        self._relays = relays
        self._level = level
        # bytes that each NIC of a node may still send, or receive, under the level:
        # (sends?, node) -> [nics_per_node]
        self._room: dict[tuple[bool, int], list[int]]
        self._room = defaultdict(lambda: [level] * links.nics_per_node)
        # bytes that pass through each rank, (out of the node?, rank) -> bytes
        self._passed: dict[tuple[bool, int], int] = defaultdict(int)
        # Everything that fits goes straight, before anything else takes room.
        fitting = [self._take_straight(t) for t in crossing]
        self.paths: list[tuple[Transfer, tuple[Path, ...]]] = []
        for t, straight_bytes in zip(crossing, fitting, strict=True):
            self.paths.append((t, self._all_paths(t, straight_bytes)))

    def _take_straight(self, t: Transfer) -> int:
        """Take the room of the bytes of `t` that fit under the level of both its own NICs; return
        their number."""
        out_node, out_nic = self._links.nic(t.source)
        in_node, in_nic = self._links.nic(t.target)
        room_out = self._room[True, out_node]
        room_in = self._room[False, in_node]
        nbytes = min(t.nbytes, room_out[out_nic], room_in[in_nic])
        room_out[out_nic] -= nbytes
        room_in[in_nic] -= nbytes
        return nbytes

    def _all_paths(self, t: Transfer, straight_bytes: int) -> tuple[Path, ...]:
        """Return the paths of `t`: first `straight_bytes` bytes straight, then the rest."""
        paths = []
        if straight_bytes:
            paths.append(Path(t.source, t.target, 0, straight_bytes))
        start = straight_bytes
        while start < t.nbytes:
            exit_rank, room_out = self._relay(t.source, sends=True)
            entry_rank, room_in = self._relay(t.target, sends=False)
            nbytes = max(min(room_out, room_in), self._level // LEAST_SHARE, 1)
            stop = min(t.nbytes, start + nbytes)
            self._pass(exit_rank, t.source, stop - start, sends=True)
            self._pass(entry_rank, t.target, stop - start, sends=False)
            paths.append(Path(exit_rank, entry_rank, start, stop))
            start = stop
        return tuple(paths)

    def _relay(self, end: int, *, sends: bool) -> tuple[int, int]:
        """Return the rank over whose NIC more of a transfer can go, and the room of that NIC.

        end: the source (`sends`) or the target of the transfer; it relays for itself while its own
        NIC has room.
        """
        node, own_nic = self._links.nic(end)
        rooms = self._room[sends, node]
        if rooms[own_nic] > self._level // LEAST_SHARE:
            return end, rooms[own_nic]
        # the NIC with the most room, the first of several
        nics = [index for index in range(len(rooms)) if self._ranks_of((node, index), end)]
        nic = max(nics, key=lambda index: rooms[index])
        # of its ranks `end` itself, else the first of those with the least to pass on
        ranks = self._ranks_of((node, nic), end)
        if end in ranks:
            return end, rooms[nic]
        rank = min(ranks, key=lambda rank: self._passed[sends, rank])
        return rank, rooms[nic]

    def _ranks_of(self, nic: Nic, end: int) -> list[int]:
        """Return the ranks that share `nic` and may take a part in a transfer of rank `end`."""
        ranks = self._links.ranks_of(nic)
        if self._relays is None:
            return list(ranks)
        return [rank for rank in ranks if rank == end or rank in self._relays]

    def _pass(self, rank: int, end: int, nbytes: int, *, sends: bool) -> None:
        """Book `nbytes` from (to) rank `end` on the NIC of `rank`."""
        node, nic = self._links.nic(rank)
        self._room[sends, node][nic] -= nbytes
        if rank != end:
            self._passed[sends, rank] += nbytes


def _level(crossing: Sequence[Transfer], links: NicFigures) -> int:
    """Return the least bytes that the busiest NIC can carry, if transfers may be cut anywhere."""
    node_loads: dict[tuple[bool, int], int] = defaultdict(int)
    for t in crossing:
        node_loads[True, links.node(t.source)] += t.nbytes
        node_loads[False, links.node(t.target)] += t.nbytes
    return -(-max(node_loads.values()) // links.nics_per_node)  # rounded up


def _nic_loads(paths: Paths, links: NicFigures) -> dict[NicEnd, int]:
    """Return the bytes that each NIC sends and receives."""
    loads: dict[NicEnd, int] = defaultdict(int)
    for _, found in paths:
        for path in found:
            loads[True, links.nic(path.exit_rank)] += path.nbytes
            loads[False, links.nic(path.entry_rank)] += path.nbytes
    return loads


def _leg_seconds(paths: Paths, links: NicFigures) -> tuple[float, float, float]:
    """Return the seconds that scatter, cross and gather take, each if it ran alone.

    Inside a node a leg waits for the rank that sends or receives most, between nodes for the
    busiest NIC.
    """
    scatter: dict[tuple[bool, int], int] = defaultdict(int)  # (sends?, rank) -> bytes
    gather: dict[tuple[bool, int], int] = defaultdict(int)
    for t, found in paths:
        for path in found:
            legs = (
                (scatter, t.source, path.exit_rank),
                (gather, path.entry_rank, t.target),
            )
            for loads, source, target in legs:
                if source != target:
                    loads[True, source] += path.nbytes
                    loads[False, target] += path.nbytes
    return (
        max(scatter.values(), default=0) * links.inside_s,
        max(_nic_loads(paths, links).values()) * links.across_s,
        max(gather.values(), default=0) * links.inside_s,
    )


def _pipelined(legs: tuple[float, float, float], packets: int, links: NicFigures) -> float:
    """Return the seconds of the legs when `packets` packets follow each other through them.

    The first packet goes through all legs, the others follow at the pace of the slowest leg. Each
    of these rounds takes the latency of a transfer.
    """
    first = sum(legs) / packets
    others = max(legs) * (packets - 1) / packets
    rounds = packets - 1 + sum(seconds > 0 for seconds in legs)
    return first + others + rounds * links.transfer_s
