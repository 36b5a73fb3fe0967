"""The routings of a ring's exchanges between nodes, for its programs."""

from collections.abc import Sequence

from hf_flexseq.plan import Group
from hf_flexseq.schedule.ring_routing import ring_routings
from hf_flexseq.schedule.routing import NicFigures, Routing
from hf_flexseq.schedule.transfers import RowBytes


class Routes:
    """The routings of a ring's exchanges, by the sizes of what travels.

    All ranks of the group make the same ones, each as far as its node is concerned.
    """

    __slots__ = ("_group", "_lengths", "_links", "_rank", "_routings")

    def __init__(
        self, group: Group, lengths: Sequence[int], links: NicFigures, *, rank: int
    ) -> None:
        """lengths: tokens of each sequence of the group. rank: this rank."""
        self._group = group
        self._lengths = lengths
        self._links = links
        self._rank = rank
        # by turn
        self._routings: dict[tuple[bool, RowBytes, RowBytes], tuple[Routing, ...]] = {}

    def find(
        self, turn: int, query_bytes: RowBytes, key_bytes: RowBytes, *, returns: bool
    ) -> Routing:
        """Return the routing of the fetch of a turn, or with `returns` of its return.

        query_bytes, key_bytes: of one row of each tensor that travels.
        """
        key = (returns, query_bytes, key_bytes)
        if key not in self._routings:
            self._routings[key] = ring_routings(
                self._group,
                self._lengths,
                self._links,
                query_bytes,
                key_bytes,
                returns=returns,
                rank=self._rank,
            )
        return self._routings[key][turn]
