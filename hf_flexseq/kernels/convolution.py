"""A causal depthwise convolution over few rows, as recurrent layers have it.

    out[t, c] = bias[c] + sum over j < W of weight[c, j] x[t - W + 1 + j, c]

Rows follow each other, [tokens, channels], as they come from a linear layer. The sum over W
shifted products touches each row W times, in blocks of rows that fit into a cache. torch's own
convolution wants the channels first, copies rows to and fro, and takes three times as long on a
CPU. Sums are taken in float32 (float64 for float64).

The slow reference is `torch.nn.functional.conv1d`, in tests/kernels/test_convolution.py.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.kernels import lse_dtype

# Rows that are computed at once: what a CPU's cache holds, and few launches on a GPU.
BLOCK_ROWS = {"cpu": 64, "cuda": 1 << 14}


def causal_convolution_of_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, computes: bool = True
) -> torch.Tensor:
    """Return the convolution of one sequence, [tokens, channels], with zeros before its start.

    x: [tokens, channels]. weight: [channels, W], the last column for a row itself. bias:
    [channels]. computes: False to make and keep tensors alone, and to compute no block of rows.
    """
    out: torch.Tensor = _Convolution.apply(x, weight, bias, computes)
    return out


class _Convolution(torch.autograd.Function):
    """The convolution, with a backward that goes through the rows once, too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        computes: bool,
    ) -> torch.Tensor:
        """Return out [tokens, channels]."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.computes = computes
        wide = lse_dtype(x.dtype)
        taps = weight.t().to(wide).contiguous()  # [channels, W] -> [W, channels]
        width = taps.shape[0]
        out = torch.empty_like(x)
        for start, stop in _blocks(x) if computes else ():
            rows = x[max(0, start - width + 1) : stop].to(wide)
            own = rows.shape[0] - (stop - start)  # rows before the block
            total = rows[own:] * taps[width - 1]
            for back in range(1, width):
                # rows [own - back, ...) for rows [own, ...); there are fewer at the start
                missing = min(max(0, back - own), stop - start)
                shifted = rows[own + missing - back : rows.shape[0] - back]
                total[missing:].addcmul_(shifted, taps[width - 1 - back])
            if bias is not None:
                total += bias
            out[start:stop] = total
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx [tokens, channels], dweight [channels, W] and dbias [channels]."""
        x, weight = ctx.saved_tensors
        wide = lse_dtype(x.dtype)
        taps = weight.t().to(wide).contiguous()  # [channels, W] -> [W, channels]
        width = taps.shape[0]
        dx = torch.empty_like(x)
        dtaps = torch.zeros_like(taps)
        dbias = torch.zeros_like(taps[0])
        for start, stop in _blocks(x) if ctx.computes else ():
            rows = x[start:stop].to(wide)
            grads = dout[start : stop + width - 1].to(wide)  # those that read these rows
            total = grads[: stop - start] * taps[width - 1]
            for back in range(width):
                shifted = grads[back : back + stop - start]  # there are fewer at the end
                read = rows[: shifted.shape[0]]
                dtaps[width - 1 - back] += (shifted * read).sum(0)
                if back:
                    total[: shifted.shape[0]].addcmul_(shifted, taps[width - 1 - back])
            if ctx.has_bias:
                dbias += grads[: stop - start].sum(0)
            dx[start:stop] = total
        dweight = dtaps.t().to(weight.dtype)  # [W, channels] -> [channels, W]
        return dx, dweight, dbias.to(weight.dtype) if ctx.has_bias else None, None


def _blocks(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return the rows [start, stop) that are computed at once."""
    rows = BLOCK_ROWS["cpu" if x.device.type == "cpu" else "cuda"]
    tokens = x.shape[0]
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]
