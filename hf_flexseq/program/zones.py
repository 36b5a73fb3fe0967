"""The interface of every kind of attention in this package.

A plan gives a rank one *zone* in every group it works in: `plan.shard.Zone` says, as plain data,
which tokens the rank holds there. The attention of such a zone is compiled by an object that
satisfies `ZoneAttention`:

    strategy              class
    local                 calls.CallsZone
    ulysses, hybrid       ulysses.UlyssesZone (around a calls.CallsZone, or a ring across nodes)
    rings                 ring.RingZone
    any ring, of layers   halo.HaloZone
      with a window or a chunk
    no group at all       calls.CallsZone without calls

Forward and backward are generators, so that `weave.run_zones` can let one zone compute while
the transfers of another one are on their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hf_flexseq.base.topology import Topology
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.heads import PIECE_ROWS
from hf_flexseq.program.instructions import Value
from hf_flexseq.program.weave import ZoneSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Properties that programs depend on besides plan and layer; the same on all ranks."""

    topology: Topology

    device: str
    """"cpu" or "cuda": how large calls must be to be worth their launches."""
    wide_gradients: bool
    """True if the kernel leaves gradients of 16-bit tensors in float32."""

    def piece_rows(self, ranks: Sequence[int]) -> int | None:
        """Return the query heads x tokens that make a piece of the heads of `ranks` worth a kernel
        call; None inside a node, where pieces lose more in kernels than they hide."""
        if not self.topology.spans_nodes(ranks[0], ranks[-1] + 1):
            return None
        return PIECE_ROWS["cpu" if self.device == "cpu" else "cuda"]


class Sinks(NamedTuple):
    """Scores that take part in every softmax of a head, without keys or values: one a head.

    They come once, after the last merge. With s a head's sink and lse, out the result without it,

        lse' = logaddexp(lse, s)    out' = out exp(lse - lse')

    and the ordinary backward of out' and lse' gives dq, dk and dv, while

        ds = - sum over queries of exp(s - lse') <dout, out'>
    """

    values: Value
    """[H] in WIDE."""
    grads: Value | None = None
    """[H] in WIDE, to which the backward adds; None in the forward."""

    def of_heads(self, b: Builder, start: int, stop: int) -> "Sinks":
        """Return the sinks of heads [start, stop), views."""
        grads = None if self.grads is None else b.part(self.grads, start, stop)
        return Sinks(b.part(self.values, start, stop), grads)

    def apply(self, b: Builder, out: Value, lse: Value) -> None:
        """Let the sinks take part in a complete result, in place: out [t, H, D], lse [H, t]."""
        if out.rows:
            b.sink(out, lse, self.values)

    def add_gradient(self, b: Builder, dout: Value, out: Value, lse: Value) -> None:
        """Add gradients of some queries: dout, out [t, H, D], lse [H, t], sinks included."""
        assert self.grads is not None, "a forward has no gradients"
        if out.rows:
            b.sink_gradient(self.grads, self.values, dout, out, lse)


class LayerRows(NamedTuple):
    """Rows of a replayed layer, and the gradient of its result. Shapes: as in `Attention`."""

    q: Value
    k: Value
    v: Value
    out: Value
    dout: Value

    lse: Value
    """The last of the values that `Attention.forward` saved."""


class Attention(Protocol):
    """Causal attention over some rows, in generators that emit instructions, and yield when they
    want to go on.

    Shapes: q, out, dout [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]. sinks: of
    the heads, where the layer has any.
    """

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Attend, and return out [tokens, heads, head_dim] with the values that `backward` needs,
        in its layout and order; the log-sum-exp is the last value."""
        ...

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        ...

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return the same gradients as `backward`, for a checkpointed layer
        (`attention/remat.py`).

        A pipeline's chunks keep nothing for a replay, so an attention that serves them alone
        inherits this refusal.
        """
        raise AssertionError(f"{type(self).__name__} keeps nothing for the replay of a layer")


class ZoneAttention(Attention, Protocol):
    """Attention over the rows that this rank holds for one group."""

    rows: slice  # where they stand among all rows that the rank holds in attention
