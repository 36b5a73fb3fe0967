"""How many tokens the ranks of a ring fetch from each other in a round, as arrays over all ranks.

`transfers.ring_fetches` lists the same call by call, in time that grows with the square of the
degree: the slow twin.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.plan.rings import Role, Round
from hf_flexseq.plan.shard import Cut, held_chunks

Ints = NDArray[np.int64]


class TurnTokens(NamedTuple):
    """What all ranks fetch at one time, [fetches] each; see `transfers.Fetch`."""

    holder: Ints
    """Index in the group of the rank that has the rows."""

    worker: Ints
    """Index in the group of the rank that computes with them; ascending."""

    queries: Ints
    """Tokens whose queries travel; 0 where keys and values do."""

    keys: Ints
    """Tokens whose keys and values travel; 0 where queries do."""


class LaneTokens:
    """The tokens of the chunks of a lane, by *place*: the ranks in the order of their tokens."""

    def __init__(
        self, strategy: str, lane_cuts: Sequence[Cut], degree: int, *, mirrored: bool
    ) -> None:
        """lane_cuts: the cut of every sequence of the lane, all mirrored or none."""
        self.degree = degree
        self._mirrored = mirrored
        held = np.array([held_chunks(strategy, place, degree) for place in range(degree)])
        # [degree, chunks of a rank] tokens of all sequences of which every chunk has some
        self._together = np.zeros(held.shape, dtype=np.int64)
        # the same of each of the others, which are left out of calls without queries or keys
        self._short: list[Ints] = []
        for cut in lane_cuts:
            tokens = np.diff(np.array(cut.bounds))[held]  # [degree, chunks of a rank]
            if tokens.all():
                self._together += tokens
            else:
                self._short.append(tokens)

    def bounds(self, role: Role) -> tuple[int, int]:
        """Return the least and the most tokens that a worker in this role may fetch."""
        positions = role.queries if role.helps else role.keys
        tokens = self._together[:, positions].sum(axis=1)  # [degree]
        most = int(tokens.max())
        for of_sequence in self._short:
            most += int(of_sequence[:, positions].sum(axis=1).max())
        return int(tokens.min()), most

    def fetched(self, one_round: Round) -> TurnTokens:
        """Return what the ranks fetch in a round, of workers that have a call."""
        worker = np.arange(self.degree)
        holder = worker - one_round.distance  # negative where it is counted around the end
        queries = np.zeros(self.degree, dtype=np.int64)
        keys = np.zeros(self.degree, dtype=np.int64)
        for role, here in ((one_round.earlier, holder >= 0), (one_round.later, holder < 0)):
            if role is None or one_round.distance == 0:
                continue
            fetched = queries if role.helps else keys
            fetched[here] = self._fetched(role, worker[here], holder[here])
        holder %= self.degree
        if self._mirrored:  # places to indices, and the workers in ascending order again
            last = self.degree - 1
            holder, queries, keys = last - holder[::-1], queries[::-1], keys[::-1]
        some = (queries > 0) | (keys > 0)
        return TurnTokens(holder[some], worker[some], queries[some], keys[some])

    def _fetched(self, role: Role, worker: Ints, holder: Ints) -> Ints:
        """Return the tokens that each worker fetches from its holder, [workers]."""
        from_holder, of_worker = role.keys, role.queries
        if role.helps:
            from_holder, of_worker = role.queries, role.keys
        tokens: Ints = self._together[holder][:, from_holder].sum(axis=1)
        for of_sequence in self._short:
            there = of_sequence[holder][:, from_holder].sum(axis=1)
            here = of_sequence[worker][:, of_worker].sum(axis=1)
            tokens += np.where(here > 0, there, 0)
        return tokens
