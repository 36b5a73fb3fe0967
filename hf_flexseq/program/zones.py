"""What every kind of attention in this package has in common.

A plan gives a rank one *zone* in every group it works in: `plan.shard.Zone` says, as plain data,
which tokens the rank holds there. The attention of such a zone is compiled by an object that
satisfies `ZoneAttention`:

    strategy              class
    local                 local.LocalZone
    ulysses, hybrid       ulysses.UlyssesZone (around a local.LocalZone, or a ring across nodes)
    zigzag, balanced      ring.RingZone
    allgather             gathered.AllGatherZone
    any, deterministic    deterministic.DeterministicZone
    no group at all       NoZone

Forward and backward are generators, so that `weave.run_zones` can let one zone compute while
the transfers of another one are on their way.
"""

from typing import Protocol

from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import INPUT, WIDE, Value
from hf_flexseq.program.weave import END, ZoneSteps


class Attention(Protocol):
    """Causal attention over some rows, in generators that emit instructions, and yield when they
    want to go on.

    Shapes: q, out, dout [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim].
    """

    def forward(self, b: Builder, q: Value, k: Value, v: Value) -> ZoneSteps[tuple[Value, Values]]:
        """Attend, and return out [tokens, heads, head_dim] with what `backward` needs, in
        whichever layout and order that wants; the log-sum-exp is the last value."""
        ...

    def backward(self, b: Builder, dout: Value, saved: Values) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        ...

    def backward_of_rows(
        self, b: Builder, q: Value, k: Value, v: Value, out: Value, dout: Value, lse: Value
    ) -> ZoneSteps[Values]:
        """Return what `backward` does, for a checkpointed layer (`attention/remat.py`).

        q, k, v, out, dout: this rank's rows, which the replay of the layer has. lse: the last of
        the values that `forward` saved. A pipeline's chunks keep nothing for a replay, so an
        attention that serves them alone inherits this refusal.
        """
        raise AssertionError(f"{type(self).__name__} keeps nothing for the replay of a layer")


class ZoneAttention(Attention, Protocol):
    """Attention over the rows that this rank holds for one group."""

    rows: slice  # where they stand among all rows that the rank holds in attention


class NoZone:
    """The attention of a rank that works in no group and holds rows of others (`remap.py`)."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = slice(0, 0)

    def forward(self, b: Builder, q: Value, k: Value, v: Value) -> ZoneSteps[tuple[Value, Values]]:
        """Return a result [0, heads, head_dim] without rows."""
        yield END
        return b.empty(q.shape, INPUT), (b.empty((0,), WIDE),)

    def backward(self, b: Builder, dout: Value, saved: Values) -> ZoneSteps[Values]:
        """Return dq [0, heads, head_dim], dk and dv [0, kv_heads, head_dim]."""
        yield END
        shape = b.shape
        dq = b.empty((0, shape.query_heads, shape.head_dim), INPUT)
        dk = b.empty((0, shape.kv_heads, shape.head_dim), INPUT)
        return dq, dk, b.empty(dk.shape, INPUT)

    def backward_of_rows(
        self, b: Builder, q: Value, k: Value, v: Value, out: Value, dout: Value, lse: Value
    ) -> ZoneSteps[Values]:
        """Return dq [0, heads, head_dim], dk and dv [0, kv_heads, head_dim]."""
        return self.backward(b, dout, (lse,))
