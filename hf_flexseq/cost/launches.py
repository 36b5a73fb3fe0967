"""What the host does for the attention of a group in one layer, forward and backward, counted.

A GPU computes nothing that its host has not launched before, and ranks exchange nothing that their
hosts have not posted. None of that depends on the number of tokens, so it decides for short
sequences: a zigzag of eight ranks has 17 attention calls and 16 posts where Ulysses has 2 and 4.

    turn      an attention call, forward or backward
    launch    an operation on the device: the turns, and the gathers, merges and sums around them
    post      messages that one call hands over to the transport, whatever their number
    message   a send or a receive

The counts are those of the busiest rank of d, which are w on each of n nodes, when the sequences
of the group lie one way round and are short enough for a turn of a ring to be one call:

                 turns      other launches    messages
    local        2          0                 0
    ulysses      2 p        2 + 4 p           8 p (d - 1)
    zigzag       2 d + 1    10 + 4 d          6 (d - 1)
    balanced     2 d/2 + 3  12 + 5 d/2        3 d/2 + 8 (d - 1)/2
    allgather    2          9 + d             6 (d - 1)
      on nodes   2          9 + 2 w + n       12 w + 6 n - 18
    hybrid       2 n + 1    24 + 4 n          8 (w - 1) + 6 (n - 1)

with p pieces of heads (and one launch more where there are several), two launches fewer of an
all-gather on two nodes, and halves rounded down. Posts
are 4 p for Ulysses, 3 for an all-gather and 2 d for a zigzag, on a single node; `_ring_posts`
counts those of a ring on any. A post is counted once for each lane that it takes, inside nodes and
between them, as on ordered transports. tests/cost/test_launches.py holds all of it to the programs
that ranks run (`hf_flexseq/program`).

Left out: turns that are so short that several are joined (`program/turns.py`), for which these are
too many; sequences that lie both ways round, or are cut into long chunks, which up to double the
turns of a ring; and heads that the ranks do not divide, which are repeated for the kernel.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

# Launches beside the turns: counts of the programs, which change with them.
ULYSSES_LAUNCHES = 6  # heads in one piece
ULYSSES_PIECE_LAUNCHES = 4  # every further piece
ULYSSES_PIECES_LAUNCHES = 1  # where there are several
ZIGZAG_LAUNCHES = 10
ZIGZAG_RANK_LAUNCHES = 4  # for each rank of the group
BALANCED_LAUNCHES = 12
BALANCED_PAIR_LAUNCHES = 5  # for each two ranks of the group
GATHER_LAUNCHES = 9
GATHER_TWO_NODES_LAUNCHES = -2  # one copy serves both legs
HYBRID_LAUNCHES = 24
HYBRID_NODE_LAUNCHES = 4

# A ring fetches what a turn reads so many turns before the one ahead of it (`program/ring.py`).
RING_AHEAD = 2

# No count of a strategy exceeds so many for each rank of the group.
MOST_PER_RANK = 32

EXCHANGES = 4  # of Ulysses: to heads and back, forward and backward
RING_PASSES = 3  # keys and values forward and backward, and their gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """What the host of one rank does for a group's attention in one layer."""

    turns: int
    """Attention calls."""
    launches: int
    """Operations on the device, the attention calls among them."""
    posts: int
    """Calls that hand messages over to the transport."""
    messages: int
    """Sends and receives."""


def layer_work(strategy: str, degree: int, *, nodes: int = 1, pieces: int = 1) -> LayerWork:
    """Return what a rank of a group of `degree` ranks does in one layer, forward and backward.

    nodes: that the group spans, with equally many ranks on each. pieces: that the heads come in,
    for Ulysses. Raises ValueError for an unknown strategy.
    """
    if strategy == "local":
        return LayerWork(turns=2, launches=2, posts=0, messages=0)
    if strategy == "ulysses":
        return _ulysses(degree, nodes, pieces)
    if strategy == "zigzag":
        return _zigzag(degree, nodes)
    if strategy == "balanced":
        return _balanced(degree, nodes)
    if strategy == "allgather":
        return _allgather(degree, nodes)
    if strategy == "hybrid":
        return _hybrid(degree, nodes)
    raise ValueError(f"strategy {strategy!r} has no counted launches")


def _ulysses(degree: int, nodes: int, pieces: int) -> LayerWork:
    turns = 2 * pieces
    launches = turns + ULYSSES_LAUNCHES + ULYSSES_PIECE_LAUNCHES * (pieces - 1)
    if pieces > 1:
        launches += ULYSSES_PIECES_LAUNCHES
    # A rank alone on its node has peers on the lane between nodes only.
    lanes = 2 if 1 < nodes < degree else 1
    return LayerWork(
        turns=turns,
        launches=launches,
        posts=EXCHANGES * pieces * lanes,
        messages=2 * EXCHANGES * pieces * (degree - 1),
    )


def _zigzag(degree: int, nodes: int) -> LayerWork:
    turns = degree + (degree + 1)  # the backward cuts one in two, for gradients to travel under
    return LayerWork(
        turns=turns,
        launches=turns + ZIGZAG_LAUNCHES + ZIGZAG_RANK_LAUNCHES * degree,
        posts=_ring_posts("zigzag", degree, nodes),
        messages=2 * RING_PASSES * (degree - 1),
    )


def _balanced(degree: int, nodes: int) -> LayerWork:
    fetches = degree // 2  # of keys and values
    helps = (degree - 1) // 2  # calls in another rank's place
    turns = (fetches + 1) + (fetches + 2)
    return LayerWork(
        turns=turns,
        launches=turns + BALANCED_LAUNCHES + BALANCED_PAIR_LAUNCHES * degree // 2,
        posts=_ring_posts("balanced", degree, nodes),
        # There and back: three tensors in the forward, five in the backward.
        messages=RING_PASSES * fetches + 8 * helps,
    )


def _allgather(degree: int, nodes: int) -> LayerWork:
    turns = 2
    launches = turns + GATHER_LAUNCHES
    if nodes == 1:
        launches += degree
        posts = RING_PASSES
        messages = 2 * RING_PASSES * (degree - 1)
    else:
        launches += 2 * (degree // nodes) + nodes
        if nodes == 2:
            launches += GATHER_TWO_NODES_LAUNCHES
        posts = 3 * RING_PASSES  # three legs
        messages = 12 * (degree // nodes) + 6 * nodes - 18
    return LayerWork(turns=turns, launches=launches, posts=posts, messages=messages)


def _hybrid(degree: int, nodes: int) -> LayerWork:
    width = degree // nodes
    turns = nodes + (nodes + 1)
    posts = EXCHANGES if width > 1 else 0
    if nodes > 1:
        posts += _ring_posts("zigzag", nodes, nodes)
    return LayerWork(
        turns=turns,
        launches=turns + HYBRID_LAUNCHES + HYBRID_NODE_LAUNCHES * nodes,
        posts=posts,
        messages=2 * EXCHANGES * (width - 1) + 2 * RING_PASSES * (nodes - 1),
    )


# ---- posts of a ring


@functools.lru_cache(maxsize=1024)
def _ring_posts(strategy: str, degree: int, nodes: int) -> int:
    """Return the posts of the busiest rank of a ring, forward and backward, by lane."""
    width = degree // nodes
    return max(_posts_of_rank(strategy, degree, width, index) for index in _places(degree, width))


def _places(degree: int, width: int) -> Iterable[int]:
    """Return the indices of a few ranks of which one is the busiest: the first and the last rank
    of the first node, of one in the middle and of the last."""
    middle = degree // width // 2 * width
    places = set()
    for first in (0, middle, degree - width):
        places |= {first, first + width - 1}
    return sorted(places)


def _posts_of_rank(strategy: str, degree: int, width: int, index: int) -> int:
    """Return the posts of one rank of a ring with `width` ranks on a node."""
    turns = degree - 1 if strategy == "zigzag" else degree // 2
    fetched = [_peers(strategy, degree, index, t, helps=None) for t in range(turns + 1)]
    helped = [_peers(strategy, degree, index, t, helps=True) for t in range(turns + 1)]
    nothing: set[int] = set()

    def at(peers: list[set[int]], turn: int) -> set[int]:
        return peers[turn] if 0 < turn <= turns else nothing

    # 1. forward: the first fetches, and with each turn's help the fetch that is due
    posts = [at(fetched, turn) for turn in range(1, RING_AHEAD + 1)]
    for turn in range(turns + 1):
        posts.append(at(helped, turn) | at(fetched, turn + RING_AHEAD + 1))
    # 2. backward: the first two posts, and with each turn's gradients the fetch that is due
    posts.append(at(fetched, 1))
    posts.append(at(fetched, 2) | at(fetched, 3))
    for turn in range(1, turns + 1):
        posts.append(at(fetched, turn) | at(fetched, turn + RING_AHEAD + 1))
    # 3. a post takes a lane for the ranks of the same node, and one for all others
    node = index // width
    return sum(len({peer // width == node for peer in peers}) for peers in posts)


def _peers(strategy: str, degree: int, index: int, turn: int, *, helps: bool | None) -> set[int]:
    """Return the ranks with which a rank exchanges something about a turn of a ring.

    helps: True for calls in another rank's place alone; None for all calls.
    """
    before = (index - turn) % degree  # whose keys or queries this rank reads
    after = (index + turn) % degree  # who reads keys or queries of this one
    if strategy == "zigzag":
        return set() if helps else {before, after}
    half_way = 2 * turn == degree  # where nobody helps
    peers = set()
    if index < turn:
        if not half_way:
            peers.add(before)
    elif not helps:
        peers.add(before)
    if index + turn >= degree:
        if not half_way:
            peers.add(after)
    elif not helps:
        peers.add(after)
    return peers
