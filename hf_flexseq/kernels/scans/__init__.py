"""Scans of recurrent layers over *segments*, runs of tokens of one sequence, with tensors of one
rank alone.

    state after a segment  =  transition (state before it)  +  end state from zero

When a sequence has segments on several ranks, `recurrent/scan.py` exchanges summaries between
them: a `Scan` returns its summaries, and then takes the true states. The split into four methods
around two exchanges follows Megatron's `LinearAttentionCPBackend`.

    choose.py        which scan runs a kind of layer on a device
    fla.py           a scan with flash-linear-attention's kernels, on CUDA
    chunked_scan.py  a scan from chunk to chunk, in torch
    grid.py          rows of tokens <-> chunks
    gated_delta.py, kimi.py, mamba2.py
                     the effect of a chunk on a state, by kind of layer
"""

from collections.abc import Sequence
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]
# of the inputs, and of the states before all segments
Gradients = tuple[tuple[torch.Tensor | None, ...], torch.Tensor]


class Scan(Protocol):
    """A recurrence through the segments of a micro-batch, made for their lengths.

    Shapes: a state of a segment [H, K, V]; segments are named by their index.
    """

    def summarise(
        self, inputs: Tensors, states_of: Sequence[int], transitions_of: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the end states from zero of some segments, [n, H, K, V], and the transitions of
        some: [m, H, K, K], or [m, H, K] or [m, H] where they are diagonal."""
        ...

    def forward(
        self, inputs: Tensors, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Return the output, the states behind all segments [segments, H, K, V], and the tensors
        saved for `backward` besides the inputs.

        states: before all segments, [segments, H, K, V]; None for zeros.
        """
        ...

    def resume(self, inputs: Tensors, states: torch.Tensor | None) -> Tensors:
        """Return the tensors that `forward` saves, without its output."""
        ...

    def summarise_backward(
        self, dout: torch.Tensor, inputs: Tensors, saved: Tensors, chosen: Sequence[int]
    ) -> torch.Tensor:
        """Return the gradients [n, H, K, V] of states before segments, from their own output."""
        ...

    def backward(
        self, dout: torch.Tensor, dfinals: torch.Tensor | None, inputs: Tensors, saved: Tensors
    ) -> Gradients:
        """Return the gradients of the inputs, and of the states before all segments [segments, H,
        K, V].

        dfinals: of the states behind all segments, [segments, H, K, V]; None for zeros.
        """
        ...


def apply_transition(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return transition (state) [n, H, K, V], from [n, H, K, K], [n, H, K] or [n, H]."""
    if transition.dim() == state.dim():
        return transition @ state
    return _diagonal(transition, state) * state


def apply_transposed(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the transposed transition of a state; shapes as for `apply_transition`."""
    if transition.dim() == state.dim():
        return transition.transpose(-1, -2) @ state
    return _diagonal(transition, state) * state


def _diagonal(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return a diagonal transition [n, H] or [n, H, K] with as many dimensions as the state."""
    missing = state.dim() - transition.dim()
    return transition.view(*transition.shape, *(1,) * missing)
