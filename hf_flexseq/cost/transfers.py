"""Transfers of groups of ranks in attention: bytes, bandwidths, and the share of them that
attention hides.

`model.py` has the seconds that follow.
"""

import numpy as np

from hf_flexseq.cost.constants import CostConstants
from hf_flexseq.cost.kinds import HALO_TRIPS, FloatArray, halos
from hf_flexseq.cost.rings import RING_PASSES, ring_costs

# Most pieces that a rank's heads come in under Ulysses; two have most of the gain.
HEAD_PIECES = 4

# Groups of so few ranks that nevertheless span nodes pay the next wider group's bandwidth.
WIDEST_WITHIN_A_NODE = 8


class CostTransfers(CostConstants):
    """The transfers of sequences on groups of ranks."""

    __slots__ = ()

    def bandwidth(self, degree: int, spans_nodes: bool) -> float:
        """Return the bytes/s of a group of `degree` ranks.

        A degree that was not measured has the bandwidth of the next power of two, or of the widest
        measured degree beyond the table.
        """
        wanted = degree
        if spans_nodes and degree <= WIDEST_WITHIN_A_NODE:
            wanted = 2 * WIDEST_WITHIN_A_NODE
        measured = dict(self.bandwidths)
        if wanted in measured:
            return measured[wanted]
        power_of_two = 1 << (wanted - 1).bit_length()
        for measured_degree, speed in self.bandwidths:
            if measured_degree >= power_of_two:
                return speed
        _, widest_speed = self.bandwidths[-1]
        return widest_speed

    def head_stretch(self, degree: int) -> float:
        """Return the ratio of Ulysses' attention time to that of an even split of the heads."""
        if self.heads is None:
            return 1.0
        most_heads = -(-self.heads // degree)
        return most_heads * degree / self.heads

    def hidden_share(self, s: FloatArray, degree: int, strategy: str) -> FloatArray:
        """Return the share of all-to-alls that can travel while attention computes, [sequences].

        A hybrid has all heads in one piece and hides nothing. s: [sequences] tokens.
        """
        if strategy != "ulysses":
            return np.zeros_like(s)
        heads_per_rank = HEAD_PIECES
        if self.heads is not None:
            heads_per_rank = max(1, self.heads // degree)
        most_pieces = min(HEAD_PIECES, heads_per_rank)
        pieces = np.clip(s * heads_per_rank // self.piece_rows, 1, most_pieces)
        return self.all_to_all_overlap * (1 - 1 / pieces)

    def ring_traffic(self, degree: int, strategy: str) -> float:
        """Return the busiest rank's bytes per token, forward and backward, all layers."""
        keys, queries = self.trip_bytes()
        key_trips, query_trips = ring_costs(strategy).trips(degree)
        return keys * key_trips + queries * query_trips

    def trip_bytes(self) -> tuple[float, float]:
        """Return the bytes of a token's (keys and values, queries) on one trip, all layers.

        Keys and values make three trips in a ring. Raises ValueError for a model that does not
        know them.
        """
        if self.ring_bytes is None:
            raise ValueError(
                f"cost model {self.name!r} has no ring_bytes, so rings have no cost: use "
                "ulysses or auto"
            )
        return self.ring_bytes / RING_PASSES, self.query_bytes

    def halo_s(self, s: FloatArray, degree: int, strategy: str, spans_nodes: bool) -> FloatArray:
        """Return the seconds in which the busiest rank receives the halos of its slices and sends
        their gradients back, [sequences].

        s: [sequences] tokens. strategy: a ring's, or a hybrid's on several nodes, whose ranks have
        the halos of a node for a part of the heads each.
        """
        keys, _ = self.trip_bytes()
        seconds = np.zeros_like(s)
        for kind in self.kinds:
            if strategy == "hybrid":
                nodes = nodes_spanned(degree)
                tokens = halos(kind.reach, s, nodes, "zigzag") * (nodes / degree)
            else:
                tokens = halos(kind.reach, s, degree, strategy)
            seconds += HALO_TRIPS * kind.share * keys * tokens
        return seconds / self.bandwidth(degree, spans_nodes)


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
