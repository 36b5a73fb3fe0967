"""A scan with the Triton kernels of flash-linear-attention (the package fla-core), on CUDA.

Its public functions take rows of packed segments with a state before each, and return rows and
the states behind:

    end states from zero    the states behind, from states of zero
    transitions             the states behind, from the identity with values of zero; the decays
                            alone where a token only decays a state (Mamba 2)
    gradients               by autograd, from the gradients of rows and of the states behind

Autograd's graph does not outlive the function that calls a `Scan`, so the backward calls the
forward again; only the states before are saved. Rejected: the package's inner functions,
which would save the second forward, and change with every version.

Rows of a delta rule are a layer's own: q, k [tokens, key_heads, K], v [tokens, H, V], g [tokens,
H] or [tokens, H, K], beta [tokens, H]. Mamba 2 uses the rows of simple gated linear attention,
without beta (`mamba2.token_inputs`). The output is rows, too, [tokens, H, V].

The slow reference goes token by token, in tests/kernels/scans: with a stand-in for the package
that does the same, and with the package itself under Triton's interpreter (`-m kernels`).

Rejected for Mamba 2: `mamba_chunk_scan_combined` of mamba-ssm. It takes states for the rows of a
batch, not for packed segments, and returns those behind packed segments without a gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Gradients, Tensors
from hf_flexseq.kernels.upload import to_device

# (rows [1, tokens, ...], states before [segments, H, K, V], bounds of the segments on the device
# and on the host) -> out [1, tokens, H, V], states behind [segments, H, K, V]
Rule = Callable[
    [Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]


def gated_delta_rule(*, l2norm: bool) -> Rule:
    """Return the gated delta rule. l2norm: True to normalise q and k."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return partial(_run_rule, chunk_gated_delta_rule, {"use_qk_l2norm_in_kernel": l2norm})


def kimi_delta_rule(*, l2norm: bool) -> Rule:
    """Return Kimi's delta rule. l2norm: True to normalise q and k."""
    from fla.ops.kda import chunk_kda

    return partial(_run_rule, chunk_kda, {"use_qk_l2norm_in_kernel": l2norm})


def gated_linear_attention() -> Rule:
    """Return simple gated linear attention, with one decay for each head and token."""
    from fla.ops.simple_gla import chunk_simple_gla

    return partial(_run_rule, chunk_simple_gla, {"scale": 1.0})


def _run_rule(
    function: Callable[..., Any],
    options: dict[str, object],
    rows: Sequence[torch.Tensor],
    states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_cpu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a function of the package as a `Rule`."""
    out, finals = function(
        *rows,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        **options,
    )
    return out, finals


class _SegmentRows:
    """The rows of some segments."""

    def __init__(
        self, parts: Sequence[slice], lengths: Sequence[int], device: torch.device
    ) -> None:
        """parts: each segment's slice of all rows."""
        self.parts = parts
        ends = accumulate(lengths, initial=0)
        self.cu_seqlens_cpu = torch.tensor(list(ends))
        self.cu_seqlens = to_device(self.cu_seqlens_cpu, device)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of these segments: [tokens, ...] -> [tokens of them, ...]."""
        return torch.cat([x[:0], *(x[part] for part in self.parts)])


class FlaScan:
    """The Scan protocol on the rows q, k, v, g, and beta in a delta rule."""

    def __init__(self, lengths: Sequence[int], device: torch.device, rule: Rule) -> None:
        """lengths: tokens of each segment, by row."""
        self._lengths = tuple(lengths)
        self._device = device
        self._rule = rule
        self._rows_of: dict[tuple[int, ...], _SegmentRows] = {}

    def summarise(
        self, inputs: Tensors, states_of: Sequence[int], transitions_of: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some segments' end states from zero [n, H, K, V] and transitions [m, H, K, K], or
        [m, H] without beta."""
        states = self._zeros(inputs, len(states_of))
        if states_of:
            rows = self._rows(states_of)
            states = self._run(rows, [rows.take(x) for x in inputs], states)[1]
        if len(inputs) == 4:
            return states, self._decays(inputs[3], transitions_of)
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
        out, finals = self._run(self._everywhere(), inputs, self._before(inputs, saved))
        return out, finals, saved

    def resume(self, inputs: Tensors, states: torch.Tensor | None) -> Tensors:
        """Return the tensors that `forward` saves."""
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
        """Return the gradients of the rows, and of the states before all segments
        [segments, H, K, V]. dout: [tokens, H, V]; dfinals: [segments, H, K, V]."""
        if not self._lengths:
            return tuple(torch.zeros_like(x) for x in inputs), self._zeros(inputs, 0)
        taken = [x.detach().requires_grad_() for x in inputs]
        states = self._before(inputs, saved).detach().requires_grad_()
        with torch.enable_grad():
            out, finals = self._run(self._everywhere(), taken, states)
            of, given = [out], [dout]
            if dfinals is not None:
                of.append(finals)
                given.append(dfinals)
            *grads, dstates = torch.autograd.grad(of, [*taken, states], given)
        return tuple(grads), dstates

    def _run(
        self, rows: _SegmentRows, inputs: Sequence[torch.Tensor], states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [tokens, H, V] and the states [n, H, K, V] after these rows."""
        batch = [x.unsqueeze(0) for x in inputs]  # [1, tokens, ...]
        out, finals = self._rule(batch, states, rows.cu_seqlens, rows.cu_seqlens_cpu)
        return out.squeeze(0), finals

    # ---- rows and states of segments

    def _everywhere(self) -> _SegmentRows:
        """Return the rows of all segments."""
        return self._rows(range(len(self._lengths)))

    def _rows(self, chosen: Sequence[int]) -> _SegmentRows:
        """Return the rows of chosen segments."""
        key = tuple(chosen)
        if key not in self._rows_of:
            lengths = [self._lengths[one] for one in key]
            self._rows_of[key] = _SegmentRows(self._parts(key), lengths, self._device)
        return self._rows_of[key]

    def _parts(self, chosen: Sequence[int]) -> list[slice]:
        """Return each chosen segment's slice of the rows."""
        starts = list(accumulate(self._lengths, initial=0))
        return [slice(starts[one], starts[one + 1]) for one in chosen]

    def _before(self, inputs: Tensors, saved: Tensors) -> torch.Tensor:
        """Return the states before all segments, [segments, H, K, V]."""
        if saved:
            return saved[0]
        return self._zeros(inputs, len(self._lengths))

    def _zeros(self, inputs: Tensors, segments: int) -> torch.Tensor:
        """Return states of zero, [segments, H, K, V]."""
        k, v = inputs[1:3]
        shape = (segments, v.shape[1], k.shape[2], v.shape[2])
        return v.new_zeros(shape, dtype=lse_dtype(v.dtype))

    def _identities(self, inputs: Tensors, segments: int) -> torch.Tensor:
        """Return transitions that change nothing, [segments, H, K, K]."""
        k, v = inputs[1:3]
        keys = k.shape[2]
        one = torch.eye(keys, dtype=lse_dtype(v.dtype), device=v.device)
        return one.repeat(segments, v.shape[1], 1, 1)

    def _decays(self, g: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Return the decay of a state over each chosen segment, [n, H]. g: [tokens, H]."""
        if not chosen:
            return g.new_zeros(0, g.shape[1])
        sums = [g[part].sum(0) for part in self._parts(chosen)]
        return torch.stack(sums).exp()
