"""A scan with the Triton kernels of flash-linear-attention (the package fla-core), on CUDA.

Its public functions take rows of packed segments with a state before each, and return rows and
the states behind:

    end states from zero    the states behind, from states of zero
    transitions             the states behind, from the identity with values of zero
    gradients               those of autograd, with gradients for rows and for the states behind

Autograd's graph does not outlive the function that calls a `Scan`, so the backward calls the
forward again; all that is saved are the states before. Rejected: the package's inner functions,
which would save the second forward, and change with every version.

Inputs are a layer's own: q, k [tokens, key_heads, K], v [tokens, H, V], g [tokens, H] or [tokens,
H, K], beta [tokens, H]; the output is rows, too, [tokens, H, V].

The slow reference goes token by token, in tests/kernels/scans; with a stand-in for the package
that does the same, the calls are tested without a GPU.

Mamba 2 has no such scan: `mamba_chunk_scan_combined` of mamba-ssm takes states for the rows of a
batch, not for packed segments, and returns those behind packed segments without a gradient.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Gradients, Tensors
from hf_flexseq.kernels.upload import to_device


class Rule(Protocol):
    """A function of flash-linear-attention: `chunk_gated_delta_rule` or `chunk_kda`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [1, tokens, H, V] and the states behind [segments, H, K, V]."""
        ...


def gated_delta_rule() -> Rule:
    """Return the gated delta rule of flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: Rule = chunk_gated_delta_rule
    return rule


def kimi_delta_rule() -> Rule:
    """Return Kimi's delta rule of flash-linear-attention."""
    from fla.ops.kda import chunk_kda

    rule: Rule = chunk_kda
    return rule


class _Rows:
    """The rows of some segments."""

    __slots__ = ("cu_seqlens", "cu_seqlens_cpu", "parts")

    def __init__(
        self, parts: Sequence[slice] | None, lengths: Sequence[int], device: torch.device
    ) -> None:
        """parts: where the segments stand in all rows; None for all of these."""
        self.parts = parts
        ends = accumulate(lengths, initial=0)
        self.cu_seqlens_cpu = torch.tensor(list(ends))
        self.cu_seqlens = to_device(self.cu_seqlens_cpu, device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of these segments: [tokens, ...] -> [tokens of them, ...]."""
        if self.parts is None:
            return x
        return torch.cat([x[:0], *(x[part] for part in self.parts)])


class FlaScan:
    """The Scan protocol on the rows q, k, v, g, beta of a delta rule."""

    __slots__ = ("_device", "_l2norm", "_lengths", "_rows_of", "_rule")

    def __init__(
        self, lengths: Sequence[int], device: torch.device, rule: Rule, *, l2norm: bool
    ) -> None:
        """lengths: tokens of each segment, by row. l2norm: True to normalise q and k."""
        self._lengths = tuple(lengths)
        self._device = device
        self._rule = rule
        self._l2norm = l2norm
        self._rows_of: dict[tuple[int, ...] | None, _Rows] = {}

    def summarise(
        self, inputs: Tensors, states_of: Sequence[int], transitions_of: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some segments' end states from zero [n, H, K, V] and transitions [m, H, K, K]."""
        states = self._zeros(inputs, len(states_of))
        if states_of:
            rows = self._rows(states_of)
            states = self._run(rows, [rows.take(x) for x in inputs], states)[1]
        transitions = self._identities(inputs, len(transitions_of))
        if transitions_of:
            rows = self._rows(transitions_of)
            q, k, v, g, beta = (rows.take(x) for x in inputs)
            # [tokens, H, V] -> [tokens, H, K]: as many columns of values as the states have
            v = v.new_zeros(*v.shape[:2], k.shape[-1])
            transitions = self._run(rows, (q, k, v, g, beta), transitions)[1]
        return states, transitions

    def forward(
        self, inputs: Tensors, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Return out [tokens, H, V], the states behind all segments [segments, H, K, V], and the
        states before them where they are not zero."""
        saved = self.resume(inputs, states)
        if not self._lengths:
            return inputs[2].detach().clone(), self._zeros(inputs, 0), saved
        out, finals = self._run(self._rows(None), inputs, self._before(inputs, saved))
        return out, finals, saved

    def resume(self, inputs: Tensors, states: torch.Tensor | None) -> Tensors:
        """Return what `forward` saves."""
        return () if states is None else (states,)

    def summarise_backward(
        self, dout: torch.Tensor, inputs: Tensors, saved: Tensors, chosen: Sequence[int]
    ) -> torch.Tensor:
        """Return the gradients [n, H, K, V] of states before segments. dout: [tokens, H, V]."""
        # The output is linear in the state before it: the gradient is the same at any state.
        states = self._zeros(inputs, len(chosen))
        if not chosen:
            return states
        rows = self._rows(chosen)
        with torch.enable_grad():
            states.requires_grad_()
            out, _ = self._run(rows, [rows.take(x.detach()) for x in inputs], states)
            (dstates,) = torch.autograd.grad(out, states, rows.take(dout))
        return dstates

    def backward(
        self, dout: torch.Tensor, dfinals: torch.Tensor | None, inputs: Tensors, saved: Tensors
    ) -> Gradients:
        """Return the gradients of q, k, v, g and beta, and of the states before all segments
        [segments, H, K, V]. dout: [tokens, H, V]; dfinals: [segments, H, K, V]."""
        if not self._lengths:
            return tuple(torch.zeros_like(x) for x in inputs), self._zeros(inputs, 0)
        taken = [x.detach().requires_grad_() for x in inputs]
        states = self._before(inputs, saved).detach().requires_grad_()
        with torch.enable_grad():
            out, finals = self._run(self._rows(None), taken, states)
            of, given = [out], [dout]
            if dfinals is not None:
                of.append(finals)
                given.append(dfinals)
            *grads, dstates = torch.autograd.grad(of, [*taken, states], given)
        return tuple(grads), dstates

    def _run(
        self, rows: _Rows, inputs: Sequence[torch.Tensor], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [tokens, H, V] and the states [n, H, K, V] after these rows."""
        q, k, v, g, beta = (x.unsqueeze(0) for x in inputs)  # [1, tokens, ...]
        out, finals = self._rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self._l2norm,
            cu_seqlens=rows.cu_seqlens,
            cu_seqlens_cpu=rows.cu_seqlens_cpu,
        )
        return out.squeeze(0), finals

    # ---- rows and states of segments

    def _rows(self, chosen: Sequence[int] | None) -> _Rows:
        """Return the rows of chosen segments, or of all."""
        key = None if chosen is None else tuple(chosen)
        if key not in self._rows_of:
            if key is None:
                self._rows_of[key] = _Rows(None, self._lengths, self._device)
            else:
                starts = list(accumulate(self._lengths, initial=0))
                parts = [slice(starts[one], starts[one + 1]) for one in key]
                lengths = [self._lengths[one] for one in key]
                self._rows_of[key] = _Rows(parts, lengths, self._device)
        return self._rows_of[key]

    def _before(self, inputs: Tensors, saved: Tensors) -> torch.Tensor:
        """Return the states before all segments, [segments, H, K, V]."""
        if saved:
            return saved[0]
        return self._zeros(inputs, len(self._lengths))

    def _zeros(self, inputs: Tensors, segments: int) -> torch.Tensor:
        """Return states of zero, [segments, H, K, V]."""
        _, k, v, _, _ = inputs
        shape = (segments, v.shape[1], k.shape[2], v.shape[2])
        return v.new_zeros(shape, dtype=lse_dtype(v.dtype))

    def _identities(self, inputs: Tensors, segments: int) -> torch.Tensor:
        """Return transitions that change nothing, [segments, H, K, K]."""
        _, k, v, _, _ = inputs
        keys = k.shape[2]
        one = torch.eye(keys, dtype=lse_dtype(v.dtype), device=v.device)
        return one.repeat(segments, v.shape[1], 1, 1)
