"""Zeppelin's hierarchical partition (arXiv 2509.21841): every sequence in one of three zones.

1. Nodes (`_over_nodes`). Longest first, a sequence of more tokens than a node holds is split over
   the narrowest range of whole nodes with room, which share it equally: the inter-node zone. Every
   other sequence goes to the node with the fewest tokens.
2. Ranks of a node (`_over_ranks`). A sequence longer than a rank's memory, or with more quadratic
   work than the node's ranks have on average, is split over the narrowest range of ranks that
   brings it below both: the intra-node zone. Every other one goes to the rank with the least
   quadratic work: the local zone.
3. Memory (`_partitioned`). Where something does not fit, more of the longest sequences are split:
   one, two, four, ... and at last all of them.
4. Order (`_micro_batch`). Zones are groups, and widest first is the published order of execution:
   inter-node, intra-node, local. Split sequences use a ring where the cost model knows one
   (`zigzag`), else Ulysses.

Added: a step that does not fit one micro-batch is cut by `blaster.py`, into as few as can be
placed; step 3 is ours, too. Changed: split ranges are the binary tree's of `blocks.py`, so that
groups are laminar. Left out here: routing over several NICs and remapping, which are passes
(`passes.py`).

tests/published/test_baselines.py checks the zones on small examples.
"""

from collections.abc import Callable, Iterator

from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner.blocks import tree_ranges
from hf_flexseq.planner.task import PlanTask
from hf_flexseq.published.blaster import blast

Zone = tuple[int, int]
"""The ranks of a zone: the first one, and one past the last."""


def zeppelin_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of Zeppelin's partition."""
    names = task.cost.strategies(task.strategy)
    if "zigzag" in names or not names:
        split_name = "zigzag"
    else:
        split_name = names[0]
    batches = -(-sum(task.lengths) // (task.cap * task.topology.world_size))
    while True:
        micro_batches = []
        for ids in blast(task.lengths, batches):
            partition = _partitioned(ids, task)
            if partition is None:
                break
            micro_batches.append(_micro_batch(partition, split_name))
        else:
            return tuple(micro_batches)
        batches += 1  # a sequence alone in its micro-batch always fits


def _micro_batch(partition: list[tuple[int, Zone]], split_name: str) -> MicroBatch:
    """Return the groups of a partition (id, zone) of sequences; split ones use `split_name`."""
    zone2ids: dict[Zone, list[int]] = {}
    for i, zone in partition:
        zone2ids.setdefault(zone, []).append(i)
    groups = []
    for zone, ids in sorted(zone2ids.items()):
        strategy = "local" if _width(zone) == 1 else split_name
        ranks = tuple(range(*zone))
        groups.append(Group(ranks=ranks, sequences=tuple(sorted(ids)), strategy=strategy))
    return MicroBatch(groups=widest_first(groups))


def _partitioned(ids: list[int], task: PlanTask) -> list[tuple[int, Zone]] | None:
    """Return the (id, zone) of each sequence, or None if they do not fit. ids: longest first."""
    for extra in _more_and_more(len(ids), split=task.strategy != "local"):
        partition = _Partition(task)
        if partition.run(ids, extra):
            return partition.zones_of_ids
    return None


def _more_and_more(count: int, *, split: bool) -> Iterator[int]:
    """Yield how many of `count` sequences are split although they need not be: 0, 1, 2, 4, ...,
    all.

    Only 0 where none may be split.
    """
    yield 0
    extra = 1
    while split and extra < 2 * count:
        yield min(extra, count)
        extra *= 2


def _width(zone: Zone) -> int:
    """Return how many ranks a zone has."""
    start, stop = zone
    return stop - start


class _Partition:
    """Tokens and quadratic work of every rank while one micro-batch is partitioned."""

    def __init__(self, task: PlanTask) -> None:
        topology = task.topology
        self.lengths = task.lengths
        self.topology = topology
        self.split = task.strategy != "local"  # whether a sequence may be split for its work alone
        self.cap = task.cap  # tokens of a rank
        self.tokens = [0] * topology.world_size  # of each rank
        self.work = [0] * topology.world_size  # squared tokens of each rank
        # Zones that a sequence may take, narrow ones first: of whole nodes, and inside a node.
        zones = sorted(tree_ranges(topology), key=lambda zone: (_width(zone), zone))
        self.across_nodes = [zone for zone in zones if topology.spans_nodes(*zone)]
        self.inside_nodes = [zone for zone in zones if not topology.spans_nodes(*zone)]
        self.zones_of_ids: list[tuple[int, Zone]] = []  # the result: (id, zone)

    def run(self, ids: list[int], extra: int) -> bool:
        """Put all sequences on zones, into `zones_of_ids`; False when one does not fit.

        The first `extra` sequences are split over nodes, or over ranks if there is one node.
        """
        node = self.topology.ranks_per_node
        ids_of_nodes = self._over_nodes(ids, extra if self.across_nodes else 0)
        if ids_of_nodes is None:
            return False
        for index, node_ids in enumerate(ids_of_nodes):
            ranks = (index * node, (index + 1) * node)
            if not self._over_ranks(node_ids, ranks, extra):
                return False
        return True

    # ---- step 1

    def _over_nodes(self, ids: list[int], extra: int) -> list[list[int]] | None:
        """Split sequences that no node holds; return the other ids of each node, None without
        room."""
        node = self.topology.ranks_per_node
        ids_of_nodes: list[list[int]] = [[] for _ in range(self.topology.nodes)]
        tokens_of_nodes = [0] * self.topology.nodes  # without those of split sequences
        for position, i in enumerate(ids):
            length = self.lengths[i]
            # 1. The inter-node zone.
            if position < extra or length > node * self.cap:
                if not self._split(i, self.across_nodes, most_work=None):
                    return None
                continue
            # 2. The node with the fewest tokens. Split sequences have as many on each of its
            #    ranks.
            best = None
            fewest = 0
            for index, tokens in enumerate(tokens_of_nodes):
                tokens_then = tokens + self.tokens[index * node] * node
                if best is None or tokens_then < fewest:
                    best = index
                    fewest = tokens_then
            assert best is not None, "a topology has a node"
            if fewest + length > self.cap * node:
                return None
            ids_of_nodes[best].append(i)
            tokens_of_nodes[best] += length
        return ids_of_nodes

    # ---- step 2

    def _over_ranks(self, ids: list[int], node: Zone, extra: int) -> bool:
        """Put a node's sequences on its ranks; False when one does not fit."""
        mean_work = sum(self.lengths[i] ** 2 for i in ids) // _width(node)
        zones = [zone for zone in self.inside_nodes if node[0] <= zone[0] and zone[1] <= node[1]]
        single_ranks = [zone for zone in zones if _width(zone) == 1]
        several_ranks = [zone for zone in zones if _width(zone) > 1]
        for position, i in enumerate(ids):
            length = self.lengths[i]
            too_much_work = self.split and len(zones) > 1 and length**2 > mean_work
            if too_much_work or position < extra or length > self.cap:
                fits = self._split(i, several_ranks, most_work=mean_work)
            else:
                fits = self._take(i, min(single_ranks, key=self._preference(i)))
            if not fits:
                return False
        return True

    # ---- one sequence

    def _split(self, i: int, zones: list[Zone], *, most_work: int | None) -> bool:
        """Put a sequence on the narrowest of `zones` with room that keeps its work small.

        most_work: squared tokens that it may bring to a rank, None for any. Where no zone is that
        wide, the widest with room is taken; of equal ones the least loaded. False when none has
        room.
        """
        with_room = [zone for zone in zones if self._fits(i, zone)]
        if not with_room:
            return False
        work = self.lengths[i] ** 2
        width = _width(with_room[-1])
        for zone in with_room:
            if most_work is None or work <= most_work * _width(zone):
                width = _width(zone)
                break
        equally_wide = [zone for zone in with_room if _width(zone) == width]
        return self._take(i, min(equally_wide, key=self._preference(i)))

    def _fits(self, i: int, zone: Zone) -> bool:
        """Return whether all ranks of a zone have memory for their share of a sequence."""
        start, stop = zone
        return max(self.tokens[start:stop]) + self._share(i, zone) <= self.cap

    def _share(self, i: int, zone: Zone) -> int:
        """Return the tokens of a sequence on each rank of a zone."""
        return -(-self.lengths[i] // _width(zone))

    def _preference(self, i: int) -> Callable[[Zone], tuple[bool, int, int]]:
        """Return a key that prefers zones with room, then those with the least quadratic work."""

        def key(zone: Zone) -> tuple[bool, int, int]:
            start, stop = zone
            return not self._fits(i, zone), max(self.work[start:stop]), start

        return key

    def _take(self, i: int, zone: Zone) -> bool:
        """Put a sequence on a zone; False when it has no room."""
        if not self._fits(i, zone):
            return False
        share = self._share(i, zone)
        for rank in range(*zone):
            self.tokens[rank] += share
            self.work[rank] += self.lengths[i] ** 2 // _width(zone)
        self.zones_of_ids.append((i, zone))
        return True
