"""Units: rows of a step that begin with the same tokens, as trees whose nodes are held once.

    row 0    a b c d e        node 0  a b c      row 0 ends in node 1
    row 1    a b c f g h      node 1  d e        row 1 ends in node 2
                              node 2  f g h

A unit is planned, cut and held as one sequence: its tokens are its nodes' tokens, node after node,
depth first. So the descendants of a node follow it directly. The *path* of a node is the node with
all nodes above it, and positions count along the path. A row is a path through the unit.
"""

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.values import MAX_TOKENS, items, quoted, wholes

ROOT = -1  # the parent of the first node


class Node(NamedTuple):
    """Consecutive tokens that the same rows go through."""

    parent: int
    """Index of the node before it on the path; `ROOT` for the first one."""
    tokens: int


class Unit(NamedTuple):
    """Rows that share prefixes. Its id among the sequences of a plan is its first row."""

    nodes: tuple[Node, ...]
    """Depth first."""
    rows: tuple[tuple[int, int], ...]
    """(row, index of its last node), by ascending row."""

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> "Unit":
        """Return the unit of pairs (parent, tokens) and (row, last node)."""
        return cls(
            nodes=tuple(Node(parent, tokens) for parent, tokens in nodes),
            rows=tuple((row, node) for row, node in rows),
        )

    @property
    def sequence(self) -> int:
        """Id of the unit among the sequences of a plan."""
        return self.rows[0][0]

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return sum(node.tokens for node in self.nodes)

    @property
    def layout(self) -> "UnitLayout":
        """Places of its nodes."""
        return layout_of(self.nodes)

    @property
    def attended(self) -> "UnitLayout":
        """Places of its nodes where nodes that do not branch are joined with their child: to
        attention, and to a recurrence, it does not matter if a row ends inside of another one."""
        return layout_of(without_single_children(self.nodes))

    def row_tokens(self) -> dict[int, int]:
        """Return the tokens of each row."""
        ends = self.layout.ends
        return {row: ends[node] for row, node in self.rows}

    def check(self) -> None:
        """Raise ValueError unless nodes are depth first and have tokens, every leaf ends a row,
        and rows ascend."""
        if not self.nodes or not self.rows:
            raise ValueError(f"a unit needs nodes and rows, got {quoted(self)}")
        path: list[int] = []
        for index, node in enumerate(self.nodes):
            while path and path[-1] != node.parent:
                path.pop()
            if bool(path) != bool(index) or (not index and node.parent != ROOT):
                raise ValueError(f"node {index} of a unit has the parent {quoted(node.parent)}")
            if node.tokens < 1:
                raise ValueError(f"node {index} of a unit has {quoted(node.tokens)} tokens")
            path.append(index)
        ids = [row for row, _ in self.rows]
        if ids != sorted(set(ids)):
            raise ValueError(f"the rows of a unit must ascend, got {quoted(ids)}")
        lasts = {node for _, node in self.rows}
        leaves = set(range(len(self.nodes))) - {node.parent for node in self.nodes}
        if not leaves <= lasts or not lasts <= set(range(len(self.nodes))):
            raise ValueError(f"rows end in the nodes {quoted(sorted(lasts))} of a unit")

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"nodes": [list(node) for node in self.nodes], "rows": [list(r) for r in self.rows]}

    @classmethod
    def from_record(cls, record: Any) -> "Unit":
        """Inverse of `to_record`. Raises ValueError for any other record."""
        if not isinstance(record, dict) or set(record) != {"nodes", "rows"}:
            raise ValueError(f"{quoted(record)} is not a unit: expected the keys nodes, rows")
        nodes = [
            wholes("nodes", pair, least=ROOT, most=MAX_TOKENS)
            for pair in items("nodes", record["nodes"])
        ]
        rows = [wholes("rows", pair, most=MAX_TOKENS) for pair in items("rows", record["rows"])]
        if any(len(pair) != 2 for pair in (*nodes, *rows)):
            raise ValueError("nodes and rows of a unit are pairs")
        unit = cls.of(nodes, rows)
        unit.check()
        return unit


class NodeTokens(NamedTuple):
    """Tokens [start, stop) of a unit that are in one node."""

    node: int
    start: int
    stop: int


class UnitLayout:
    """Where the nodes of a unit stand."""

    __slots__ = ("before", "depths", "ends", "nodes", "starts", "stops", "subtree_stops")

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.stops = tuple(accumulate(node.tokens for node in nodes))
        """Token of the unit after each node."""
        self.starts = tuple(
            stop - node.tokens for node, stop in zip(nodes, self.stops, strict=True)
        )
        before: list[int] = []
        depths: list[int] = []
        for node in nodes:
            is_first = node.parent == ROOT
            before.append(0 if is_first else before[node.parent] + nodes[node.parent].tokens)
            depths.append(0 if is_first else depths[node.parent] + 1)
        self.before = tuple(before)
        """Tokens of the path before each node."""
        self.depths = tuple(depths)
        self.ends = tuple(b + node.tokens for b, node in zip(before, nodes, strict=True))
        """Tokens of the path up to the end of each node."""
        subtree_stops = list(self.stops)
        for index in range(len(nodes) - 1, 0, -1):
            parent = nodes[index].parent
            subtree_stops[parent] = max(subtree_stops[parent], subtree_stops[index])
        self.subtree_stops = tuple(subtree_stops)
        """Token of the unit after the last descendant of each node."""

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first one to `node`."""
        path = [node]
        while self.nodes[path[-1]].parent != ROOT:
            path.append(self.nodes[path[-1]].parent)
        return path[::-1]

    def pieces(self, first: int, stop: int) -> Iterator[NodeTokens]:
        """Yield the parts of tokens [first, stop) by node."""
        for node, (low, high) in enumerate(zip(self.starts, self.stops, strict=True)):
            low, high = max(low, first), min(high, stop)
            if low < high:
                yield NodeTokens(node, low, high)

    def pairs(self, reach: Reach = FULL) -> int:
        """Return the number of (query, key) pairs."""
        pairs = 0
        for before, end in zip(self.before, self.ends, strict=True):
            pairs += reach.pairs(end) - reach.pairs(before)
        return pairs


@functools.lru_cache(maxsize=1024)
def layout_of(nodes: tuple[Node, ...]) -> UnitLayout:
    """Return the places of nodes, which are found once."""
    return UnitLayout(nodes)


@functools.lru_cache(maxsize=1024)
def without_single_children(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return nodes in which every node has several children or none: the same tokens."""
    return joined(nodes, range(len(nodes)), ends=())[0]


def joined(
    nodes: Sequence[Node], kept: Sequence[int], ends: Collection[int]
) -> tuple[tuple[Node, ...], dict[int, int]]:
    """Return some nodes of a unit, of which those with one child left are one with it; and the
    place of each kept node among the new ones.

    kept: ascending, with all nodes above each. ends: nodes that are not joined with their child.
    """
    children = Counter(nodes[node].parent for node in kept)
    made: list[Node] = []
    places = {ROOT: ROOT}
    for node in kept:
        parent, tokens = nodes[node]
        if parent != ROOT and children[parent] == 1 and parent not in ends:
            place = places[parent]
            made[place] = made[place]._replace(tokens=made[place].tokens + tokens)
        else:
            place = len(made)
            made.append(Node(places[parent], tokens))
        places[node] = place
    return tuple(made), places
