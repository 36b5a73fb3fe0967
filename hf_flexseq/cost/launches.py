"""What the host does for the attention of a group in one layer, forward and backward, counted.

A GPU computes nothing that its host has not launched before, and ranks exchange nothing that their
hosts have not posted. None of that depends on the number of tokens, so it decides for short
sequences: a zigzag of eight ranks has 17 attention calls and 21 posts where Ulysses has 2 and 4.

    turn      an attention call, forward or backward
    launch    an operation on the device: the turns, and the gathers, merges and sums around them
    post      messages that one call hands over to the transport, whatever their number
    message   a send or a receive

The counts are those of the busiest rank of d, which are w on each of n nodes, when the sequences
of the group lie one way round and are short enough for a turn of a ring to be one call:

                 turns      posts within a node    more across nodes  messages
    local        2          0                      -                  0
    ulysses      2 p        4 p                    4 p                8 p (d - 1)
    zigzag       2 d + 1    3 (d - 1)              6 (w - 1)          6 (d - 1)
    balanced     2 d/2 + 3  4 d/2, even d: 1 less  3 (w - 1)          3 d/2 + 8 (d - 1)/2
    allgather    2          3                      6                  6 (d - 1)
    hybrid       2 n + 1    4 + 3 (n - 1)          0                  8 (w - 1) + 6 (n - 1)

with p pieces of heads and halves rounded down; an all-gather across nodes sends 12 w + 9 n - 21
messages. A post is counted once for each lane that it takes,
inside nodes and between them, as on ordered transports. tests/cost/test_launches.py holds all of
it to what the executor does.

Left out: sequences that lie both ways round, or are cut into long chunks, which up to double the
turns of a ring; and heads that the ranks do not divide, which Ulysses gathers rank by rank.
"""

from dataclasses import dataclass

# Launches beside the turns: counts of the executor, which change with it.
# `scripts/benchmarks/host_time.py` prints what they are fitted to.
ULYSSES_LAUNCHES = 12  # heads in one piece
ULYSSES_PIECE_LAUNCHES = 19  # every further piece
ZIGZAG_LAUNCHES = 8
ZIGZAG_RANK_LAUNCHES = 8  # for each rank of the group
BALANCED_LAUNCHES = 10
BALANCED_RANK_LAUNCHES = 6
GATHER_LAUNCHES = 5
GATHER_RANK_LAUNCHES = 3
GATHER_ACROSS_LAUNCHES = -4  # the gather in legs, inside nodes and between them
GATHER_LEG_LAUNCHES = 6  # for each rank of a node, and for each node
HYBRID_LAUNCHES = 28
HYBRID_NODE_LAUNCHES = 8

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
    # A rank alone on its node has peers on the lane between nodes only.
    lanes = 2 if 1 < nodes < degree else 1
    return LayerWork(
        turns=turns,
        launches=turns + ULYSSES_LAUNCHES + ULYSSES_PIECE_LAUNCHES * (pieces - 1),
        posts=EXCHANGES * pieces * lanes,
        messages=2 * EXCHANGES * pieces * (degree - 1),
    )


def _zigzag(degree: int, nodes: int) -> LayerWork:
    turns = degree + (degree + 1)  # the backward cuts one in two, for gradients to travel under
    posts = degree - 1
    if nodes > 1:
        # One of the two peers is on the rank's own node.
        posts += 2 * (degree // nodes - 1)
    return LayerWork(
        turns=turns,
        launches=turns + ZIGZAG_LAUNCHES + ZIGZAG_RANK_LAUNCHES * degree,
        posts=RING_PASSES * posts,
        messages=2 * RING_PASSES * (degree - 1),
    )


def _balanced(degree: int, nodes: int) -> LayerWork:
    fetches = degree // 2  # of keys and values
    helps = (degree - 1) // 2  # calls in another rank's place
    turns = (fetches + 1) + (fetches + 2)
    posts = 4 * fetches
    if degree % 2 == 0:
        posts -= 1
    if nodes > 1:
        posts += RING_PASSES * (degree // nodes - 1)
    return LayerWork(
        turns=turns,
        launches=turns + BALANCED_LAUNCHES + BALANCED_RANK_LAUNCHES * degree,
        posts=posts,
        # There and back: three tensors in the forward, five in the backward.
        messages=RING_PASSES * fetches + 8 * helps,
    )


def _allgather(degree: int, nodes: int) -> LayerWork:
    turns = 2
    if nodes == 1:
        return LayerWork(
            turns=turns,
            launches=turns + GATHER_LAUNCHES + GATHER_RANK_LAUNCHES * degree,
            posts=RING_PASSES,
            messages=2 * RING_PASSES * (degree - 1),
        )
    width = degree // nodes
    return LayerWork(
        turns=turns,
        launches=turns + GATHER_ACROSS_LAUNCHES + GATHER_LEG_LAUNCHES * (width + nodes),
        posts=3 * RING_PASSES,  # three legs
        messages=12 * width + 9 * nodes - 21,
    )


def _hybrid(degree: int, nodes: int) -> LayerWork:
    width = degree // nodes
    turns = nodes + (nodes + 1)
    return LayerWork(
        turns=turns,
        launches=turns + HYBRID_LAUNCHES + HYBRID_NODE_LAUNCHES * nodes,
        posts=(EXCHANGES if width > 1 else 0) + RING_PASSES * (nodes - 1),
        messages=2 * EXCHANGES * (width - 1) + 2 * RING_PASSES * (nodes - 1),
    )
