"""Cut the queries of one sequence into blocks, and say which keys each block reads and which of
these are hidden from some of its queries.

The last query reads the last key, and each query before it one key fewer (`Segments`, causal).
With a window w a query reads the last w keys that it may. So a block of n queries reads one run
of at most n + w - 1 keys, and what is hidden in it is the same for all blocks:

    window 3, block of 3 queries     keys  -2 -1  0  1  2
                                 query 0:   x  x  x
                                 query 1:      x  x  x
                                 query 2:         x  x  x

The mask of a whole block is made once and sliced for shorter ones: it has [block, block + w - 1]
elements, whatever the sequence's length.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Queries of a sequence that follow each other, and the keys that any of them reads."""

    rows: slice
    """The queries, as rows of the sequence's queries."""
    keys: slice
    """The keys, as rows of the sequence's keys."""


def blocks(
    queries: int, keys: int, size: int, *, causal: bool, window: int | None
) -> Iterator[Block]:
    """Iterate over blocks of at most `size` queries, of a sequence of `queries` and `keys`."""
    earlier = keys - queries  # keys before the first query's own
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first_key = 0 if window is None else max(0, earlier + start - window + 1)
        last_key = earlier + stop if causal else keys
        yield Block(slice(start, stop), slice(first_key, last_key))


def band(size: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a block of `size` queries adds to its scores under a window: 0, or -inf where
    a key is hidden; [size, size + window - 1], the last `size` keys the queries' own."""
    everywhere = torch.full((size, size + window - 1), -torch.inf, dtype=dtype)
    # Hidden are the keys after a query's own, and those before its window.
    after = everywhere.triu(window)
    before = everywhere.tril(-1)
    # triu and tril leave zeros, and -inf + 0 is -inf
    return after + before


def band_of(whole: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Return the part of a block's `band` for fewer queries, which read `keys` keys:
    [queries, keys], a view."""
    size, width = whole.shape
    stop = width - size + queries  # one past the last query's own key
    return whole[:queries, stop - keys : stop]
