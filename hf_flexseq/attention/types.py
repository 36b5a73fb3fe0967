"""Types that every kind of attention in this package shares.

A plan gives a rank one *zone* in every group it works in: `plan.shard.Zone` says, as plain data,
which tokens the rank holds there. The attention of such a zone is computed by an object that
satisfies `ZoneAttention`:

    strategy              class
    local                 local.LocalZone
    ulysses, hybrid       ulysses.UlyssesZone (around a local.LocalZone, or a ring across nodes)
    zigzag, balanced      ring.RingZone
    allgather             allgather.AllGatherZone
    any, deterministic    deterministic.DeterministicZone
    no group at all       NoZone

Forward and backward are generators, so that `weave.run_zones` can let one zone compute while
the transfers of another one are on their way.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from hf_flexseq.attention.weave import END, ZoneSteps

Tensors = tuple[torch.Tensor, ...]


def joined(parts: Sequence[torch.Tensor], *, dim: int = 0) -> torch.Tensor:
    """Concatenate the parts along `dim`; a single part is returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=dim)


class Saved(NamedTuple):
    """The tensors, and what they do not tell, that a forward leaves for its backward."""

    # In whichever layout and order the attention wants; the log-sum-exp is the last one.
    tensors: Tensors

    # KV heads of the layer, where the tensors do not tell: a rank of an Ulysses group may work on
    # no head at all, but is still sent gradients of all KV heads. None elsewhere.
    kv_heads: int | None = None


class Attention(Protocol):
    """Causal attention over some rows, in two generators that yield when they want to go on.

    Shapes: q, out, dout [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim].
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Attend, and return out [tokens, heads, head_dim] with what `backward` needs."""
        ...

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        ...

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return what `backward` does, for a checkpointed layer (`remat.py`).

        q, k, v, out, dout: this rank's rows, which the replay of the layer has. lse: the last of
        the tensors that `forward` saved. A pipeline's chunks keep nothing for a replay, so an
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

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return q [0, heads, head_dim] as the result without rows."""
        yield END
        no_lse = q.new_empty(0)
        return q, Saved((k, v, no_lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [0, heads, head_dim], dk and dv [0, kv_heads, head_dim]."""
        yield END
        k, v, _ = saved.tensors
        return dout, k, v

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return dq [0, heads, head_dim], dk and dv [0, kv_heads, head_dim]."""
        return self.backward(dout, Saved((k, v, lse)), scale)
