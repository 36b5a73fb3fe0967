"""What tells the attention layers of a model apart, as data: how far back their queries read, and
how they make their scores.

    full      a query reads all tokens of its sequence up to its own
    window    the last w of these, its own among them (Mistral, Gemma, gpt-oss)
    chunk     those from the last multiple of c on, counted from the start (Llama 4)

A `Reach` says which. Attention over some queries of a sequence then is attention over *spans*:
queries that follow each other, and the keys that they read, which end with the last of the
queries. A span is a sequence of one kernel call, causal, with a window where there is one:

    window 4, queries 6 to 8        keys   3  4  5  6  7  8
                                    query 6: x  x  x  x
                                    query 7:    x  x  x  x
                                    query 8:       x  x  x  x
"""

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Queries of a sequence that follow each other, and the keys that they read; all are
    positions in the sequence."""

    first_key: int
    first_query: int
    stop: int
    """One past the last query, which is the last key, too."""

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.stop - self.first_query

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.stop - self.first_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Which keys of its sequence a query reads, up to its own.

    Raises ValueError for a window or a chunk below 1, and for both at once.
    """

    window: int | None = None
    """Tokens before the query that it reads, itself among them; None for all."""

    chunk: int | None = None
    """Tokens of a chunk of the sequence, outside of which the query reads nothing; None for the
    whole sequence."""

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ValueError(
                    f"an attention layer's {name} of {size} tokens must be at least 1"
                )
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"an attention layer has a window of {self.window} and a chunk of {self.chunk} "
                "tokens; give it one of them"
            )

    @property
    def is_full(self) -> bool:
        """Whether a query reads all keys up to its own."""
        return self.window is None and self.chunk is None

    def within(self, length: int) -> "Reach":
        """Return the reach as sequences of at most `length` tokens know it: full, where it goes
        back to their start from everywhere."""
        size = self.window or self.chunk
        return FULL if size is not None and size >= length else self

    def first_key(self, query: int) -> int:
        """Return the first key that the query at this position reads."""
        if self.window is not None:
            return max(0, query - self.window + 1)
        if self.chunk is not None:
            return query - query % self.chunk
        return 0

    def spans(self, start: int, stop: int) -> list[Span]:
        """Return what queries [start, stop) of a sequence read: one span, or one for each chunk
        that they are in."""
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
        """Return the (query, key) pairs of a sequence of `length` tokens."""
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
    """How a layer makes the scores of its softmax from products of queries and keys."""

    scale: float
    """What the products are multiplied with."""

    softcap: float | None = None
    """A scaled score s becomes softcap x tanh(s / softcap); None leaves it as it is."""


# Recurrent layers: a delta rule with one decay of a head (Gated DeltaNet), or with one of each key
# channel (KDA), a state space (Mamba 2), and a short convolution with gates alone (LFM2).
RECURRENT_KINDS = ("gated_delta", "kimi_delta", "mamba2", "convolution")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentShape:
    """The sizes of a recurrent layer.

    Its state is [value_heads, key_dim, value_dim]; a convolution alone has none.
    """

    kind: str
    """One of `RECURRENT_KINDS`."""

    key_heads: int = 0
    """Heads of queries and keys; of a Mamba 2, its groups of B and C."""

    value_heads: int = 0
    """Heads of values, and of the state."""

    key_dim: int = 0
    """Size of a head of queries and keys; of a Mamba 2, that of its state."""

    value_dim: int = 0
    """Size of a head of values."""

    width: int
    """Rows that the convolution before the scan reads, the token's own among them."""

    channels: int
    """Columns of these rows."""

    def __post_init__(self) -> None:
        if self.kind not in RECURRENT_KINDS:
            raise ValueError(
                f"a recurrent layer of the kind {self.kind!r} is not known here; these are: "
                f"{', '.join(RECURRENT_KINDS)}"
            )

    @property
    def state_numbers(self) -> int:
        """Numbers in the state of all heads."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def transition_numbers(self) -> int:
        """Numbers in what takes the state before a segment to the one behind it, all heads."""
        if self.kind in ("gated_delta", "kimi_delta"):
            return self.value_heads * self.key_dim * self.key_dim
        return self.value_heads if self.kind == "mamba2" else 0

    def __str__(self) -> str:
        return self.kind.replace("_", " ")
