"""Attend in one sequence on the CPU, piece by piece: some queries and some keys at a time.

torch's CPU flash kernel has neither windows nor softcaps, and its `is_causal` aligns query 0 with
key 0. So all but full and square causal attention is cut into pieces, whose results are merged:

    causal with earlier keys    all queries with the earlier keys, then with their own
    a window of w keys          blocks of n queries, each with its n + w - 1 keys
    a softcap (Gemma 2)         blocks of queries by runs of keys

A mask [queries, keys] hides the keys that a query does not read. Pieces are computed in float32
(float64 for float64 inputs), so 16-bit outputs are rounded once. The backward takes the
merged output and log-sum-exp, so every piece is independent of the others.

With a softcap the products are torch's own, in the formulas of tests/kernels/reference.py, with
which this module is compared. Autocast would round them to 16 bits, so it is switched off.

Rejected: plain products for windows, too. They take 1.3 to 1.8 times the time of the kernel with
a mask.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.merge import merge_into

# (q, k, v, dropout, is_causal) -> out [1, H, n, D], lse [1, H, n]
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# (dout, q, k, v, out, lse, dropout, is_causal) -> dq, dk, dv
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NO_DROPOUT = 0.0

# tuned by timing windows of 512 and 2,048 tokens on one CPU core
_SMALL_BLOCK = 64  # queries
_LARGE_BLOCK = 256
_LONG_WINDOW = 1_024  # keys, from which large blocks are faster
_CAPPED_BLOCK = 128  # queries
_CAPPED_RUN = 512  # keys


Tensors = tuple[torch.Tensor, ...]


class AttentionPiece(NamedTuple):
    """Queries of a sequence that follow each other, and some of the keys that they read."""

    rows: slice
    """The queries, as rows of the sequence's queries."""
    keys: slice
    """The keys, as rows of the sequence's keys."""
    is_causal: bool = False
    """True if the keys are the queries' own, and each query reads those up to its own."""
    mask: torch.Tensor | None = None
    """Added to the scores: 0, or -inf for a hidden key [queries, keys]; None hides nothing."""


class PiecewiseAttention:
    """Attention of one call's sequences.

    In shapes a sequence has n queries of H heads and m keys of Hkv heads, and a piece has r
    queries and c keys.
    """

    def __init__(
        self, *, causal: bool, window: int | None, scale: float, softcap: float | None
    ) -> None:
        self._causal = causal
        self._window = window
        self._scale = scale
        self._softcap = softcap
        # by (own, queries, count) of `_mask`: most pieces of a window have the same
        self._last_mask: tuple[tuple[int, int, int], torch.Tensor] | None = None

    @torch.autocast("cpu", enabled=False)
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend -> out [1, H, n, D], lse [1, H, n]."""
        if self._is_one_call(q, k):
            out, lse = FORWARD(q, k, v, _NO_DROPOUT, self._causal, scale=self._scale)
            return out, lse
        wide = lse_dtype(q.dtype)
        q, k, v = (x.to(wide) for x in (q, k, v))
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -torch.inf)
        attend = self._attend if self._softcap is None else self._attend_capped
        # A window's block of queries has no other keys: merging would cost 5 % of its time.
        has_one_piece = self._softcap is None and self._has_window(k)
        for piece in self.pieces(q, k):
            rows, keys, *_ = piece
            piece_out, piece_lse = attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], piece)
            if has_one_piece:
                out[:, :, rows] = piece_out
                lse[:, :, rows] = piece_lse
            else:
                merge_into(out[:, :, rows], lse[:, :, rows], piece_out, piece_lse)
        return out, lse

    @torch.autocast("cpu", enabled=False)
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients: dout, q and out [1, H, n, D], k and v [1, Hkv, m, D], lse [1, H, n]
        -> dq [1, H, n, D], dk and dv [1, Hkv, m, D]."""
        if self._is_one_call(q, k):
            dq, dk, dv = BACKWARD(
                dout, q, k, v, out, lse, _NO_DROPOUT, self._causal, scale=self._scale
            )
            return dq, dk, dv
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        gradients = self._gradients if self._softcap is None else self._capped_gradients
        for piece in self.pieces(q, k):
            rows, keys, *_ = piece
            of_queries = tuple(x[:, :, rows] for x in (dout, q, out, lse))
            piece_dq, piece_dk, piece_dv = gradients(
                of_queries, k[:, :, keys], v[:, :, keys], piece
            )
            dq[:, :, rows] += piece_dq
            dk[:, :, keys] += piece_dk
            dv[:, :, keys] += piece_dv
        return dq, dk, dv

    # ---- which pieces

    def _is_one_call(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Return whether torch's kernel serves the sequence as it is."""
        is_full = self._softcap is None and not self._has_window(k)
        return is_full and (not self._causal or q.shape[2] == k.shape[2])

    def _has_window(self, k: torch.Tensor) -> bool:
        """Return whether the window hides any of these keys."""
        return self._window is not None and self._window < k.shape[2]

    def pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[AttentionPiece]:
        """Iterate over the pieces of a sequence: q [1, H, n, D], k [1, Hkv, m, D]."""
        queries = q.shape[2]
        earlier = k.shape[2] - queries  # keys before the first query's own
        if self._softcap is None and not self._has_window(k):
            yield AttentionPiece(slice(queries), slice(earlier))
            yield AttentionPiece(slice(queries), slice(earlier, earlier + queries), is_causal=True)
            return
        block, run = self._sizes()
        for start in range(0, queries, block):
            rows = slice(start, min(start + block, queries))
            first_key = 0
            if self._window is not None:
                first_key = max(0, earlier + start - self._window + 1)
            key_stop = earlier + rows.stop if self._causal else k.shape[2]
            for key_start in range(first_key, key_stop, run):
                keys = slice(key_start, min(key_start + run, key_stop))
                yield AttentionPiece(rows, keys, mask=self._mask(rows, keys, earlier, q.dtype))

    def _sizes(self) -> tuple[int, int]:
        """Return the queries of a block and the keys of a run."""
        if self._softcap is not None:
            return _CAPPED_BLOCK, _CAPPED_RUN
        assert self._window is not None, "attention without a window is not cut into blocks"
        block = _LARGE_BLOCK if self._window >= _LONG_WINDOW else _SMALL_BLOCK
        return block, block + self._window  # one run

    def _mask(
        self, rows: slice, keys: slice, earlier: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the mask [r, c] of a piece, or None if it hides nothing."""
        if not self._causal:
            return None
        # in keys, counted from the first one of the piece
        own = earlier + rows.start - keys.start  # of the first query
        queries = rows.stop - rows.start
        count = keys.stop - keys.start
        hides_later = own < count - 1
        hides_earlier = self._window is not None and own + queries - 1 >= self._window
        if not hides_later and not hides_earlier:
            return None
        if self._last_mask is None or self._last_mask[0] != (own, queries, count):
            everywhere = torch.full((queries, count), -torch.inf, dtype=dtype)
            mask = everywhere.triu(own + 1)
            if self._window is not None:
                # triu and tril leave zeros, and -inf + 0 is -inf
                mask += everywhere.tril(own - self._window)
            self._last_mask = (own, queries, count), mask
        return self._last_mask[1]

    # ---- one piece: q, dout and out [1, H, r, D], lse [1, H, r], k and v [1, Hkv, c, D]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: AttentionPiece
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse."""
        out, lse = FORWARD(
            q, k, v, _NO_DROPOUT, piece.is_causal, attn_mask=piece.mask, scale=self._scale
        )
        return out, lse

    def _gradients(
        self, of_queries: Tensors, k: torch.Tensor, v: torch.Tensor, piece: AttentionPiece
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk and dv. of_queries: dout, q, out and lse."""
        dout, q, out, lse = of_queries
        options = {"attn_mask": piece.mask, "scale": self._scale}
        dq, dk, dv = BACKWARD(dout, q, k, v, out, lse, _NO_DROPOUT, piece.is_causal, **options)
        return dq, dk, dv

    def _attend_capped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: AttentionPiece
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, with capped scores."""
        scores = self._tanh(q, k).mul_(self._softcap)  # [Hkv, G, r, c]
        if piece.mask is not None:
            scores += piece.mask
        lse = scores.logsumexp(-1, keepdim=True)  # [Hkv, G, r, 1]
        # A query may read no key of this piece: -inf - -inf would be NaN.
        p = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()
        out = p.flatten(1, 2) @ v[0]  # [Hkv, G r, D]
        return out.view(q.shape), lse.view(q.shape[:3])

    def _capped_gradients(
        self, of_queries: Tensors, k: torch.Tensor, v: torch.Tensor, piece: AttentionPiece
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk and dv, with capped scores. of_queries: dout, q, out and lse."""
        dout, q, out, lse = of_queries
        q_rows = _grouped(q, k)  # [Hkv, G r, D]
        dout_rows = _grouped(dout, k)
        delta = (dout * out).sum(-1, keepdim=True)  # [1, H, r, 1]

        # p = exp(s - lse)
        tanh = self._tanh(q, k)  # [Hkv, G, r, c]
        p = (tanh * self._softcap).sub_(lse.view(*tanh.shape[:3], 1))
        if piece.mask is not None:
            p += piece.mask
        p.exp_()
        # ds = p * (dout v^T - delta) * (1 - tanh^2) * scale
        ds = (dout_rows @ v[0].transpose(1, 2)).view_as(p)
        ds.sub_(delta.view(*p.shape[:3], 1)).mul_(p)
        ds.mul_(tanh.square_().neg_().add_(1)).mul_(self._scale)

        p = p.flatten(1, 2)  # [Hkv, G r, c]
        ds = ds.flatten(1, 2)
        dq = (ds @ k[0]).view(q.shape)
        dk = ds.transpose(1, 2) @ q_rows  # [Hkv, c, D]
        dv = p.transpose(1, 2) @ dout_rows
        return dq, dk[None], dv[None]

    def _tanh(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return tanh(scale q k^T / softcap) [Hkv, G, r, c] for G query heads per key head."""
        assert self._softcap is not None
        products = _grouped(q, k) @ k[0].transpose(1, 2)  # [Hkv, G r, c]
        products = products.unflatten(1, (-1, q.shape[2]))
        return products.mul_(self._scale / self._softcap).tanh_()


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """View x [tokens, heads, D] as [1, heads, tokens, D], with the last dimension contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    # [tokens, heads, D] -> [heads, tokens, D] -> [1, heads, tokens, D]
    return x.transpose(0, 1).unsqueeze(0)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Join the rows of heads that share a key head: x [1, H, r, D] -> [Hkv, G r, D]."""
    return x[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2)
