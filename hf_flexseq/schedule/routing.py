"""Which transfers between nodes go over whose NICs: the routing layer of Zeppelin (arXiv
2509.21841).

Every rank sends to other nodes over one NIC. Where a few ranks have something to send and the
others have not, a transfer is split: pieces go to ranks of the source's node, from there over
their NICs to ranks of the target's node, and from those to the target (*legs*: scatter, cross,
gather). A step of a ring across nodes is such a case, for all of its ranks but a few read from a
rank beside them.

1. The *level* is the least that the busiest NIC can carry: the bytes that leave or enter a node,
   over its NICs.
2. What fits under the level goes straight from source to target.
3. The rest takes the NICs that have the most room left under it; it leaves (enters) by the
   source's (target's) own as long as that has any.
4. It pays if the legs, cut into `pieces` that follow each other through them, take less time than
   the busiest NIC would need otherwise. Where all NICs are equally busy nothing is above the
   level, and nothing is routed.

The paper splits every transfer evenly over all NICs, whose legs inside the nodes then carry nearly
all of it twice, and adds the legs up: it gains only if a byte takes more than twice as long
between nodes as inside one. That stays a condition; here less is moved, and legs overlap. All of
this is a function of bytes that all ranks know.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_flexseq.cost import CostModel
from hf_flexseq.topology import Topology

MOST_PIECES = 8
LEAST_GAIN = 0.1  # of the seconds: less is not worth the messages
LEAST_SHARE = 16  # a NIC takes at least a 16th of the level, so that a transfer is not crumbled

BUSY = "all NICs are busy"
Nic = tuple[int, int]  # (node, place of the NIC in it)


@dataclass(frozen=True, kw_only=True, slots=True)
class NicFigures:
    """What moves bytes between ranks.

    inside_s, across_s: seconds a byte takes between two ranks of a node, and over one NIC.
    transfer_s: seconds that a transfer takes beside its bytes.
    """

    ranks_per_node: int
    nics_per_node: int
    inside_s: float
    across_s: float
    transfer_s: float

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def nic(self, rank: int) -> Nic:
        node, place = divmod(rank, self.ranks_per_node)
        return node, place * self.nics_per_node // self.ranks_per_node

    def ranks_of(self, nic: Nic) -> list[int]:
        start = nic[0] * self.ranks_per_node
        return [
            rank for rank in range(start, start + self.ranks_per_node) if self.nic(rank) == nic
        ]

    def objection(self) -> str | None:
        """Why nothing is ever routed over these links; None when something may be."""
        if self.nics_per_node == 1:
            return "the ranks of a node share one NIC"
        if self.across_s <= 2 * self.inside_s:
            inside, across = (f"{s * 1e9:.3g} ns" for s in (self.inside_s, self.across_s))
            return (
                f"a byte takes {across} between nodes, not more than twice the {inside} inside one"
            )
        return None


def links_of(cost: CostModel, topology: Topology) -> NicFigures | None:
    """The links of several nodes as `cost` knows them: its bandwidth between nodes is a rank's
    when all of them send, so several ranks of a node may share a NIC of a multiple. None on one
    node."""
    if topology.nodes == 1:
        return None
    per_node = topology.ranks_per_node
    nics = min(cost.nics_per_node, per_node)
    return NicFigures(
        ranks_per_node=per_node,
        nics_per_node=nics,
        inside_s=1 / cost.bandwidth(per_node, False),
        across_s=nics / per_node / cost.bandwidth(topology.world_size, True),
        transfer_s=cost.transfer_s,
    )


class Transfer(NamedTuple):
    """`nbytes` that go from one rank to another."""

    source: int
    target: int
    nbytes: int


class Path(NamedTuple):
    """Bytes [start, stop) of a transfer: from the source to `leaves`, over its NIC to `enters`,
    and to the target."""

    leaves: int
    enters: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the transfers of one exchange travel.

    paths: of each transfer that does not go straight, in the order of the bytes. pieces: into how
    many pieces each path is cut. direct_s, routed_s: modelled seconds of the transfers between
    nodes, all straight and as routed. why_not: the reason why none is routed, or None.
    """

    paths: tuple[tuple[Transfer, tuple[Path, ...]], ...] = ()
    pieces: int = 1
    direct_s: float = 0.0
    routed_s: float = 0.0
    why_not: str | None = None


Paths = Sequence[tuple[Transfer, tuple[Path, ...]]]


@functools.lru_cache(maxsize=1024)
def make_routing(transfers: tuple[Transfer, ...], links: NicFigures) -> Routing:
    """How `transfers`, which run at the same time, travel over `links`."""
    crossing = [t for t in transfers if t.nbytes and links.node(t.source) != links.node(t.target)]
    if not crossing:
        return Routing(why_not="nothing crosses nodes")
    straight = [(t, (Path(t.source, t.target, 0, t.nbytes),)) for t in crossing]
    direct_s = _pipelined(_leg_seconds(straight, links), 1, links)
    if (objection := links.objection()) is not None:
        return Routing(direct_s=direct_s, routed_s=direct_s, why_not=objection)
    level = _level(crossing, links)
    if max(_nic_loads(straight, links).values()) <= level:
        return Routing(direct_s=direct_s, routed_s=direct_s, why_not=BUSY)
    paths = _Router(crossing, level, links).paths
    legs = _leg_seconds(paths, links)
    pieces = min(range(1, MOST_PIECES + 1), key=lambda n: _pipelined(legs, n, links))
    routed_s = _pipelined(legs, pieces, links)
    if routed_s > (1 - LEAST_GAIN) * direct_s:
        return Routing(
            direct_s=direct_s,
            routed_s=routed_s,
            why_not="the legs inside the nodes cost what it gains",
        )
    routed = tuple((t, found) for t, found in paths if len(found) > 1 or found[0][:2] != t[:2])
    return Routing(paths=routed, pieces=pieces, direct_s=direct_s, routed_s=routed_s)


class _Router:
    """Steps 2 and 3. paths: of every transfer. _room: bytes each NIC may still send (True) and
    receive (False). _passed: bytes that go through each rank on their way to or from another
    one."""

    def __init__(self, crossing: Sequence[Transfer], level: int, links: NicFigures) -> None:
        self._links, self._level = links, level
        self._room: dict[tuple[bool, Nic], int] = defaultdict(lambda: level)
        self._passed: dict[int, int] = defaultdict(int)
        fits = [self._straight(t) for t in crossing]
        self.paths = [
            (t, self._whole(t, stop) if stop == t.nbytes else self._around(t, stop))
            for t, stop in zip(crossing, fits, strict=True)
        ]

    def _straight(self, t: Transfer) -> int:
        """Bytes of a transfer that fit under the level of both its NICs."""
        ends = (True, self._links.nic(t.source)), (False, self._links.nic(t.target))
        fits = min(t.nbytes, *(self._room[end] for end in ends))
        for end in ends:
            self._room[end] -= fits
        return fits

    def _whole(self, t: Transfer, stop: int) -> tuple[Path, ...]:
        return (Path(t.source, t.target, 0, stop),)

    def _around(self, t: Transfer, start: int) -> tuple[Path, ...]:
        """The paths of a transfer of which bytes from `start` on do not fit on its own."""
        paths = list(self._whole(t, start)) if start else []
        while start < t.nbytes:
            leaves, room_out = self._relay(t.source, sends=True)
            enters, room_in = self._relay(t.target, sends=False)
            stop = min(
                t.nbytes, start + max(min(room_out, room_in), self._level // LEAST_SHARE, 1)
            )
            self._pass(leaves, t.source, stop - start, sends=True)
            self._pass(enters, t.target, stop - start, sends=False)
            paths.append(Path(leaves, enters, start, stop))
            start = stop
        return tuple(paths)

    def _relay(self, end: int, *, sends: bool) -> tuple[int, int]:
        """The rank over whose NIC more can go from (to) `end`, itself if its own has any room, and
        how much more."""
        node = self._links.node(end)
        own = self._room[sends, self._links.nic(end)]
        if own > self._level // LEAST_SHARE:
            return end, own
        nics = [(node, place) for place in range(self._links.nics_per_node)]
        nic = max(nics, key=lambda nic: (self._room[sends, nic], -nic[1]))
        rank = min(
            self._links.ranks_of(nic), key=lambda rank: (rank != end, self._passed[rank], rank)
        )
        return rank, self._room[sends, nic]

    def _pass(self, rank: int, end: int, nbytes: int, *, sends: bool) -> None:
        self._room[sends, self._links.nic(rank)] -= nbytes
        if rank != end:
            self._passed[rank] += nbytes


def _level(crossing: Sequence[Transfer], links: NicFigures) -> int:
    """The least that the busiest NIC can carry, if transfers may be cut anywhere."""
    node_loads: dict[tuple[bool, int], int] = defaultdict(int)
    for t in crossing:
        node_loads[True, links.node(t.source)] += t.nbytes
        node_loads[False, links.node(t.target)] += t.nbytes
    return -(-max(node_loads.values()) // links.nics_per_node)


def _nic_loads(paths: Paths, links: NicFigures) -> dict[tuple[bool, Nic], int]:
    """Bytes that each NIC sends (True) and receives (False)."""
    loads: dict[tuple[bool, Nic], int] = defaultdict(int)
    for _, found in paths:
        for path in found:
            loads[True, links.nic(path.leaves)] += path.stop - path.start
            loads[False, links.nic(path.enters)] += path.stop - path.start
    return loads


def _leg_seconds(paths: Paths, links: NicFigures) -> tuple[float, float, float]:
    """Seconds of each leg if it ran alone: of its busiest rank inside the nodes, of the busiest
    NIC between them."""
    inside: dict[tuple[int, bool, int], int] = defaultdict(int)
    for t, found in paths:
        for path in found:
            for leg, (source, target) in enumerate(
                ((t.source, path.leaves), (path.enters, t.target))
            ):
                if source != target:
                    inside[leg, True, source] += path.stop - path.start
                    inside[leg, False, target] += path.stop - path.start
    scatter, gather = (
        max((n for key, n in inside.items() if key[0] == leg), default=0) for leg in (0, 1)
    )
    across = max(_nic_loads(paths, links).values())
    return scatter * links.inside_s, across * links.across_s, gather * links.inside_s


def _pipelined(legs: tuple[float, float, float], pieces: int, links: NicFigures) -> float:
    """Seconds of the legs when `pieces` follow each other through them: the first one through all
    of them, the others at the pace of the slowest; and each of these turns takes a transfer's
    latency."""
    turns = pieces - 1 + sum(seconds > 0 for seconds in legs)
    return sum(legs) / pieces + max(legs) * (pieces - 1) / pieces + turns * links.transfer_s
