"""Recurrent layers in a cost model: scans and convolutions that go through a sequence from its
first token to its last (Gated DeltaNet, KDA, Mamba 2, short convolutions).

Their seconds grow with the tokens alone. A rank that holds a segment of a sequence, tokens that
follow each other, scans it in chunks, the last of which is filled up. Where several ranks share a
sequence,

    again        every rank sums its segments up before it knows the states they begin with, and in
                 the backward their gradients: a second pass over its tokens
    summaries    a rank receives those of all segments before its own, and in the backward of all
                 behind them: a state and a transition for each, whatever the segment's length
    halos        a convolution reads the last rows before each segment, and returns their gradients

The segments of a sequence, on d ranks, and the summaries that the busiest rank sends or receives
on one way (`plan/segments.py`; tests/cost/test_recurrent.py counts them there):

                                  segments       of one rank   summaries
    ulysses                       d              1             d - 1
    a ring of one chunk a rank    d              1             d - 1
    zigzag, hybrid                2 d - 1        2             2 d - 3, of two ranks 1

Ulysses cuts the concatenation of all sequences of a group, so that no rank has more than one that
began on another: its summaries count once a group, and those of all others for each sequence.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from hf_flexseq.base.layers import RECURRENT_KINDS
from hf_flexseq.base.values import MAX_TOKENS, duration, fields_of, number, quoted, whole
from hf_flexseq.cost.kinds import FloatArray
from hf_flexseq.plan.rings import chunks_per_rank

# Tokens of a chunk of a scan (`kernels/scans`).
SCAN_CHUNK = 64

# Exchanges of a layer whose segments are parts of sequences: forward and backward.
EXCHANGES_EACH_WAY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """All recurrent layers of a model that are of one kind."""

    kind: str
    """One of `RECURRENT_KINDS`."""
    share: float
    """Share of the model's layers."""
    token_s: float
    """Seconds per token, forward and backward, of convolution and scan, all of these layers."""
    again_s: float
    """Seconds per token of the second pass, forward and backward, all of these layers."""
    chunk: int = SCAN_CHUNK
    """Tokens that a segment is filled up to a multiple of."""
    summary_bytes: float
    """Bytes of a segment's summary, all of these layers."""
    halo_bytes: float
    """Bytes of the rows before a segment that its convolutions read, all of these layers."""
    row_bytes: float
    """Bytes per token that remapping moves, forward and backward, all of these layers."""

    def __post_init__(self) -> None:
        if self.kind not in RECURRENT_KINDS:
            raise ValueError(
                f"recurrent: expected one of {', '.join(RECURRENT_KINDS)}, got {quoted(self.kind)}"
            )
        number(f"recurrent, {self.kind}, share", self.share, most=1.0)
        for name in ("token_s", "again_s"):
            duration(f"recurrent, {self.kind}, {name}", getattr(self, name))
        whole(f"recurrent, {self.kind}, chunk", self.chunk, least=1, most=MAX_TOKENS)
        for name in ("summary_bytes", "halo_bytes", "row_bytes"):
            number(f"recurrent, {self.kind}, {name}", getattr(self, name))
        if self.share == 0 and self.token_s > 0:
            raise ValueError(
                f"recurrent, {self.kind}: token_s={self.token_s} of no layers; give the share of "
                "the layers that take them, or leave the kind out"
            )

    def to_record(self) -> dict[str, Any]:
        """Return the kind as plain JSON values."""
        record = asdict(self)
        for name, value in record.items():
            if name not in ("kind", "chunk"):
                record[name] = float(value)
        return record

    @classmethod
    def from_record(cls, record: Any) -> "RecurrentLayers":
        """Return the kind that `to_record` was called on. Raises ValueError for anything else."""
        names = [one.name for one in fields(cls)]
        needed = [name for name in names if name != "chunk"]
        values = fields_of(
            record, "a kind of recurrent layers", needed=needed, optional=("chunk",)
        )
        return cls(**{name: values[name] for name in names if name in values})

    def scan_s(self, s: FloatArray, degree: int, strategy: str) -> FloatArray:
        """Return the seconds of a rank's scans and convolutions, [sequences]. s: tokens."""
        tokens = filled(s, self.chunk, degree, strategy)
        seconds = self.token_s * tokens
        if degree > 1:
            seconds = seconds + self.again_s * tokens
        return seconds

    def exchanged_bytes(self, degree: int, strategy: str) -> float:
        """Return the bytes of a sequence that the busiest rank sends or receives, both ways."""
        each_way = summaries(degree, strategy) * self.summary_bytes
        each_way += segments_of_rank(degree, strategy) * self.halo_bytes
        return EXCHANGES_EACH_WAY * each_way


def scan_chunk(kind: str) -> int:
    """Return the tokens of a chunk of layers of a kind; a convolution alone has none."""
    return 1 if kind == "convolution" else SCAN_CHUNK


# ---- segments


def segments_of_rank(degree: int, strategy: str) -> int:
    """Return the segments of a sequence that a rank of a group has at most."""
    return 2 if degree > 1 and chunks_per_rank(strategy) == 2 else 1


def summaries(degree: int, strategy: str) -> int:
    """Return the summaries of a sequence that the busiest rank sends, or receives, on one way."""
    if chunks_per_rank(strategy) == 2:
        return max(degree - 1, 2 * degree - 3)
    return degree - 1


def filled(s: FloatArray, chunk: int, degree: int, strategy: str) -> FloatArray:
    """Return the tokens of a rank with its last chunks filled up, [sequences].

    s: [sequences] tokens. Under Ulysses a sequence has few segments if it is short, and its chunks
    are spread over the group; otherwise each rank has segments of its own.
    """
    tokens: FloatArray
    if strategy in ("local", "ulysses"):
        tokens = np.ceil(s / chunk) * chunk / degree
    else:
        segments = segments_of_rank(degree, strategy)
        tokens = segments * np.ceil(s / (degree * segments * chunk)) * chunk
    return tokens
