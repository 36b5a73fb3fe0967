"""Zeppelin's hierarchical partition (arXiv 2509.21841): every sequence in one of three zones.

1. Nodes. Longest first, a sequence of more tokens than a node holds is split over the narrowest
   range of whole nodes with room, charged to them equally (inter-node zone); every other one goes
   to the node with the fewest tokens.
2. Ranks of a node. A sequence longer than a rank's memory, or with more quadratic work than the
   node's ranks have on average, is split over the narrowest range that brings it below both
   (intra-node zone); every other one goes to the rank with the least quadratic work (local zone).
3. Where something does not fit, more of the longest sequences are split: one, two, four, ... and
   at last all of them.
4. Zones are groups; widest first is the published order of execution, inter-node, intra-node,
   local. Split sequences use a ring where the cost model knows one (`zigzag`), else Ulysses.

A step that does not fit one micro-batch is cut by `blaster.py`, into as few as can be placed.
Split ranges are the binary tree's of `blocks.py`, so that groups are laminar. The published system
also moves tokens between attention and linear layers: `remap.py` decides that afterwards.
"""

from collections.abc import Callable, Iterator, Sequence

from hf_flexseq.cost import CostModel
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner.blocks import tree_ranges
from hf_flexseq.planner.published.blaster import blast
from hf_flexseq.topology import Topology

Zone = tuple[int, int]  # first rank, one past the last


def zeppelin_micro_batches(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, strategy: str, cap: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches of that partition. Every sequence must fit on all ranks together."""
    batches = -(-sum(lengths) // (cap * topology.world_size))
    while True:
        made = [
            _partitioned(piece, lengths, topology, split=strategy != "local", cap=cap)
            for piece in blast(lengths, batches)
        ]
        if all(made):
            break
        batches += 1  # a sequence alone in its micro-batch always fits
    names = cost.strategies(strategy)
    name = "zigzag" if "zigzag" in names or not names else names[0]
    return tuple(_micro_batch(placed, name) for placed in made if placed)


def _micro_batch(placed: list[tuple[int, Zone]], split: str) -> MicroBatch:
    zones: dict[Zone, list[int]] = {}
    for i, zone in placed:
        zones.setdefault(zone, []).append(i)
    groups = [
        Group(
            ranks=tuple(range(*zone)),
            sequences=tuple(sorted(ids)),
            strategy="local" if zone[1] - zone[0] == 1 else split,
        )
        for zone, ids in sorted(zones.items())
    ]
    return MicroBatch(groups=widest_first(groups))


def _partitioned(
    piece: list[int], lengths: Sequence[int], topology: Topology, *, split: bool, cap: int
) -> list[tuple[int, Zone]] | None:
    """(id, zone) of each sequence of a micro-batch, which fall in length; None when they do not
    fit."""
    for extra in _more_and_more(len(piece), split):
        placed = _Partition(lengths, topology, split=split, cap=cap).run(piece, extra)
        if placed:
            return placed
    return None


def _more_and_more(count: int, split: bool) -> Iterator[int]:
    """How many of `count` sequences are split although they need not be: 0, 1, 2, 4, ..., all."""
    yield 0
    extra = 1
    while split and extra < 2 * count:
        yield min(extra, count)
        extra *= 2


class _Partition:
    """Tokens and quadratic work of every rank while one micro-batch is partitioned."""

    def __init__(
        self, lengths: Sequence[int], topology: Topology, *, split: bool, cap: int
    ) -> None:
        self.lengths, self.topology, self.split, self.cap = lengths, topology, split, cap
        self.tokens = [0] * topology.world_size
        self.work = [0] * topology.world_size
        zones = sorted(tree_ranges(topology), key=lambda zone: (zone[1] - zone[0], zone))
        self.across = [zone for zone in zones if topology.spans_nodes(*zone)]
        self.inside = [zone for zone in zones if not topology.spans_nodes(*zone)]
        self.placed: list[tuple[int, Zone]] = []

    def run(self, piece: list[int], extra: int) -> list[tuple[int, Zone]] | None:
        """The whole partition, the first `extra` sequences split over nodes, or over ranks if
        there is one node."""
        node, own = (
            self.topology.ranks_per_node,
            self._over_nodes(piece, extra if self.across else 0),
        )
        if own is None:
            return None
        for index, ids in enumerate(own):
            if not self._over_ranks(ids, (index * node, (index + 1) * node), extra):
                return None
        return self.placed

    def _over_nodes(self, piece: list[int], extra: int) -> list[list[int]] | None:
        """Split what no node holds, and share out the rest: the ids of each node."""
        node, own = self.topology.ranks_per_node, [list[int]() for _ in range(self.topology.nodes)]
        held = [0] * self.topology.nodes
        for position, i in enumerate(piece):
            if position < extra or self.lengths[i] > node * self.cap:
                if not self._split(i, self.across, most_work=None):
                    return None
                continue
            home = min(range(len(own)), key=lambda n: (held[n] + self.tokens[n * node] * node, n))
            if held[home] + self.lengths[i] > (self.cap - self.tokens[home * node]) * node:
                return None
            own[home].append(i)
            held[home] += self.lengths[i]
        return own

    def _over_ranks(self, ids: list[int], zone: Zone, extra: int) -> bool:
        """Place a node's own sequences on its ranks."""
        mean = sum(self.lengths[i] ** 2 for i in ids) // (zone[1] - zone[0])
        inside = [z for z in self.inside if zone[0] <= z[0] and z[1] <= zone[1]]
        for position, i in enumerate(ids):
            length = self.lengths[i]
            heavy = self.split and len(inside) > 1 and length**2 > mean
            if heavy or position < extra or length > self.cap:
                done = self._split(i, [z for z in inside if z[1] - z[0] > 1], most_work=mean)
            else:
                done = self._take(
                    i, min((z for z in inside if z[1] - z[0] == 1), key=self._load(i))
                )
            if not done:
                return False
        return True

    def _split(self, i: int, zones: list[Zone], *, most_work: int | None) -> bool:
        """Put a sequence on the narrowest of `zones` with room where it brings no more work than
        `most_work`, or else on the widest with room; of equal ones on the least loaded."""
        roomy = [zone for zone in zones if self._fits(i, zone)]
        light = [
            z
            for z in roomy
            if most_work is None or self.lengths[i] ** 2 <= most_work * (z[1] - z[0])
        ]
        if not roomy:
            return False
        width = light[0][1] - light[0][0] if light else roomy[-1][1] - roomy[-1][0]
        return self._take(i, min((z for z in roomy if z[1] - z[0] == width), key=self._load(i)))

    def _fits(self, i: int, zone: Zone) -> bool:
        return max(self.tokens[zone[0] : zone[1]]) + self._share(i, zone) <= self.cap

    def _share(self, i: int, zone: Zone) -> int:
        return -(-self.lengths[i] // (zone[1] - zone[0]))

    def _load(self, i: int) -> Callable[[Zone], tuple[bool, int, int]]:
        """Zones in the order in which a sequence prefers them: with room, then least quadratic
        work."""
        return lambda zone: (not self._fits(i, zone), max(self.work[zone[0] : zone[1]]), zone[0])

    def _take(self, i: int, zone: Zone) -> bool:
        """Put a sequence on a zone. False when it has no room."""
        if not self._fits(i, zone):
            return False
        share = self._share(i, zone)
        for rank in range(*zone):
            self.tokens[rank] += share
            self.work[rank] += self.lengths[i] ** 2 // (zone[1] - zone[0])
        self.placed.append((i, zone))
        return True
