"""Layers that read less than all keys of their sequence, as a cost model describes them.

A layer with a window of w tokens computes s(s+1)/2 pairs of a sequence up to w tokens, and w more
for every further token; one with chunks of c tokens computes the pairs of sequences of c. If ranks
keep their own tokens (rings), such a layer needs a halo: the tokens before each slice of a rank
that its queries read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.values import MAX_TOKENS, duration, fields_of, number, whole
from hf_flexseq.plan.rings import chunks_per_rank

FloatArray = NDArray[np.float64]

# Shares of layers are sums of floats: less than this counts as no layer.
NO_SHARE = 1e-9

# Trips of keys and values that a halo makes: there, and float32 gradients back, which count twice.
HALO_TRIPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NearLayers:
    """All layers of a model with the same window or chunk."""

    reach: Reach
    """Keys that their queries read."""
    share: float
    """Share of the layers with attention, and of the bytes that these move."""
    attention_s: float
    """Seconds per two (query, key) pairs, forward and backward, all of these layers."""

    def __post_init__(self) -> None:
        if self.reach.is_full:
            raise ValueError("kinds: full layers are in attention_s; list windows and chunks only")
        whole(f"kinds, {self.reach}", halo_tokens(self.reach) + 1, most=MAX_TOKENS)
        number(f"kinds, {self.reach}, share", self.share, most=1.0)
        duration(f"kinds, {self.reach}, attention_s", self.attention_s)
        if self.share == 0 and self.attention_s > 0:
            raise ValueError(
                f"kinds, {self.reach}: attention_s={self.attention_s} of no layers; give the "
                "share of the layers that take them, or leave the kind out"
            )

    def to_record(self) -> dict[str, Any]:
        """Return the kind as plain JSON values."""
        return {
            "share": float(self.share),
            "attention_s": float(self.attention_s),
            **record_of(self.reach),
        }

    @classmethod
    def from_record(cls, record: Any) -> "NearLayers":
        """Return the kind that `to_record` was called on. Raises ValueError for anything else."""
        values = fields_of(
            record,
            "a kind of layers",
            needed=("share", "attention_s"),
            optional=("window", "chunk"),
        )
        return cls(
            reach=reach_of(values), share=values["share"], attention_s=values["attention_s"]
        )


def record_of(reach: Reach) -> dict[str, int]:
    """Return a reach as plain JSON values: its `window` or its `chunk`, whichever it has."""
    sizes = {"window": reach.window, "chunk": reach.chunk}
    return {name: size for name, size in sizes.items() if size is not None}


def reach_of(record: Mapping[str, Any], what: str = "kinds") -> Reach:
    """Return the reach of a record with a `window`, a `chunk`, or neither.

    Raises ValueError for invalid sizes. what: the name of the record in messages.
    """
    sizes = {}
    for name in ("window", "chunk"):
        if record.get(name) is not None:
            sizes[name] = whole(f"{what}, {name}", record[name], least=1, most=MAX_TOKENS)
    return Reach(**sizes)


def check_kinds(kinds: Iterable[NearLayers]) -> None:
    """Raise ValueError for a reach that is listed twice, and for more layers than a model has."""
    check_listed_once("kinds", [kind.reach for kind in kinds])
    if full_share(kinds) < 0:
        shares = sum(kind.share for kind in kinds)
        raise ValueError(f"kinds: {shares:.3g} of the layers, at most all of them (1) can be")


def check_listed_once(name: str, values: Sequence[object]) -> None:
    """Raise ValueError for a value that is listed twice. name: of the list."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{name}: {value} is listed twice")


def full_share(kinds: Iterable[NearLayers]) -> float:
    """Return the share of the layers that read all keys."""
    share = 1.0
    for kind in kinds:
        share -= kind.share
    return 0.0 if abs(share) < NO_SHARE else share


# ---- pairs


def doubled_pairs(reach: Reach, s: FloatArray) -> FloatArray:
    """Return twice the (query, key) pairs of sequences, or of their first tokens, [sequences].

    s: [sequences] tokens. `Reach.pairs` counts those of one.
    """
    if reach.window is not None:
        within: FloatArray = np.minimum(s, reach.window)
        return within * (within + 1) + (2 * reach.window) * (s - within)
    if reach.chunk is not None:
        whole_chunks: FloatArray = np.floor(s / reach.chunk)
        rest = s - whole_chunks * reach.chunk
        return whole_chunks * (reach.chunk * (reach.chunk + 1)) + rest * (rest + 1)
    return s * (s + 1)


def busiest_pairs(reach: Reach, s: FloatArray, degree: int, strategy: str) -> FloatArray:
    """Return twice the pairs of the rank that has most of them, [sequences], where ranks compute
    their own slices.

    A slice at the start of its sequence has fewer than one behind it, whose queries read as far
    back as the window goes. The two slices of a rank in the middle have most, or the last slice of
    ranks that have one each. Which chunks a slice begins and ends in differs from rank to rank.
    """
    if degree == 1 or reach.is_full:
        return doubled_pairs(reach, s) / degree
    if reach.chunk is not None:
        upto = doubled_pairs(reach, _bounds(s, degree, strategy))  # [slices + 1, sequences]
        return _busiest(np.diff(upto, axis=0), degree)
    if chunks_per_rank(strategy) == 1:
        return doubled_pairs(reach, s) - doubled_pairs(reach, s - s / degree)
    middle, half = s / 2, s / (2 * degree)  # the slices are next to the middle
    return doubled_pairs(reach, middle + half) - doubled_pairs(reach, middle - half)


def _bounds(s: FloatArray, degree: int, strategy: str) -> FloatArray:
    """Return the slices' bounds, [slices + 1, sequences]. s: [sequences] tokens."""
    slices = chunks_per_rank(strategy) * degree
    bounds: FloatArray = np.floor(np.outer(np.arange(slices + 1), s) / slices)
    return bounds


def _busiest(of_slices: FloatArray, degree: int) -> FloatArray:
    """Return the sum over the slices of the rank that has most, [sequences].

    of_slices: [slices, sequences]. A rank has one slice, or the one as far from the end as its
    first is from the start, too.
    """
    of_ranks = of_slices[:degree]
    if len(of_slices) > degree:
        of_ranks = of_ranks + of_slices[: degree - 1 : -1]
    most: FloatArray = of_ranks.max(axis=0)
    return most


# ---- halos


def halo_tokens(reach: Reach) -> int:
    """Return the tokens before a query that it reads at most."""
    size = reach.window if reach.window is not None else reach.chunk
    assert size is not None, "a full layer has no halo"
    return size - 1


def halos(reach: Reach, s: FloatArray, degree: int, strategy: str) -> FloatArray:
    """Return the tokens that the busiest rank receives before a layer, [sequences].

    It has one or two slices, by strategy. Those of two ranks lie side by side in the rank
    that has the middle ones, so that either rank receives one halo only. A slice that begins where
    a chunk does has none.
    """
    if reach.chunk is not None:
        return _chunk_halos(reach.chunk, s, degree, strategy)
    others = s * (degree - 1) / degree  # tokens that the rank does not hold
    slices = 1 if degree == 2 else chunks_per_rank(strategy)
    return np.minimum(slices * halo_tokens(reach), others)


def _chunk_halos(chunk: int, s: FloatArray, degree: int, strategy: str) -> FloatArray:
    """Return `halos` of layers with chunks of `chunk` tokens, [sequences]."""
    bounds = _bounds(s, degree, strategy)  # [slices + 1, sequences]
    starts, stops = bounds[:-1], bounds[1:]
    first_keys = starts - starts % chunk
    if len(starts) > degree:
        # What a rank's earlier slice has, its later one need not receive.
        earlier = np.arange(degree)
        later = 2 * degree - 1 - earlier
        first_keys[later] = np.maximum(first_keys[later], stops[earlier])
    return _busiest(starts - first_keys, degree)


def percents(shares: Iterable[tuple[float, str]]) -> str:
    """Return shares with their names, as percents, in words for people; those of none left out."""
    return ", ".join(f"{100 * share:.3g} % {name}" for share, name in shares if share)
