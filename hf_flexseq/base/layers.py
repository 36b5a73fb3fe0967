"""Attention patterns and scores of a model's layers, as data.

    full      a query reads all tokens of its sequence up to its own
    window    the last w of these, its own among them (Mistral, Gemma, gpt-oss)
    chunk     those from the last multiple of c on, counted from the start (Llama 4)

`Reach` describes the pattern. Attention over some queries of a sequence is attention over *spans*:
consecutive queries and the keys that they read, which end with the last query. A span is a
sequence of one kernel call, causal, possibly with a window:

    window 4, queries 6 to 8        keys   3  4  5  6  7  8
                                    query 6: x  x  x  x
                                    query 7:    x  x  x  x
                                    query 8:       x  x  x  x
"""

from dataclasses import dataclass
from typing import NamedTuple

from hf_flexseq.base.values import one_of


class Span(NamedTuple):
    """Consecutive queries and the keys that they read, as positions in their sequence."""

    first_key: int
    first_query: int
    stop: int
    """Position after the last query, which is also the last key."""

    @property
    def queries(self) -> int:
        return self.stop - self.first_query

    @property
    def keys(self) -> int:
        return self.stop - self.first_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """The attention pattern: keys that a query reads, up to its own position.

    Raises ValueError for a window or a chunk below 1, and for both at once.
    """

    window: int | None = None
    """Number of tokens that a query reads, its own included; None for all."""
    chunk: int | None = None
    """Tokens of a chunk, outside of which the query reads nothing; None for the whole sequence."""

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ValueError(
                    f"an attention layer's {name} of {size} tokens must be at least 1"
                )
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"an attention layer has a window of {self.window} and a chunk of {self.chunk} "
                "tokens: set one of them"
            )

    @property
    def is_full(self) -> bool:
        """True if a query reads all keys up to its own."""
        return self.window is None and self.chunk is None

    def first_key(self, query: int) -> int:
        """Return the first key that a query reads."""
        if self.window is not None:
            return max(0, query - self.window + 1)
        if self.chunk is not None:
            return query - query % self.chunk
        return 0

    def spans(self, start: int, stop: int) -> list[Span]:
        """Return the spans of queries [start, stop): one, or one per chunk."""
        if start == stop:
            return []
        if self.chunk is None:
            return [Span(self.first_key(start), start, stop)]
        spans = []
        while start < stop:
            end = min(stop, self.first_key(start) + self.chunk)
            spans.append(Span(self.first_key(start), start, end))
            start = end
        return spans

    def pairs(self, length: int) -> int:
        """Return the number of (query, key) pairs of a sequence of `length` tokens."""
        if self.window is not None:
            short = min(length, self.window)  # queries that read all keys up to their own
            return short * (short + 1) // 2 + (length - short) * self.window
        if self.chunk is not None:
            whole, rest = divmod(length, self.chunk)
            return whole * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        return length * (length + 1) // 2

    def __str__(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        if self.chunk is not None:
            return f"chunk {self.chunk}"
        return "full"


FULL = Reach()


class Scores(NamedTuple):
    """Scaling of a layer's attention scores."""

    scale: float
    """Factor of the products of queries and keys."""
    softcap: float | None = None
    """Softcap c: a scaled score s becomes c x tanh(s / c). None leaves it unchanged."""


# Recurrent layers: a delta rule with one decay per head (Gated DeltaNet) or per key channel (KDA),
# a state space (Mamba 2), and a gated short convolution alone (LFM2).
RECURRENT_KINDS = ("gated_delta", "kimi_delta", "mamba2", "convolution")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentShape:
    """The sizes of a recurrent layer.

    Its state is [value_heads, key_dim, value_dim]; a convolution alone has none.
    """

    kind: str
    """One of `RECURRENT_KINDS`."""
    key_heads: int = 0
    """Heads of queries and keys; for Mamba 2, its groups of B and C."""
    value_heads: int = 0
    """Heads of values, and of the state."""
    key_dim: int = 0
    """Size of a head of queries and keys; for Mamba 2, of its state."""
    value_dim: int = 0
    """Size of a head of values."""
    width: int
    """Rows read by the convolution before the scan, including the token's own."""
    channels: int
    """Columns of these rows."""

    def __post_init__(self) -> None:
        one_of("kind of a recurrent layer", self.kind, RECURRENT_KINDS)

    @property
    def state_numbers(self) -> int:
        """Numbers in the states of all heads."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def transition_numbers(self) -> int:
        """Numbers in the transition from the state before a segment to that after it."""
        if self.kind in ("gated_delta", "kimi_delta"):
            return self.value_heads * self.key_dim * self.key_dim
        return self.value_heads if self.kind == "mamba2" else 0

    def __str__(self) -> str:
        return self.kind.replace("_", " ")
