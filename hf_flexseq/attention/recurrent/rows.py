"""Rows of a recurrent layer on their way between ranks, as autograd nodes around programs of
`program/segments.py`.

    halo        the rows before this rank's segments
    exchange    one program, without autograd
"""

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.attention.recurrent.carry import Carrying
from hf_flexseq.attention.remat import Kept, KeptAttention, Region, kept_region
from hf_flexseq.base.layers import Scores
from hf_flexseq.program.compile import HALO, HALO_RETURN
from hf_flexseq.program.instructions import RowShape

NO_SCORES = Scores(1.0)  # which programs without attention do not read


class RecurrentContext(Protocol):
    """A recurrent layer's knowledge of the tokens that this rank works on."""

    @property
    def programs(self) -> MicroBatchPrograms:
        """Programs of this rank."""

    @property
    def kept(self) -> KeptAttention | None:
        """Results that wait for the replay of their layers; None where none are kept."""

    def carrying(self, *, keeps_grad: bool) -> Carrying | None:
        """Return the carry of this call between chunks; None if all sequences are whole."""


def check_rows(x: torch.Tensor, seq_ctx: RecurrentContext) -> None:
    """Raise ValueError unless x [tokens, ...] has as many rows as the shard has tokens."""
    tokens = seq_ctx.programs.parts.tokens
    if x.shape[0] != tokens:
        raise ValueError(
            f"the shard has {tokens} tokens, but a recurrent layer was given {tuple(x.shape)}"
        )


def exchange(
    what: str, rows: torch.Tensor, seq_ctx: RecurrentContext, *, width: int = 1
) -> torch.Tensor:
    """Run one program of recurrent layers (`program.compile.of_rows`): rows [n, columns] -> [m,
    columns]."""
    shape = RowShape(rows.shape[-1], str(rows.dtype).removeprefix("torch."), width)
    program = seq_ctx.programs.find(what, shape)
    (out,), _ = program.run((rows,), NO_SCORES)
    return out


# ---- halos


def carried_halo(rows: torch.Tensor, width: int, carrying: Carrying) -> torch.Tensor:
    """Return the rows before a part of a cut sequence, [W - 1, channels], zeros before its start,
    and keep the part's last ones. rows: the last rows of the part, [n, channels], n < W."""
    given: torch.Tensor = _CarriedHalo.apply(rows, width, carrying)
    return given


class _CarriedHalo(torch.autograd.Function):
    """Rows that the part before has left in the forward; the backward leaves their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, width: int, carrying: Carrying) -> torch.Tensor:
        """Return given [W - 1, channels]; keep the last W - 1 of [given | rows]."""
        ctx.carrying = carrying
        ctx.rows = rows.shape[0]
        given = carrying.given()
        if given is None:
            given = rows.new_zeros(width - 1, rows.shape[1])
        carrying.store(torch.cat((given, rows))[rows.shape[0] :])
        return given.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgiven: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return drows [n, channels] for the rows that the next part was given."""
        after = ctx.carrying.gradient_after()  # [W - 1, channels]
        if after is None:
            after = torch.zeros_like(dgiven)
        # The next part was given rows [n, n + W - 1) of [given | rows].
        dgiven = dgiven.clone()
        passed_on = dgiven.shape[0] - ctx.rows
        dgiven[ctx.rows :] += after[:passed_on]
        ctx.carrying.leave_gradient(dgiven)
        return after[passed_on:], None, None


def halo(edges: torch.Tensor, width: int, seq_ctx: RecurrentContext) -> torch.Tensor:
    """Return the rows of other ranks just before this rank's segments, [R, channels].

    edges: this rank's rows at the edges of its segments, [E, channels]; see
    `program.segments.Halo`. width: rows that the convolution reads.
    """
    received: torch.Tensor = _Halo.apply(edges, width, seq_ctx, kept_region(seq_ctx.kept))
    return received


class _Halo(torch.autograd.Function):
    """Rows that others read in the forward, and whose gradients come back in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        edges: torch.Tensor,
        width: int,
        seq_ctx: RecurrentContext,
        region: Region | None,
    ) -> torch.Tensor:
        """Return received [R, channels]: fetched in the first run, taken in a replay."""
        ctx.seq_ctx = seq_ctx
        ctx.width = width
        store = seq_ctx.kept
        if region is None or store is None:
            return exchange(HALO, edges, seq_ctx, width=width)
        kept = store.take(region)
        if kept is None:
            kept = Kept.of(exchange(HALO, edges, seq_ctx, width=width))
        if not region.replays:
            store.put(region, kept)
        # What is kept must not come to hold the graph.
        return kept.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the edges [E, channels], from their readers' gradients."""
        edges = exchange(HALO_RETURN, grads.contiguous(), ctx.seq_ctx, width=ctx.width)
        return edges, None, None, None
