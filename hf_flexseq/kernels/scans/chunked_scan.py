"""A scan from chunk to chunk.

Whatever the layer is, a chunk of C tokens does to a state h [K, V] of a head

    v  = u - w h                  [C, V]  written to h; w is None where nothing is read before
    o  = q h + attn v             [C, V]  the output
    h' = decay h + k^T v          [K, V]  the state after it; decay is one number, or K

with q, k, w [C, K], u [C, V] and attn [C, C], which are worked out for all chunks at once
(`gated_delta.py` and its neighbours). Only h goes from chunk to chunk; all else is batched over
chunks and heads. Backward, with D the gradient of h':

    dv = attn^T do + k D          dh = q^T do + decay D - w^T dv
    dq = do h^T    dattn = do v^T    dk = v D^T    dw = -dv h^T    du = dv    ddecay = <D, h>

where, again, only D goes from chunk to chunk. The states before all chunks and the written values
v are kept for the backward: K x V / C + V numbers per token and head, besides the inputs'
3 K + V + C. Rejected: scanning again in the backward, which saves a quarter of this and takes a
tenth longer.

The slow reference goes token by token, in tests/kernels/scans.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.kernels.scans import Gradients, Tensors
from hf_flexseq.kernels.scans.grid import ChunkGrid, ChunkStep


class _Chunks(NamedTuple):
    """The inputs of all chunks, N of them, with H heads."""

    q: torch.Tensor
    """[N, H, C, K]"""
    k: torch.Tensor
    """[N, H, C, K]"""
    w: torch.Tensor | None
    """[N, H, C, K]"""
    u: torch.Tensor
    """[N, H, C, V]"""
    attn: torch.Tensor
    """[N, H, C, C]"""
    decay: torch.Tensor
    """[N, H] or [N, H, K]"""

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """H, K, V."""
        return (self.k.shape[1], self.k.shape[3], self.u.shape[3])

    def decayed(self, chunks: slice | torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return states [n, H, K, any] times the decay of n chunks."""
        decay = self.decay[chunks]
        return state * decay.view(*decay.shape, *(1,) * (state.dim() - decay.dim()))


class ChunkedScan:
    """Scan of chunks: inputs q, k, w, u, attn, decay, output [N, H, C, V]."""

    def __init__(self, grid: ChunkGrid) -> None:
        self.grid = grid
        self._all = range(len(grid.counts))

    # ---- forward

    def summarise(
        self, inputs: Tensors, states_of: Sequence[int], transitions_of: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the end states from zero of some segments, [n, H, K, V], and the transitions of
        some, [m, H, K, K], or [m, H, K] or [m, H] where nothing is read before it is written."""
        x = _Chunks(*inputs)
        if x.w is None:
            return self._end_states(x, states_of), self._decays(x, transitions_of)
        heads, keys, values = x.state_shape
        # One scan of [transition | end state] for segments of which both are asked.
        of_wide = {segment: i for i, segment in enumerate(transitions_of)}
        both = [segment for segment in states_of if segment in of_wide]
        alone = [segment for segment in states_of if segment not in of_wide]
        wide = x.u.new_zeros(len(transitions_of), heads, keys, keys + values)
        wide[..., :keys] = torch.eye(keys, dtype=x.u.dtype, device=x.u.device)
        wide = self._scan(x, transitions_of, wide)
        states = x.u.new_empty(len(states_of), heads, keys, values)
        place = {segment: i for i, segment in enumerate(states_of)}
        if alone:
            states[self.grid.index([place[one] for one in alone])] = self._end_states(x, alone)
        if both:
            taken = wide[self.grid.index([of_wide[one] for one in both])]
            states[self.grid.index([place[one] for one in both])] = taken[..., keys:]
        return states, wide[..., :keys]

    def forward(
        self, inputs: Tensors, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Return out [N, H, C, V], the states behind all segments [segments, H, K, V], and, for
        the backward, the states before all chunks [N, H, K, V] and the chunks' written values
        [N, H, C, V]."""
        x = _Chunks(*inputs)
        finals, (before, written) = self._scan_all(x, states)
        out = x.q @ before
        _add_product(out, x.attn, written)
        return out, finals, (before, written)

    def resume(self, inputs: Tensors, states: torch.Tensor | None) -> Tensors:
        """Return the tensors that `forward` saves."""
        return self._scan_all(_Chunks(*inputs), states)[1]

    def _scan_all(
        self, x: _Chunks, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the states behind all segments [segments, H, K, V], and those before all chunks
        [N, H, K, V] with the chunks' written values [N, H, C, V]."""
        before = x.u.new_empty(x.u.shape[0], *x.state_shape)
        written = torch.empty_like(x.u, memory_format=torch.contiguous_format)
        if states is None:
            states = x.u.new_zeros(len(self._all), *x.state_shape)
        return self._scan(x, self._all, states, (before, written)), (before, written)

    def _end_states(self, x: _Chunks, chosen: Sequence[int]) -> torch.Tensor:
        """Return the end states from zero of chosen segments, [n, H, K, V]."""
        return self._scan(x, chosen, x.u.new_zeros(len(chosen), *x.state_shape))

    def _scan(
        self,
        x: _Chunks,
        chosen: Sequence[int],
        state: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the states behind chosen segments, from those before [n, H, K, any], to whose
        last V columns chunks write. saved: see `_scan_all`, which has it filled."""
        values = x.state_shape[2]
        ordered, back = self.grid.order(chosen)
        state = state[ordered]
        ends = torch.empty_like(state)
        for step, following in _with_next(self.grid.steps(chosen)):
            here = step.chunks
            if x.w is None:
                value = x.u[here]
            else:
                value = x.w[here] @ state
                value.neg_()
                value[..., -values:] += x.u[here]
            if saved is not None:
                before, written = saved
                before[here] = state
                written[here] = value
            state = x.decayed(here, state)
            _add_product(state, x.k[here].transpose(-1, -2), value)
            ends[following : step.active] = state[following:]
            state = state[:following]
        return ends[back]

    def _decays(self, x: _Chunks, chosen: Sequence[int]) -> torch.Tensor:
        """Return the products of the decays of chosen segments: [m, H] or [m, H, K]."""
        ordered, back = self.grid.order(chosen)
        product = x.decay.new_ones(len(ordered), *x.decay.shape[1:])
        for step in self.grid.steps(chosen):
            product[: step.active] *= x.decay[step.chunks]
        return product[back]

    # ---- backward

    def summarise_backward(
        self, dout: torch.Tensor, inputs: Tensors, saved: Tensors, chosen: Sequence[int]
    ) -> torch.Tensor:
        """Return the gradients [n, H, K, V] of states before segments. dout: [N, H, C, V]."""
        x = _Chunks(*inputs)
        _, back = self.grid.order(chosen)
        grads = x.u.new_zeros(len(chosen), *x.state_shape)
        for step in reversed(self.grid.steps(chosen)):
            here = step.chunks
            of_out = dout[here]
            grads[: step.active] = self._before(x, here, of_out, grads[: step.active])[0]
        return grads[back]

    def backward(
        self, dout: torch.Tensor, dfinals: torch.Tensor | None, inputs: Tensors, saved: Tensors
    ) -> Gradients:
        """Return the gradients of q, k, w, u, attn and decay, and of the states before all
        segments [segments, H, K, V]. dout: [N, H, C, V]; dfinals: [segments, H, K, V]."""
        x = _Chunks(*inputs)
        before, written = saved
        ordered, back = self.grid.order(self._all)
        # 1. from the last chunks to the first: the gradient behind each chunk [N, H, K, V], and of
        #    what it writes [N, H, C, V]
        behind = torch.empty_like(before)
        dwritten = torch.empty_like(written)
        if dfinals is None:
            grads = x.u.new_zeros(len(ordered), *x.state_shape)
        else:
            grads = dfinals[ordered]
        for step in reversed(self.grid.steps(self._all)):
            here = step.chunks
            behind[here] = grads[: step.active]
            dbefore, dvalue = self._before(x, here, dout[here], grads[: step.active])
            dwritten[here] = dvalue
            grads[: step.active] = dbefore
        dstates = grads[back]

        # 2. all chunks at once
        dq = dout @ before.transpose(-1, -2)
        dattn = dout @ written.transpose(-1, -2)
        dk = written @ behind.transpose(-1, -2)
        dw = None
        if x.w is not None:
            dw = dwritten @ before.transpose(-1, -2)
            dw.neg_()
        ddecay = (behind * before).sum(-1)  # [N, H, K]
        if x.decay.dim() == 2:
            ddecay = ddecay.sum(-1)
        return (dq, dk, dw, dwritten, dattn, ddecay), dstates

    def _before(
        self,
        x: _Chunks,
        here: slice | torch.Tensor,
        dout: torch.Tensor,
        dstate: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the states before some chunks [n, H, K, V] and of the chunks'
        written values [n, H, C, V].

        dout: gradients of the chunks' output. dstate: gradients of the states behind the chunks
        """
        dvalue = x.attn[here].transpose(-1, -2) @ dout
        _add_product(dvalue, x.k[here], dstate)
        dbefore = x.decayed(here, dstate)
        _add_product(dbefore, x.q[here].transpose(-1, -2), dout)
        if x.w is not None:
            _add_product(dbefore, x.w[here].transpose(-1, -2), dvalue, alpha=-1)
        return dbefore, dvalue


def _with_next(steps: Sequence[ChunkStep]) -> list[tuple[ChunkStep, int]]:
    """Return each step with how many segments go on in the next one."""
    following = [step.active for step in steps[1:]] + [0]
    return list(zip(steps, following, strict=False))


def _add_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1
) -> None:
    """Add alpha a b to a total, in place: [n, H, x, y] from [n, H, x, z] and [n, H, z, y]."""
    flat = total.view(-1, *total.shape[2:])
    flat.baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=alpha)
