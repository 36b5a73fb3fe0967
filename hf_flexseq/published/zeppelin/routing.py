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

# (True: what a rank sends over its NIC, False: what it receives; the rank) -> bytes
Loads = dict[tuple[bool, int], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class NicFigures:
    """The links that move bytes between ranks: inside a node, and over NICs between nodes."""

    ranks_per_node: int

    inside_s: float
    """Seconds that a byte takes between two ranks of a node."""
    across_s: float
    """Seconds that a byte takes between two nodes, over one NIC."""

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def may_route(self) -> bool:
        """True if other NICs can ever carry a byte faster."""
        return self.ranks_per_node > 1 and self.across_s > 2 * self.inside_s


def links_of(cost: CostModel, topology: Topology) -> NicFigures | None:
    """Return the links between and inside the nodes of `topology`; None for a single node, and for
    ranks on processors, which share one NIC.

    `cost` has the bandwidth between nodes of a rank which sends to all ranks alike: with n nodes,
    1 / n of its bytes stay inside its own node.
    """
    if topology.nodes == 1 or not cost.overlap:
        return None
    inside_s = 1 / cost.bandwidth(topology.ranks_per_node, False)
    stays = 1 / topology.nodes
    across_s = (1 / cost.bandwidth(topology.world_size, True) - stays * inside_s) / (1 - stays)
    return NicFigures(
        ranks_per_node=topology.ranks_per_node,
        inside_s=inside_s,
        across_s=max(across_s, inside_s),
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
    transfers: tuple[Transfer, ...], links: NicFigures, relays: frozenset[int]
) -> Routing:
    """Return how `transfers`, which run at the same time, travel over `links`.

    relays: the ranks that may pass on the bytes of others.
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
    if max(_nic_loads(straight).values()) <= level:
        return STRAIGHT  # all NICs are busy
    direct_s = _pipelined(_leg_seconds(straight, links), 1)
    # 2. the paths, in as many packets as are fastest
    paths = Router(crossing, level, links, relays).paths
    legs = _leg_seconds(paths, links)
    packets = min(range(1, MOST_PACKETS + 1), key=lambda count: _pipelined(legs, count))
    # 3. only if they are worth their messages
    if _pipelined(legs, packets) > (1 - LEAST_GAIN) * direct_s:
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
        relays: Collection[int],
    ) -> None:
        """crossing: transfers between nodes. level: bytes, step 1. relays: see `make_routing`."""
        self._links = links
        self._relays = relays
        self._least = level // LEAST_SHARE
        # bytes that each rank may still send, or receive, under the level
        self._room: Loads = defaultdict(lambda: level)
        # Everything that fits goes straight, before anything else takes room.
        fitting = [self._take_straight(t) for t in crossing]
        self.paths: list[tuple[Transfer, tuple[Path, ...]]] = []
        for t, straight_bytes in zip(crossing, fitting, strict=True):
            self.paths.append((t, self._all_paths(t, straight_bytes)))

    def _take_straight(self, t: Transfer) -> int:
        """Take the room of the bytes of `t` that fit under the level of both its own NICs; return
        their number."""
        nbytes = min(t.nbytes, self._room[True, t.source], self._room[False, t.target])
        self._room[True, t.source] -= nbytes
        self._room[False, t.target] -= nbytes
        return nbytes

    def _all_paths(self, t: Transfer, straight_bytes: int) -> tuple[Path, ...]:
        """Return the paths of `t`: first `straight_bytes` bytes straight, then the rest."""
        paths = []
        if straight_bytes:
            paths.append(Path(t.source, t.target, 0, straight_bytes))
        start = straight_bytes
        while start < t.nbytes:
            exit_rank = self._relay(t.source, sends=True)
            entry_rank = self._relay(t.target, sends=False)
            room = min(self._room[True, exit_rank], self._room[False, entry_rank])
            stop = min(t.nbytes, start + max(room, self._least, 1))
            self._room[True, exit_rank] -= stop - start
            self._room[False, entry_rank] -= stop - start
            paths.append(Path(exit_rank, entry_rank, start, stop))
            start = stop
        return tuple(paths)

    def _relay(self, end: int, *, sends: bool) -> int:
        """Return the rank over whose NIC more of a transfer goes: its source (`sends`) or target
        `end` while its own NIC has room, else the one with the most room."""
        if self._room[sends, end] > self._least:
            return end
        first = self._links.node(end) * self._links.ranks_per_node
        ranks = range(first, first + self._links.ranks_per_node)
        may = [rank for rank in ranks if rank == end or rank in self._relays]
        return max(may, key=lambda rank: self._room[sends, rank])


def _level(crossing: Sequence[Transfer], links: NicFigures) -> int:
    """Return the least bytes that the busiest NIC can carry, if transfers may be cut anywhere."""
    node_loads: dict[tuple[bool, int], int] = defaultdict(int)
    for t in crossing:
        node_loads[True, links.node(t.source)] += t.nbytes
        node_loads[False, links.node(t.target)] += t.nbytes
    return -(-max(node_loads.values()) // links.ranks_per_node)  # rounded up


def _nic_loads(paths: Paths) -> Loads:
    """Return the bytes that each NIC sends and receives."""
    loads: Loads = defaultdict(int)
    for _, found in paths:
        for path in found:
            loads[True, path.exit_rank] += path.nbytes
            loads[False, path.entry_rank] += path.nbytes
    return loads


def _leg_seconds(paths: Paths, links: NicFigures) -> tuple[float, float, float]:
    """Return the seconds that scatter, cross and gather take, each if it ran alone.

    Inside a node a leg waits for the rank that sends or receives most, between nodes for the
    busiest NIC.
    """
    scatter: Loads = defaultdict(int)
    gather: Loads = defaultdict(int)
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
        max(_nic_loads(paths).values()) * links.across_s,
        max(gather.values(), default=0) * links.inside_s,
    )


def _pipelined(legs: tuple[float, float, float], packets: int) -> float:
    """Return the seconds of the legs when `packets` packets follow each other through them.

    The first packet goes through all legs, the others follow at the pace of the slowest leg. Each
    of these rounds takes the latency of a transfer.
    """
    first = sum(legs) / packets
    others = max(legs) * (packets - 1) / packets
    rounds = packets - 1 + sum(seconds > 0 for seconds in legs)
    return first + others + rounds * TRANSFER_S
