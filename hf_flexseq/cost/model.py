"""Seconds and bytes of sequences on groups of ranks: the one model every decision is scored by.

A sequence of s tokens on a group of d ranks takes, with a1, a2 and b1 measured and v_d the group's
bandwidth,

    local     a1 s^2 + a2 s
    ulysses   max(a1 s^2 stretch / d, h t) + (1 - h) t + a2 s / d, with t = all-to-all bytes s / (d
              v_d)
    zigzag    max(a1 s^2 / d, ring bytes s (d - 1) / (d v_d)) + a2 s / d
    other rings   the same with a1 s^2 stretch / d and traffic of their own (`rings.py`)
    hybrid    Ulysses' transfers inside a node + max(a1 s^2 stretch, ring bytes s (nodes - 1) /
              v_d) / d + a2 s / d

* A group of two ranks and more takes, with A the seconds of its sequences' attention and transfers
  and H those in which its host launches and posts them (counted in `launches.py`),

      linear layers + max(A, o H) + (1 - o) H + group_s

  `group_s` is what transfers wait for whatever they move, and o = `host_overlap` the share of the
  host's work that runs ahead of the device: 1 on a GPU, 0 where both are one processor. Sequences
  of a group share its launches, so that H counts once a group. `cost/evaluate.py` adds up groups,
  micro-batches and steps.
* `stretch` is ceil(H/d) d / H: the rank with the most of H query heads sets Ulysses' pace, and
  ranks beyond H idle.
* Ring transfers overlap with the attention they feed (LightSeq, arXiv 2310.03294, section 3.2), so
  the longer counts. That is for `ring_overlap` = 1; of a smaller one only that share r of the
  transfers t hides, and a ring takes max(attention, r t) + (1 - r) t. Ulysses' heads travel in
  pieces, all but one while others are computed: the share h.
* The max is taken group by group, so that groups are priced one by one: what one group's attention
  leaves of its cover never hides the launches of another, nor do linear layers, which have
  launches of their own to hide (they are in b1). Where attention is short compared with
  linear layers a ring may be cheaper than priced, by H - A at most. Forward and backward count
  together.
* A rank holds token_bytes x tokens + state_bytes + sharded_state_bytes / ranks, at most
  budget_bytes.

Layers that read a window or a chunk only (`kinds.py`) take for themselves, with p_k(s) the pairs
of a sequence, t_k the transfers of their share, and a_k measured,

    local     2 a_k p_k
    ulysses   as above, with 2 a_k p_k for a1 s^2 and t_k for t
    a ring    2 a_k p_k of the busiest rank + the bytes of its halos / v_d
    hybrid    Ulysses' transfers + 2 a_k p_k of the busiest node stretch / its ranks + the bytes
              of halos / v_d

and full layers have the rest of the bytes; seconds add up over kinds, for layers follow each
other. So do those of recurrent layers (`recurrent.py`), which take, with r_k seconds per token, a
second pass of r'_k where several ranks share a sequence, and n the segments of a rank,

    local     r_k s
    ulysses   (r_k + r'_k) s / d; and a group (d - 1) summaries / v_d each way, and a halo
    others    (r_k + r'_k) s / d + the summaries of all segments before, or behind, and n halos,
              each way / v_d

with s, or s / (d n), filled up to whole chunks.

Layers whose experts lie on several ranks take those together (`experts.py`): a micro-batch has
their seconds, and no sequence.

A halo arrives before its one kernel call begins, so nothing hides it. Launches and posts of a
group are those of all its layers.

Rejected: H as a sum. A long sequence launches as often as a short one, but a busy device hides
that. Rejected: one max for a rank, over all its groups and linear layers. It is more accurate, but
the price of a group would depend on the others.

The formula is FlexSP's (arXiv 2412.01523, equations 11 to 14), with heads, rings, latency and
unsharded states added. Rejected: the factor (d - 1)/d on all-to-all bytes, which the published
constants were fitted without. All decisions use whole nanoseconds, so that sums do not depend on
their order or on the machine.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.registry import RINGS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.kinds import FloatArray, busiest_pairs, full_share
from hf_flexseq.cost.launches import LayerWork, halo_work, layer_work, segments_work
from hf_flexseq.cost.rings import ring_costs
from hf_flexseq.cost.transfers import CostTransfers, nodes_spanned

Int64Array = NDArray[np.int64]

# Passes that a linear layer makes: one forward, and backward one for the gradient of the input and
# one for the gradient of the weights.
LINEAR_PASSES = 3

# Seconds of attention's backward over those of its forward: five matrix products to two.
ATTENTION_BACKWARD = 2.5


# The strategies of `auto` if the prices of hybrids are valid, too.
WITH_HYBRIDS = "auto, with hybrids"

OUT_OF_RINGS = 100  # times as many seconds as a ring would take: nothing that a planner chooses

# Constants that older models lack: digests leave out those with their default.
HOST_CONSTANTS = ("launch_s", "post_s", "message_s", "host_overlap", "contact_s")
LATER_CONSTANTS = (*HOST_CONSTANTS, "kinds", "recurrent", "attention_share")


class _EvenSplit(NamedTuple):
    """Sequences on a group that shares their work evenly, [sequences] each."""

    tokens: FloatArray
    attention: FloatArray
    """Seconds of layers that read all keys."""
    linear: FloatArray
    """Seconds of linear layers."""


class Waits(NamedTuple):
    """Nanoseconds of a group besides those of its sequences on the device."""

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
class CostModel(CostTransfers):
    """Seconds of sequences on groups of ranks, by measured or estimated constants."""

    # ---- what is allowed

    def strategies(self, strategy: str) -> tuple[str, ...]:
        """Return the strategies that groups of two ranks and more may use.

        strategy: `auto`, one strategy, or what `allowed` returns. Raises ValueError for a strategy
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

    # ---- seconds

    def sequences_ns(
        self,
        lengths: Int64Array,
        degree: int,
        strategy: str,
        spans_nodes: bool,
        shares: FloatArray | None = None,
    ) -> Int64Array:
        """Return the nanoseconds of each sequence on its own on a group, [sequences].

        lengths: [sequences] tokens. degree: ranks of the group. spans_nodes: whether these are on
        more than one node. shares: [sequences] of the causal pairs, for units and sequences
        with blocks; None for all pairs. These are priced out of rings: for a unit every rank would
        gather and keep the keys of all paths that lead to its tokens, and rings compute no blocks.
        """
        s = lengths.astype(np.float64)  # as in the formulas above
        attention = self.attention_s * s * s / degree
        even = _EvenSplit(
            tokens=s,
            attention=attention if shares is None else attention * shares,
            linear=self.linear_s * s / degree,
        )
        if strategy == "local":
            seconds = even.attention + even.linear
        elif strategy == "ulysses" or (strategy == "hybrid" and not spans_nodes):
            seconds = self._ulysses_s(even, degree, strategy, spans_nodes)
        elif strategy == "hybrid":
            seconds = self._hybrid_s(even, degree)
        elif strategy in RINGS:
            seconds = self._ring_s(even, degree, strategy, spans_nodes)
        else:
            raise ValueError(f"strategy {strategy!r} has no cost formula")
        if shares is not None and (strategy in RINGS or (strategy == "hybrid" and spans_nodes)):
            seconds = np.where(shares != 1, OUT_OF_RINGS * seconds, seconds)
        if self.kinds:
            seconds = seconds + self._near_s(s, degree, strategy, spans_nodes)
        if self.recurrent:
            seconds = seconds + self.scan_s(s, degree, strategy)
            if strategy != "ulysses":
                seconds = seconds + self.summaries_s(degree, strategy, spans_nodes)
        nanoseconds = np.floor(seconds * 1e9 + 0.5)
        return np.maximum(1, nanoseconds).astype(np.int64)  # work is never free

    def sequence_ns(self, length: int, degree: int, strategy: str, spans_nodes: bool) -> int:
        """Return the nanoseconds of a sequence of `length` tokens on `degree` ranks."""
        return int(self.sequences_ns(np.array([length]), degree, strategy, spans_nodes)[0])

    def _ulysses_s(
        self, even: _EvenSplit, degree: int, strategy: str, spans_nodes: bool
    ) -> FloatArray:
        """Return the seconds where heads are exchanged for tokens, [sequences]."""
        s = even.tokens
        full_bytes = self.full_share * self.all_to_all_bytes
        moved = full_bytes * s / degree / self.bandwidth(degree, spans_nodes)
        hidden = self.hidden_share(s, degree, strategy) * moved
        exposed = moved - hidden
        computed = np.maximum(even.attention * self.head_stretch(degree), hidden)
        return computed + even.linear + exposed

    def _hybrid_s(self, even: _EvenSplit, degree: int) -> FloatArray:
        """Return the seconds of Ulysses inside nodes and a ring across them, [sequences]."""
        s = even.tokens
        nodes = nodes_spanned(degree)
        width = degree // nodes  # ranks of a node
        keys, _ = self.trip_bytes()
        share = self.full_share
        inside = share * self.all_to_all_bytes * s / degree / self.bandwidth(width, False)
        across = share * 3 * keys * (nodes - 1) * s / degree / self.bandwidth(degree, True)
        hidden = self.ring_overlap * across
        exposed = across - hidden
        computed = np.maximum(even.attention * self.head_stretch(width), hidden)
        return even.linear + (inside + computed + exposed)

    def _ring_s(
        self, even: _EvenSplit, degree: int, strategy: str, spans_nodes: bool
    ) -> FloatArray:
        """Return the seconds of a ring, [sequences]."""
        traffic = self.full_share * self.ring_traffic(degree, strategy)
        moved = traffic * even.tokens / degree / self.bandwidth(degree, spans_nodes)
        hidden = self.ring_overlap * moved
        exposed = moved - hidden
        computed = np.maximum(even.attention * ring_costs(strategy).stretch(degree), hidden)
        return computed + exposed + even.linear

    def _near_s(self, s: FloatArray, degree: int, strategy: str, spans_nodes: bool) -> FloatArray:
        """Return the seconds of the layers with a window or a chunk, their transfers included,
        [sequences].

        s: [sequences] tokens.
        """
        if strategy == "local":
            return self.near_attention_s(s, degree, strategy)
        if strategy in RINGS:
            attention = self.near_attention_s(s, degree, strategy)
            return attention + self.halo_s(s, degree, strategy, spans_nodes)
        is_hybrid = strategy == "hybrid" and spans_nodes
        nodes = nodes_spanned(degree) if is_hybrid else 1  # that have slices of their own
        width = degree // nodes
        speed = self.bandwidth(width, spans_nodes and not is_hybrid)
        moved = self.all_to_all_bytes * s / degree / speed
        hidden_share = self.hidden_share(s, degree, strategy)
        stretch = self.head_stretch(width)
        seconds = np.zeros_like(s)
        for kind in self.kinds:
            of_node = kind.attention_s * busiest_pairs(kind.reach, s, nodes, "zigzag")
            even = of_node / width
            hidden = kind.share * hidden_share * moved
            seconds += np.maximum(even * stretch, hidden) + (kind.share * moved - hidden)
        if is_hybrid:
            seconds += self.halo_s(s, degree, strategy, spans_nodes)
        return seconds

    def near_attention_s(self, s: FloatArray, degree: int, strategy: str) -> FloatArray:
        """Return the attention seconds of the layers with a window or a chunk on the rank that
        has most of it, where ranks compute their own slices, [sequences].

        s: [sequences] tokens. strategy: `local` or a ring's.
        """
        seconds = np.zeros_like(s)
        for kind in self.kinds:
            seconds += kind.attention_s * busiest_pairs(kind.reach, s, degree, strategy)
        return seconds

    def scan_s(self, s: FloatArray, degree: int, strategy: str) -> FloatArray:
        """Return the seconds of a rank's recurrent layers, [sequences]. s: [sequences] tokens."""
        seconds = np.zeros_like(s)
        for kind in self.recurrent:
            seconds += kind.scan_s(s, degree, strategy)
        return seconds

    def summaries_s(self, degree: int, strategy: str, spans_nodes: bool) -> float:
        """Return the seconds of exchanging summaries and halos of a sequence in a group."""
        if degree == 1:
            return 0.0
        moved = sum(kind.exchanged_bytes(degree, strategy) for kind in self.recurrent)
        return moved / self.bandwidth(degree, spans_nodes)

    @property
    def full_share(self) -> float:
        """Share of the layers with attention that read all keys."""
        return full_share(self.kinds)

    @property
    def token_s(self) -> float:
        """Device-seconds of a token in linear layers and, evenly spread, in experts."""
        return self.linear_s + (0.0 if self.experts is None else self.experts.even_s)

    @property
    def micro_batch_ns(self) -> int:
        """Nanoseconds every micro-batch costs, whatever is in it."""
        return int(self.micro_batch_s * 1e9 + 0.5)

    # ---- seconds of the host

    @property
    def has_waits(self) -> bool:
        """True if a group takes longer than its sequences on the device."""
        return bool(
            self.group_s or self.launch_s or self.post_s or self.message_s or self.recurrent
        )

    def waits(self, degree: int, strategy: str, spans_nodes: bool) -> Waits:
        """Return the waits of `degree` ranks; the micro-batch's constant has those of one rank."""
        if degree == 1:
            return Waits(0, 0)
        host_s = self.host_s(degree, strategy, spans_nodes)
        hidden_s = self.host_overlap * host_s
        always_s = self.group_s + (host_s - hidden_s)
        if strategy == "ulysses":  # a rank has one sequence at most that began on another
            always_s += self.summaries_s(degree, strategy, spans_nodes)
        return Waits(int(always_s * 1e9 + 0.5), int(hidden_s * 1e9 + 0.5))

    def host_s(self, degree: int, strategy: str, spans_nodes: bool) -> float:
        """Return the seconds in which the host launches and posts a group's attention.

        Heads count as one piece; more pieces have more work that hides them.
        """
        nodes = 1
        asked = strategy  # decides the slices of the ranks
        if spans_nodes:
            nodes = nodes_spanned(degree)
        elif strategy == "hybrid":
            strategy = "ulysses"
        seconds = self._work_s(layer_work(strategy, degree, nodes=nodes))
        if self.kinds and strategy in (*RINGS, "hybrid"):
            near_s = self._work_s(halo_work(strategy, degree, nodes=nodes))
            seconds = self.full_share * seconds + (1 - self.full_share) * near_s
        seconds = self.attention_share * seconds
        for kind in self.recurrent:
            work = segments_work(kind.kind, asked, degree, nodes=nodes)
            seconds += kind.share * self._work_s(work)
        return seconds

    def _work_s(self, work: LayerWork) -> float:
        """Return the seconds of the host for such work in every layer."""
        return (
            self.launch_s * work.launches
            + self.post_s * work.posts
            + self.message_s * work.messages
        )

    def alone_ns(
        self,
        lengths: Int64Array,
        degree: int,
        strategy: str,
        spans_nodes: bool,
        shares: FloatArray | None = None,
    ) -> Int64Array:
        """Return the nanoseconds of each sequence alone in a group, with waits, [sequences]; see
        `sequences_ns`."""
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

    @property
    def forward_linear_s(self) -> float:
        """Seconds per token of the linear layers' forward: one of `LINEAR_PASSES`. Recurrent
        layers, whose seconds grow with the tokens alone, count as linear ones."""
        recurrent_s = sum(kind.token_s for kind in self.recurrent)
        return (self.linear_s + recurrent_s) / LINEAR_PASSES

    @staticmethod
    def forward_pair_s(attention_s: float) -> float:
        """Return the seconds per (query, key) pair of attention's forward.

        attention_s: seconds per two pairs, forward and backward. A squared token is about two
        causal pairs.
        """
        return 2 * attention_s / (1 + ATTENTION_BACKWARD)

    def digest(self) -> str:
        """Return the hex digest of every constant: part of a plan's input."""
        record = self.to_record()
        del record["version"]  # digests in old traces were computed so
        for one in fields(self):
            if one.name in LATER_CONSTANTS and getattr(self, one.name) == one.default:
                del record[one.name]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
