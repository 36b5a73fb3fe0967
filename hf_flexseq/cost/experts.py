"""Seconds of experts on several ranks, by micro-batch.

An *expert group* is `ranks` neighbouring ranks that hold a model's experts together. Between two
layers of attention every rank of it sends its tokens to the ranks of their experts, and gets them
back. With n the group's tokens, m the tokens on its fullest rank, e its ranks, f the imbalance,
and t, c and v the constants below, a micro-batch takes the group

    f t n / e  +  c (e - 1) / e  max(m, f n / e) / v

besides its ranks' own work: the busiest rank computes f times the mean, and a rank sends its own
tokens and receives the tokens for its experts. The group waits for its slowest rank in every
layer, so a micro-batch takes as long as

    the slowest rank's own work + the seconds above,    of the slowest group

and where all ranks are one expert group, experts take equally long however sequences are placed.

Rejected: the seconds of experts as a rank's own. Ranks with many short sequences would seem to
take longer than ranks with a part of a long one, and would get fewer tokens than they can have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.records import Amount, Bounds, Constants, Positive, Seconds
from hf_flexseq.base.values import MAX_RANKS, several

# Tokens of the busiest rank over the mean, where it was not measured: routers are trained to
# spread tokens evenly over experts, and the experts of a rank even out their differences.
IMBALANCE = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayers(Constants):
    """Constants of all layers with experts on the ranks of an expert group."""

    what: ClassVar[str] = "the experts of a cost model"

    ranks: Annotated[int, Bounds(least=2, most=MAX_RANKS)]
    """Neighbouring ranks that hold all experts together; 2 or more."""
    token_s: Seconds
    """Seconds that a rank takes for all experts of a token, forward and backward, all layers."""
    exchanged_bytes: Amount
    """Bytes per token that go to its experts and back, forward and backward, all layers."""
    rate: Positive
    """Bytes/s that a rank sends, and receives, in such an exchange."""
    imbalance: Annotated[float, Bounds(least=1, most=MAX_RANKS)] = IMBALANCE
    """Tokens that the busiest rank of a group gets, over the mean of its ranks."""

    # ---- seconds

    @property
    def even_s(self) -> float:
        """Device-seconds of a token on a group whose ranks have equally many."""
        return self.imbalance * (self.token_s + self._exchange_s)

    @property
    def _exchange_s(self) -> float:
        """Seconds in which a rank sends a token to its experts and gets it back."""
        return self.exchanged_bytes * (self.ranks - 1) / self.ranks / self.rate

    def groups_ns(self, rank_tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the nanoseconds of each expert group in a micro-batch, [expert groups].

        rank_tokens: [world_size] tokens per rank. Raises ValueError unless `ranks` divides the
        world size.
        """
        self.check_ranks(len(rank_tokens))
        tokens = np.asarray(rank_tokens, dtype=np.float64).reshape(-1, self.ranks)
        computed = self.imbalance * tokens.mean(axis=1)  # by the busiest rank, [expert groups]
        moved = np.maximum(tokens.max(axis=1), computed)
        seconds = self.token_s * computed + self._exchange_s * moved
        nanoseconds: NDArray[np.int64] = np.ceil(seconds * 1e9).astype(np.int64)
        return nanoseconds

    def least_ns(self, tokens: int, world_size: int) -> int:
        """Return nanoseconds that the experts of a step with so many tokens take at least."""
        return max(0, int(self.even_s * 1e9 * tokens / world_size) - 1)

    def most_s(self, tokens: float) -> float:
        """Return the seconds of so many tokens if one rank had all of them."""
        return tokens * (self.token_s + self.exchanged_bytes / self.rate)

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError unless expert groups divide so many ranks."""
        if world_size % self.ranks:
            raise ValueError(
                f"experts over {self.ranks} ranks on {world_size} ranks: use a multiple of "
                f"{self.ranks} ranks, or put experts over a number of ranks that divides these"
            )

    # ---- words

    def text(self, world_size: int) -> str:
        """Return the distribution of experts over ranks, in words."""
        groups = several(world_size // self.ranks, "group")
        return f"experts in {groups} of {self.ranks} ranks (imbalance {self.imbalance:g})"

    # ---- other passes

    def scaled(self, *, computing: float, exchanges: float) -> "ExpertLayers":
        """Return the constants where experts compute, and exchange, so many times as much."""
        return replace(
            self,
            token_s=self.token_s * computing,
            exchanged_bytes=self.exchanged_bytes * exchanges,
        )
