"""The short causal convolution before a recurrent layer's scan, over sequences that several ranks
hold.

1. All rows of this rank are convolved as if they were one sequence.
2. The first W - 1 rows of each segment have then read rows of another sequence, or of none. They
   are computed again, from the rows that really precede them: rows of other ranks or of another
   segment of this rank, or zeros at the start of a sequence. These are few.

Rejected: a copy of all rows with each segment's halo before it, for one more pass over all rows
each way.
"""

import torch

from hf_flexseq.attention.recurrent.rows import RecurrentContext, carried_halo, check_rows, halo
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.convolution import causal_convolution_of_rows


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_ctx: RecurrentContext,
) -> torch.Tensor:
    """Convolve every channel of every sequence by itself, wherever its tokens are.

    x: [tokens, channels] of this rank's shard. weight: [channels, W], the last column for a token
    itself. bias: [channels]. Returns [tokens, channels].

    Collective over the groups of the shard. Raises ValueError when x does not have the shard's
    number of tokens.
    """
    check_rows(x, seq_ctx)
    out = causal_convolution_of_rows(x, weight, bias, computes=seq_ctx.programs.computes)
    if weight.shape[1] > 1 and x.shape[0]:
        out = _with_firsts(out, x, weight, bias, seq_ctx)
    return out


def _with_firsts(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_ctx: RecurrentContext,
) -> torch.Tensor:
    """Return out [tokens, channels] with the first rows of every segment computed anew."""
    programs = seq_ctx.programs
    channels, width = weight.shape
    segments = programs.parts.segments()
    found = segments.halo(width)

    # 1. the rows that they read: [E, channels] of this rank, [R, channels] of others, one of zeros
    edges = x.index_select(0, programs.index(found.edges))
    sources = [edges]
    if found.messages:
        sources.append(halo(edges, width, seq_ctx))
    sources.append(x.new_zeros(1, channels))
    carrying = seq_ctx.carrying(keeps_grad=torch.is_grad_enabled() and x.requires_grad)
    if carrying is not None:
        part = segments.lengths[0]
        sources.append(carried_halo(x[max(0, part - width + 1) : part], width, carrying))
    # -> [B x W, channels] -> [B, W, channels]
    read = torch.cat(sources).index_select(0, programs.index(found.sources))
    read = read.view(-1, width, channels)

    # 2. their results, [B, channels]
    wide = lse_dtype(x.dtype)
    firsts = (read.to(wide) * weight.t().to(wide)).sum(1)
    if bias is not None:
        firsts = firsts + bias.to(wide)
    return out.index_copy(0, programs.index(found.firsts), firsts.to(out.dtype))
