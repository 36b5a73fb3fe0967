"""Counts of host work for the attention of a group in one layer, forward and backward.

A GPU computes nothing that its host has not launched before, and ranks exchange nothing that their
hosts have not posted. None of that depends on the number of tokens, so it decides for short
sequences: a zigzag of eight ranks has 17 attention calls and 16 posts where Ulysses has 2 and 4.

    call      an attention call, forward or backward
    launch    an operation on the device: the calls, and the gathers, merges and sums around them
    post      messages that one call hands over to the transport, whatever their number
    message   a send or a receive

The counts are those of the busiest rank of d, which are w on each of n nodes, when the sequences
of the group lie one way round and are short enough for a ring step to be one call:

                 calls      other launches    messages
    local        2          0                 0
    ulysses      2 p        2 + 4 p           8 p (d - 1)
    zigzag       2 d + 1    10 + 4 d          6 (d - 1)
    hybrid       2 n + 1    24 + 4 n          8 (w - 1) + 6 (n - 1)
    halo         2          10                8, of a slice per rank 4
      hybrid     2          24                8 (w - 1) + 8

The last two are of layers with a window or a chunk, whose slices are as long as that: a zigzag has
two for each rank, and a hybrid has them between nodes. Of two ranks, and of a
hybrid on two nodes, they have half of the halos' messages and a launch less, and so has one slice.

With p pieces of heads (and one launch more where there are several), and halves rounded down.
Posts are 4 p for Ulysses, 2 d for a zigzag and 2 for halos, on a single node; `_ring_posts` counts
those of a ring on any. A post is counted once for each lane that it takes, inside nodes and
between them, as on ordered transports. tests/cost/test_launches.py holds all of it to the programs
that ranks run (`hf_flexseq/program`).

Left out: ring steps so short that several are joined (`program/ring_steps.py`), for which these
are too many; sequences that lie both ways round, or are cut into long chunks, which up to double
the steps of a ring; and heads that the ranks do not divide, which are repeated for the kernel.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.registry import RINGS
from hf_flexseq.cost.recurrent import EXCHANGES_EACH_WAY, segments_of_rank
from hf_flexseq.cost.rings import RING_PASSES, ring_costs
from hf_flexseq.plan.rings import Round, chunks_per_rank, ring_named

# Launches besides the calls: counts of the programs, which change with them.
ULYSSES_LAUNCHES = 6  # heads in one piece
ULYSSES_PIECE_LAUNCHES = 4  # every further piece
ULYSSES_PIECES_LAUNCHES = 1  # where there are several
HYBRID_LAUNCHES = 24
HYBRID_NODE_LAUNCHES = 4

HALO_LAUNCHES = 9
HALO_SLICES_LAUNCHES = 1  # where halos come from several ranks for two slices
HALO_HYBRID_LAUNCHES = 23

# A ring fetches what a step reads so many steps before the one ahead of it (`AHEAD` in
# `program/ring_exchanges.py`).
RING_AHEAD = 2

# No count of a strategy exceeds so many for each rank of the group.
MOST_PER_RANK = 64

# Of recurrent layers, besides those of a rank alone: around the halo of a slice; around summaries;
# and for each other rank, whose summaries are sent, received and added to states. Torch's
# operations, counted by tests/attention/recurrent/test_launches.py.
SEGMENT_HALO_LAUNCHES = 12
SUMMARY_LAUNCHES = 22
SUMMARY_RANK_LAUNCHES = {1: 8, 2: 20}  # by slices of a rank

EXCHANGES = 4  # of Ulysses: to heads and back, forward and backward
HALO_PASSES = 2  # keys and values forward, and their gradients backward


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Host work of one rank for a group's attention in one layer."""

    calls: int
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
        return LayerWork(calls=2, launches=2, posts=0, messages=0)
    if strategy == "ulysses":
        return _ulysses(degree, nodes, pieces)
    if strategy in RINGS:
        return _ring(strategy, degree, nodes)
    if strategy == "hybrid":
        return _hybrid(degree, nodes)
    raise ValueError(f"strategy {strategy!r} has no counted launches")


def halo_work(strategy: str, degree: int, *, nodes: int = 1) -> LayerWork:
    """Return what a rank of a group of `degree` ranks does in one layer with a window or a chunk,
    forward and backward.

    strategy: one whose ranks compute their own slices in such layers, or a hybrid on several
    nodes of two ranks and more. nodes: that the group spans, with equally many ranks on each.
    """
    slices = chunks_per_rank(strategy)
    ring = nodes if strategy == "hybrid" else degree  # ranks, or nodes, with slices of their own
    neighbours = slices if ring > 2 else slices / 2  # on each side, one for each slice
    messages = int(2 * HALO_PASSES * neighbours)
    calls = 2
    launches = calls
    if slices == 2 and ring > 2:
        launches += HALO_SLICES_LAUNCHES
    if strategy == "hybrid":
        width = degree // nodes
        launches += HALO_HYBRID_LAUNCHES
        posts = HALO_PASSES + (EXCHANGES if width > 1 else 0)
        messages += 2 * EXCHANGES * (width - 1)
    else:
        launches += HALO_LAUNCHES
        # A rank at the end of its node has one neighbour on it, and one that is not.
        posts = HALO_PASSES * (2 if 1 < nodes < degree else 1)
    return LayerWork(calls=calls, launches=launches, posts=posts, messages=messages)


def segments_work(kind: str, strategy: str, degree: int, *, nodes: int = 1) -> LayerWork:
    """Return what a rank of a group of `degree` ranks does besides a rank alone in one recurrent
    layer, forward and backward.

    kind: of the layer. nodes: that the group spans, with equally many ranks on each.
    """
    peers = degree - 1
    slices = segments_of_rank(degree, strategy)
    lanes = 2 if 1 < nodes < degree else 1
    # 1. halos, there and back: one from the rank before each segment, and one to that behind
    launches = SEGMENT_HALO_LAUNCHES * slices
    posts = HALO_PASSES * lanes
    messages = HALO_PASSES * slices * min(2, peers)
    # 2. summaries, in the forward and in the backward: to all ranks behind, from all before
    if kind != "convolution":
        launches += SUMMARY_LAUNCHES + SUMMARY_RANK_LAUNCHES[slices] * peers
        posts += EXCHANGES_EACH_WAY * lanes
        messages += EXCHANGES_EACH_WAY * slices * peers
    return LayerWork(calls=0, launches=launches, posts=posts, messages=messages)


def _ulysses(degree: int, nodes: int, pieces: int) -> LayerWork:
    calls = 2 * pieces
    launches = calls + ULYSSES_LAUNCHES + ULYSSES_PIECE_LAUNCHES * (pieces - 1)
    if pieces > 1:
        launches += ULYSSES_PIECES_LAUNCHES
    # A rank alone on its node has peers on the lane between nodes only.
    lanes = 2 if 1 < nodes < degree else 1
    return LayerWork(
        calls=calls,
        launches=launches,
        posts=EXCHANGES * pieces * lanes,
        messages=2 * EXCHANGES * pieces * (degree - 1),
    )


def _ring(strategy: str, degree: int, nodes: int) -> LayerWork:
    work = ring_costs(strategy).work(degree)
    posts = _ring_posts(strategy, degree, nodes)
    return LayerWork(calls=work.calls, launches=work.launches, posts=posts, messages=work.messages)


def _hybrid(degree: int, nodes: int) -> LayerWork:
    width = degree // nodes
    calls = nodes + (nodes + 1)
    posts = EXCHANGES if width > 1 else 0
    if nodes > 1:
        posts += _ring_posts("zigzag", nodes, nodes)
    return LayerWork(
        calls=calls,
        launches=calls + HYBRID_LAUNCHES + HYBRID_NODE_LAUNCHES * nodes,
        posts=posts,
        messages=2 * EXCHANGES * (width - 1) + 2 * RING_PASSES * (nodes - 1),
    )


# ---- posts of a ring


@functools.lru_cache(maxsize=256)
def _ring_posts(strategy: str, degree: int, nodes: int) -> int:
    """Return the posts of the busiest rank of a ring, forward and backward, by lane."""
    # Whether a rank exchanges something about a round over a lane: [lanes, places, round], with
    # the first round and some after the last one that have nothing.
    rounds = ring_named(strategy).rounds(degree)
    fetched, helped = _lanes_of_rounds(rounds, degree, degree // nodes)
    due = fetched[:, :, RING_AHEAD + 1 :]  # what is fetched so many rounds ahead
    here = slice(len(rounds) + 1)
    # 1. forward: the first fetches, and with each round's help the fetch that is due
    posts = fetched[:, :, 1 : RING_AHEAD + 1].sum(axis=2)  # [lanes, places]
    posts += (helped[:, :, here] | due[:, :, here]).sum(axis=2)
    # 2. backward: the first two posts, and with each round's gradients the fetch that is due
    posts += fetched[:, :, 1]
    posts += fetched[:, :, 2] | fetched[:, :, 3]
    posts += (fetched[:, :, 1 : len(rounds) + 1] | due[:, :, 1 : len(rounds) + 1]).sum(axis=2)
    return int(posts.sum(axis=0).max())


def _places(degree: int, width: int) -> Iterable[int]:
    """Return a few ranks, the busiest among them: ends of the first, middle and last node."""
    middle = degree // width // 2 * width
    places = set()
    for first in (0, middle, degree - width):
        places |= {first, first + width - 1}
    return sorted(places)


def _lanes_of_rounds(
    rounds: Sequence[Round], degree: int, width: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return over which lanes ranks exchange something about each round of a ring: two arrays,
    [lanes, places, rounds and some].

    The first is of all calls, the second of those in another rank's place alone. Lanes are the
    node's own, and the one to all others. rounds: those after the first, which has nothing, as
    those after the last. width: ranks of a node.
    """
    # 1. whether a round has a call, and one in the partner's place: [rounds and some, 2], by
    # whether the partner is counted around the end
    number = np.arange(len(rounds) + RING_AHEAD + 2)
    distance = np.zeros_like(number)
    calls = np.zeros((len(number), 2), dtype=bool)
    in_place = np.zeros_like(calls)
    for index, one in enumerate(rounds, start=1):
        distance[index] = one.distance
        for around, role in enumerate((one.earlier, one.later)):
            if role is not None:
                calls[index, around] = True
                in_place[index, around] = role.helps

    # 2. whose keys or queries a rank reads, and who reads its own: [places, rounds and some]
    rank = np.array(_places(degree, width))[:, None]  # [places, 1]
    fetched = np.zeros((2, len(rank), len(number)), dtype=bool)
    helped = np.zeros_like(fetched)
    for peer in (rank - distance, rank + distance):
        wraps = ((peer < 0) | (peer >= degree)).astype(int)
        inside = peer % degree // width == rank // width
        for lane, is_there in enumerate((inside, ~inside)):
            fetched[lane] |= calls[number, wraps] & is_there
            helped[lane] |= in_place[number, wraps] & is_there
    return fetched, helped
