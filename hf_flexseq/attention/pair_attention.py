"""Attention of some blocks of a rank, pair by pair, forward and backward: what deterministic
attention computes between its exchanges (`program/deterministic.py`).

The pairs and the kernel calls that take them are in `block_pairs.py`.
"""

import math
from collections.abc import Sequence

import torch

from hf_flexseq.attention.block_pairs import (
    OwnResults,
    PaddedBlocks,
    backward_rounds,
    forward_rounds,
)
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.layers import Scores
from hf_flexseq.program.blocks import BLOCK, SequenceBlocks

Tensors = tuple[torch.Tensor, ...]

# Elements that torch's functions on the CPU leave to one thread. Of more elements each thread has
# a share, and exponentials are rounded otherwise at the end of a share than within it.
SERIAL_ELEMENTS = 32768


class PairAttention:
    """The pairs of this rank's blocks in one zone."""

    __slots__ = ("_backward_rounds", "_forward_rounds", "_own", "_read", "_readers")

    def __init__(self, own: Sequence[SequenceBlocks], device: torch.device) -> None:
        """Find the pairs, and the places of tokens in blocks.

        own: the blocks that this rank works on.
        """
        self._own = PaddedBlocks(own, device)
        self._readers = PaddedBlocks([blocks.readers for blocks in own], device)
        self._read = PaddedBlocks([blocks.read for blocks in own], device)
        self._forward_rounds = forward_rounds(own, device)
        self._backward_rounds = backward_rounds(own, device)

    def forward(
        self, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> Tensors:
        """Return out [tokens in blocks, heads, head_dim] and lse [tokens in blocks, heads].

        q: [tokens in blocks, heads, head_dim]. k, v: [tokens read, kv_heads, head_dim].
        """
        (block_q,) = _padded(self._own, (q,))  # [blocks, BLOCK, heads, head_dim]
        block_k, block_v = _padded(self._read, (k, v))
        return self._unpadded(self._attend(kernel, block_q, block_k, block_v, scores))

    def backward(
        self,
        kernel: Kernel,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
    ) -> Tensors:
        """Return dq [tokens in blocks, heads, head_dim], dk and dv [tokens in blocks, kv_heads,
        head_dim].

        dout, q, out: [tokens of readers, heads, head_dim]. lse: [tokens of readers, heads]. k, v:
        [tokens read, kv_heads, head_dim].
        """
        queries = _padded(self._readers, (dout, q, out, lse))  # [readers, BLOCK, heads, ...]
        keys = _padded(self._read, (k, v))
        return self._unpadded(self._gradients(kernel, queries, keys, scores))

    def _unpadded(self, results: Tensors) -> Tensors:
        """Return results of this rank's blocks, each [blocks, BLOCK, ...] -> [tokens in blocks,
        ...]."""
        return tuple(self._own.unpad(x) for x in results)

    def _attend(
        self, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> Tensors:
        """Return out [blocks, BLOCK, heads, head_dim] and lse [blocks, BLOCK, heads].

        q: [blocks, BLOCK, heads, head_dim]. k, v: [blocks read, BLOCK, kv_heads, head_dim].
        """
        scale, softcap = scores
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = out.new_full(q.shape[:3], -torch.inf)
        pair_bytes = 2 * _block_bytes(q, k)  # q and out, k and v
        for call in self._forward_rounds.calls(pair_bytes):
            # [blocks, BLOCK, ...] -> [pairs * BLOCK, ...]
            (pair_q,) = _rows_of_pairs(call.queries, q)
            pair_k, pair_v = _rows_of_pairs(call.keys, k, v)
            rows_out, rows_lse = kernel.forward(
                pair_q, pair_k, pair_v, call.segments, scale=scale, softcap=softcap
            )
            # [pairs * BLOCK, heads, head_dim] -> [pairs, BLOCK, heads, head_dim]
            pair_out = rows_out.unflatten(0, (-1, BLOCK))
            # [heads, pairs * BLOCK] -> [pairs, BLOCK, heads]
            pair_lse = rows_lse.t().contiguous().unflatten(0, (-1, BLOCK))
            for pairs, share in call.shares():
                blocks = pairs.query_results.blocks
                _merge_round(out, lse, blocks, pair_out[share], pair_lse[share])
        return out.to(q.dtype), lse

    def _gradients(
        self, kernel: Kernel, queries: Tensors, keys: Tensors, scores: Scores
    ) -> Tensors:
        """Return dq [blocks, BLOCK, heads, head_dim], dk and dv [blocks, BLOCK, kv_heads,
        head_dim].

        queries: dout, q and out [readers, BLOCK, heads, head_dim], lse [readers, BLOCK, heads].
        keys: k and v [blocks read, BLOCK, kv_heads, head_dim].
        """
        scale, softcap = scores
        _, q, _, lse = queries
        k, _ = keys
        # in float32 (float64 for float64), as lse is
        dq_sum = lse.new_zeros(self._own.blocks, *q.shape[1:])
        dk_sum = lse.new_zeros(self._own.blocks, *k.shape[1:])
        dv_sum = torch.zeros_like(dk_sum)
        pair_bytes = 4 * _block_bytes(q, k)  # dout, q, out and dq; k, v, dk and dv
        for call in self._backward_rounds.calls(pair_bytes):
            # [readers, BLOCK, ...] -> [pairs * BLOCK, ...]
            pair_dout, pair_q, pair_out, pair_lse = _rows_of_pairs(call.queries, *queries)
            pair_k, pair_v = _rows_of_pairs(call.keys, *keys)
            gradients = kernel.backward(
                pair_dout,
                pair_q,
                pair_k,
                pair_v,
                pair_out,
                pair_lse.t().contiguous(),  # [pairs * BLOCK, heads] -> [heads, pairs * BLOCK]
                call.segments,
                scale=scale,
                softcap=softcap,
            )
            # [pairs * BLOCK, heads, head_dim] -> [pairs, BLOCK, heads, head_dim]
            dq, dk, dv = (x.unflatten(0, (-1, BLOCK)) for x in gradients)
            for pairs, share in call.shares():
                of_queries = pairs.query_results
                of_queries.blocks.add_to(dq_sum, dq[share][of_queries.pairs])
                of_keys = pairs.key_results
                of_keys.blocks.add_to(dk_sum, dk[share][of_keys.pairs])
                of_keys.blocks.add_to(dv_sum, dv[share][of_keys.pairs])
        return dq_sum.to(q.dtype), dk_sum.to(q.dtype), dv_sum.to(q.dtype)


def _padded(blocks: PaddedBlocks, tensors: Tensors) -> Tensors:
    """Return each tensor [tokens, ...] as [blocks, BLOCK, ...]."""
    return tuple(blocks.pad(x) for x in tensors)


def _rows_of_pairs(numbers: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
    """Return the blocks with these numbers, of each tensor [blocks, BLOCK, ...] ->
    [pairs * BLOCK, ...]."""
    return tuple(x.index_select(0, numbers).flatten(0, 1) for x in tensors)


def _block_bytes(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return the bytes of a block of queries and a block of keys: q [blocks, BLOCK, heads,
    head_dim], k [blocks, BLOCK, kv_heads, head_dim]."""
    elements = math.prod(q.shape[1:]) + math.prod(k.shape[1:])
    return elements * q.element_size()


def _merge_round(
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: OwnResults,
    pair_out: torch.Tensor,
    pair_lse: torch.Tensor,
) -> None:
    """Merge the results of a round into these blocks of the running result, in place.

    out: [blocks, BLOCK, heads, head_dim]. lse: [blocks, BLOCK, heads]. pair_out, pair_lse: the
    same of the pairs, one for each of these blocks.
    """
    most = blocks.blocks
    if lse.device.type == "cpu":
        most = max(1, SERIAL_ELEMENTS // math.prod(lse.shape[1:]))
    for start in range(0, blocks.blocks, most):
        stop = min(start + most, blocks.blocks)
        part = blocks.part(start, stop)
        part.merge_into(out, lse, pair_out[start:stop], pair_lse[start:stop])
