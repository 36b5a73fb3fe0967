"""Seconds and bytes of sequences on groups of ranks: the one model every decision is scored by.

A price is features times numbers. A sequence of s tokens on a group of d ranks, with the numbers
of `constants.py`, takes each of them the sum of its *terms* (`TERMS`):

    token        linear_s s / d
    attention    attention_s x squares of the busiest rank (`kernels.py`)
    all_to_all   all_to_all_bytes s / (d v)                             Ulysses, hybrids
    ring         traffic s / (d v) that attention does not hide         rings, hybrids
    states       summary_bytes x summaries / v                          where recurrent layers are
    copies       pass_s x passes s / d                                  packing and merging

with v the bytes/s of the group. Squares are, for a causal sequence of s tokens c(s) and for q
queries that read k keys a(q, k), without a kernel s^2 and 2 q k,

    local             c(s)
    ulysses           c(s) x ceil(H / d) / H      the rank with the most of H heads sets the pace
    a ring            c(own) + calls x a(own, chunk), with n chunks of s / (n d) tokens on a rank
    hybrid            a ring over nodes, with the heads of a node divided over its ranks

A group takes the sum of its sequences and its *waits*: launches, posts, and the latency of
transfers. A device with a separate host hides them under the group's attention and transfers
(`overlap`). A micro-batch takes its slowest rank and a constant (`evaluate.py`), plus the joint
seconds of experts on several ranks (`experts.py`).

* Ring transfers overlap with the attention they feed (LightSeq, arXiv 2310.03294, section 3.2).
  Heads are exchanged before and after attention, and nothing hides them.
* Layers with a window or a chunk, and scans, do work that grows with the tokens: it is part of
  `linear_s`. Halos are not priced. Exchanges for scans are, because they change decisions: the
  summaries of all segments before a rank's own, and in the backward of all behind.
* A rank holds token_bytes x tokens + state_bytes + sharded_state_bytes / ranks, at most
  budget_bytes.

The formula is FlexSP's (arXiv 2412.01523, equations 11 to 14), with kernels, heads, rings, waits
and unsharded states added. Rejected: the factor (d - 1)/d on all-to-all bytes, which the published
numbers were fitted without. Rejected: counts of launches, pieces of heads, the pairs and halos of
each kind of layer, second passes of scans: without them plans take 0.2 % longer by a model that
has them. All decisions use whole nanoseconds, so sums do not depend on their order or on the
machine.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.registry import RINGS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.constants import CostConstants
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.plan.rings import RING_PASSES, chunks_per_rank, ring_named

Int64Array = NDArray[np.int64]

# Terms of a sequence's price, and all terms of a micro-batch's.
SEQUENCE_TERMS = ("token", "attention", "all_to_all", "ring", "states", "copies")
TERMS = ("micro_batch", *SEQUENCE_TERMS, "group", "experts")
TOKEN, ATTENTION, ALL_TO_ALL, RING, STATES, COPIES = range(len(SEQUENCE_TERMS))

# Passes that a linear layer makes: one forward, and backward one for the gradient of the input and
# one for the gradient of the weights.
LINEAR_PASSES = 3

# Seconds of attention's backward over those of its forward: five matrix products to two.
ATTENTION_BACKWARD = 2.5

# Exchanges of heads under Ulysses, forward and backward, and those of a layer that runs again: of
# queries, keys and values, while the output is kept.
EXCHANGES = 2.0
EXCHANGES_AGAIN = 2 / 3

# The strategies of `auto` if the prices of hybrids are valid, too.
WITH_HYBRIDS = "auto, with hybrids"

OUT_OF_RINGS = 100  # times as many seconds as a ring would take: nothing that a planner chooses

# Groups of so few ranks that nevertheless span nodes pay the next wider group's bandwidth.
WIDEST_WITHIN_A_NODE = 8

# Times that a rank's memory passes its queries, keys and values, forward and backward: to pack
# heads and to unpack them; around a ring, and for each of its steps, whose result is merged and
# whose gradients are added. Counted in the programs of eight ranks with four queries to a key.
EXCHANGE_PASSES = 10
RING_PASSES_OF_MEMORY = 11
STEP_PASSES = 5


class Waits(NamedTuple):
    """Nanoseconds of a group, in addition to its sequences'."""

    always: int
    """Nanoseconds that nothing hides."""
    overlappable: int
    """Nanoseconds that can overlap with attention and transfers of the group."""

    def beyond(self, cover: Int64Array) -> Int64Array:
        """Return the nanoseconds that groups take longer, [groups].

        cover: [groups] nanoseconds of their attention and transfers.
        """
        return self.always + np.maximum(0, self.overlappable - cover)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel(CostConstants):
    """Seconds of sequences on groups of ranks, by estimated or fitted numbers."""

    # ---- what is allowed

    def strategies(self, strategy: str) -> tuple[str, ...]:
        """Return the strategies that groups of two ranks and more may use.

        strategy: `auto`, one strategy, or a result of `allowed`. Raises ValueError for a strategy
        that this model cannot price.
        """
        if strategy in ("auto", WITH_HYBRIDS) and self.ring_bytes is None:
            return ("ulysses",)
        if strategy == "auto":
            return ("ulysses", "zigzag")
        if strategy == WITH_HYBRIDS:
            return ("ulysses", "zigzag", "hybrid")
        if strategy == "local":
            return ()
        if strategy in (*RINGS, "hybrid"):
            self.trip_bytes()  # raises if the model lacks them
        return (strategy,)

    @staticmethod
    def allowed(strategy: str, topology: Topology) -> str:
        """Return the strategies that groups may use on a topology: `auto` becomes `WITH_HYBRIDS`
        if no hybrid spans more nodes than it is priced for."""
        per_node = topology.ranks_per_node
        nodes = range(2, topology.nodes + 1)
        if strategy == "auto" and nodes and all(nodes_spanned(n * per_node) >= n for n in nodes):
            return WITH_HYBRIDS
        return strategy

    # ---- links

    def bandwidth(self, degree: int, spans_nodes: bool) -> float:
        """Return the bytes/s of a group of `degree` ranks."""
        return looked_up(self.bandwidths, degree, spans_nodes)

    def trip_bytes(self) -> float:
        """Return the bytes per token of keys and values on one trip, all layers. Raises ValueError
        for a model that does not know them."""
        if self.ring_bytes is None:
            raise ValueError(
                f"cost model {self.name!r} has no ring_bytes, so rings have no cost: use "
                "ulysses or auto"
            )
        return self.ring_bytes / RING_PASSES

    def head_stretch(self, degree: int) -> float:
        """Return Ulysses' attention time over the time of evenly split heads."""
        if self.heads is None:
            return 1.0
        most_heads = -(-self.heads // degree)
        return most_heads * degree / self.heads

    # ---- seconds

    def terms(
        self,
        lengths: Int64Array,
        degree: int,
        strategy: str,
        spans_nodes: bool,
        shares: FloatArray | None = None,
    ) -> FloatArray:
        """Return the seconds of each sequence on its own on a group, [SEQUENCE_TERMS, sequences].

        lengths: [sequences] tokens. degree: ranks of the group. spans_nodes: whether these are on
        more than one node. shares: [sequences] of the causal pairs, for units and sequences
        with blocks; None for all pairs. These are priced out of rings: for a unit every rank would
        gather and keep the keys of all paths that lead to its tokens, and rings compute no blocks.
        """
        s = lengths.astype(np.float64)  # as in the formulas above
        terms = np.zeros((len(SEQUENCE_TERMS), len(s)))
        terms[TOKEN] = self.linear_s * s / degree
        is_hybrid = strategy == "hybrid" and spans_nodes
        nodes = nodes_spanned(degree) if is_hybrid else 1
        width = degree // nodes  # ranks that exchange heads
        ring = nodes if is_hybrid else degree if strategy in RINGS else 1
        if strategy in ("ulysses", "hybrid"):
            speed = self.bandwidth(width, spans_nodes and not is_hybrid)
            terms[ALL_TO_ALL] = self.all_to_all_bytes * s / degree / speed
            terms[COPIES] = EXCHANGE_PASSES * self.pass_s * s / degree
        elif strategy not in (*RINGS, "local"):
            raise ValueError(f"strategy {strategy!r} has no cost formula")
        squares = self._squares(s, strategy, ring)
        if strategy in ("ulysses", "hybrid"):
            squares *= self.head_stretch(width) / width
        if shares is not None:
            squares *= shares
        terms[ATTENTION] = self.attention_s * squares
        if ring > 1:
            name = "zigzag" if is_hybrid else strategy
            traffic = self.trip_bytes() * ring_named(name).trips(ring)
            moved = traffic * s / degree / self.bandwidth(degree, spans_nodes)
            terms[RING] = np.maximum(0, moved - self.overlap * terms[ATTENTION])
            steps = RING_PASSES_OF_MEMORY + STEP_PASSES * (ring - 1)
            terms[COPIES] += steps * self.pass_s * s / degree
            if shares is not None:
                terms[:, shares != 1] *= OUT_OF_RINGS
        if self.summary_bytes and degree > 1 and strategy != "ulysses":
            terms[STATES] = self._summaries_s(degree, strategy, spans_nodes)
        return terms

    def _squares(self, s: FloatArray, strategy: str, ring: int) -> FloatArray:
        """Return the squares of the busiest rank with all heads, [sequences]. ring: ranks, or
        nodes, that each have chunks of a sequence's tokens; 1 where all tokens are together."""
        kernel = self.kernel
        if ring == 1:
            return s * s if kernel is None else kernel.causal(s)
        name = strategy if strategy in RINGS else "zigzag"
        stretch = ring_named(name).stretch(ring)
        if kernel is None:
            return s * s / ring * stretch
        chunks = chunks_per_rank(name)
        chunk = s / (chunks * ring)
        own = chunks * chunk
        calls = (ring - 1) * chunks / 2
        squares: FloatArray = stretch * (kernel.causal(own) + calls * kernel.across(own, chunk))
        return squares

    def _summaries_s(self, degree: int, strategy: str, spans_nodes: bool) -> float:
        """Return the seconds in which the busiest rank exchanges the states of one sequence."""
        summaries = degree - 1
        if strategy != "ulysses" and chunks_per_rank(strategy) == 2:
            summaries = max(degree - 1, 2 * degree - 3)  # of two segments a rank
        return summaries * self.summary_bytes / self.bandwidth(degree, spans_nodes)

    def sequences_ns(
        self,
        lengths: Int64Array,
        degree: int,
        strategy: str,
        spans_nodes: bool,
        shares: FloatArray | None = None,
    ) -> Int64Array:
        """Return the nanoseconds of each sequence on its own on a group, at least 1, [sequences];
        see `terms`."""
        seconds = self.terms(lengths, degree, strategy, spans_nodes, shares).sum(axis=0)
        nanoseconds: Int64Array = np.floor(seconds * 1e9 + 0.5).astype(np.int64)
        return np.maximum(1, nanoseconds)  # work is never free

    def sequence_ns(self, length: int, degree: int, strategy: str, spans_nodes: bool) -> int:
        """Return the nanoseconds of a sequence of `length` tokens on `degree` ranks."""
        return int(self.sequences_ns(np.array([length]), degree, strategy, spans_nodes)[0])

    @property
    def token_s(self) -> float:
        """Device-seconds of a token in linear layers and, evenly spread, in experts."""
        return self.linear_s + (0.0 if self.experts is None else self.experts.even_s)

    @property
    def micro_batch_ns(self) -> int:
        """Nanoseconds every micro-batch costs, whatever is in it."""
        return int(self.micro_batch_s * 1e9 + 0.5)

    # ---- waits of a group

    @property
    def has_waits(self) -> bool:
        """True if a group takes longer than its sequences."""
        return bool(self.group_s or self.group_rank_s or self.summary_bytes)

    def waits(self, degree: int, strategy: str, spans_nodes: bool) -> Waits:
        """Return the waits of `degree` ranks; 0 for one rank, whose waits are in the micro-batch's
        constant."""
        if degree == 1:
            return Waits(0, 0)
        ring = degree if strategy in RINGS else 0
        if strategy == "hybrid" and spans_nodes:
            ring = nodes_spanned(degree)
        seconds = self.group_s + self.group_rank_s * ring
        hidden_s = self.overlap * seconds
        always_s = seconds - hidden_s
        if strategy == "ulysses":  # a rank has one sequence at most that began on another
            always_s += self._summaries_s(degree, strategy, spans_nodes)
        return Waits(int(always_s * 1e9 + 0.5), int(hidden_s * 1e9 + 0.5))

    def alone_ns(
        self,
        lengths: Int64Array,
        degree: int,
        strategy: str,
        spans_nodes: bool,
        shares: FloatArray | None = None,
    ) -> Int64Array:
        """Return the nanoseconds of each sequence alone in a group, with waits, [sequences]; see
        `terms`."""
        nanoseconds = self.sequences_ns(lengths, degree, strategy, spans_nodes, shares)
        waits = self.waits(degree, strategy, spans_nodes)
        return nanoseconds + waits.beyond(self.cover_ns(nanoseconds, lengths, degree))

    def cover_ns(self, nanoseconds: Int64Array, lengths: Int64Array, degree: int) -> Int64Array:
        """Return the nanoseconds of each sequence's attention and transfers, [sequences].

        nanoseconds: [sequences] as `sequences_ns` returns them for `lengths`.
        """
        linear = np.rint(self.linear_s * lengths / degree * 1e9).astype(np.int64)
        cover: Int64Array = np.maximum(0, nanoseconds - linear)
        return cover

    # ---- forward

    @property
    def forward_linear_s(self) -> float:
        """Seconds per token of the linear layers' forward: one of `LINEAR_PASSES`."""
        return self.linear_s / LINEAR_PASSES

    @property
    def forward_pair_s(self) -> float:
        """Seconds per (query, key) pair of attention's forward; a squared token is about two
        causal pairs."""
        return 2 * self.attention_s / (1 + ATTENTION_BACKWARD)

    def digest(self) -> str:
        """Return the hex digest of every number: part of a plan's input."""
        text = json.dumps(self.to_record(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def looked_up(table: Sequence[tuple[int, float]], degree: int, spans_nodes: bool) -> float:
    """Return the bytes/s of a group of `degree` ranks. table: (degree, bytes/s), ascending.

    A degree that is not in the table has the bandwidth of the next power of two, or of the widest
    degree beyond the table.
    """
    wanted = degree
    if spans_nodes and degree <= WIDEST_WITHIN_A_NODE:
        wanted = 2 * WIDEST_WITHIN_A_NODE
    known = dict(table)
    if wanted in known:
        return known[wanted]
    power_of_two = 1 << (wanted - 1).bit_length()
    for known_degree, speed in table:
        if known_degree >= power_of_two:
            return speed
    _, widest_speed = table[-1]
    return widest_speed


def nodes_spanned(degree: int) -> int:
    """Return the nodes that a cost model assumes for a group on several.

    The number is the fewest nodes of eight ranks, as in the machines that its bandwidths describe.
    Smaller nodes make a hybrid's ring longer than it is priced.
    """
    fewest = max(2, -(-degree // WIDEST_WITHIN_A_NODE))
    for nodes in range(fewest, degree):
        if degree % nodes == 0:
            return nodes
    return degree
