"""Keys and values of a sequence's earlier chunks, and their gradients, from one chunk to the next.

A chunk's queries read [the prefix of their own sequence | their own chunk], causally, as far as
the window or the chunk of the layer reaches. For each (layer, sequence), in the order that
`attention/recurrent/carry.py` demands:

    forward     write the chunk's K, V into one buffer of the sequence's length, and attend to
                prefix and chunk in one kernel call
    backward    the prefix's dK, dV are added to a second buffer; the chunk's own are returned
                together with the dK, dV that later chunks have added for it

Both buffers are written in place and sliced, where Seq1F1B's code joins the whole prefix anew for
every chunk and layer and holds K, V twice. The second buffer is the kernel's result for the prefix
of the last chunk, which goes backward first and has the longest prefix; it begins as zeros if a
layer reads less of it. It is in float32 (float64 for float64), because many chunks add to it.

The slow reference is attention over the whole sequence, in `tests/pipeline/test_carry.py`.

Rejected: transformers' cache, which appends, so that a replayed forward appends twice, and which
its checkpointing drops without an error.

In shapes, `tokens` counts the chunk's part of the sequence.
"""

from typing import NamedTuple

import torch

from hf_flexseq.attention.recurrent.carry import Carried, Carry, CarryKey
from hf_flexseq.base.layers import Reach, Scores
from hf_flexseq.kernels import Kernel, KernelCall, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan.shard import Slice

Tensors = tuple[torch.Tensor, ...]


class CutPart:
    """The part of a sequence that a chunk begins with, and its queries' keys, made once per chunk:
    on CUDA segments copy their lengths to the device."""

    def __init__(self, part: Slice, length: int, kernel: Kernel, device: torch.device) -> None:
        """length: tokens of the whole sequence. kernel: of the stage's attention."""
        self.part = part
        self.length = length
        self.kernel = kernel
        self._device = device
        self._reads: dict[Reach, CutRead] = {}

    def read(self, reach: Reach) -> "CutRead":
        """Return the keys that the queries read in layers of this reach."""
        if reach not in self._reads:
            # The keys of one span end where those of the next begin.
            spans = reach.spans(self.part.start, self.part.stop)
            segments = Segments(
                [span.queries for span in spans],
                [span.keys for span in spans],
                causal=True,
                device=self._device,
                window=reach.window,
            )
            self._reads[reach] = CutRead(spans[0].first_key, segments)
        return self._reads[reach]


class CutRead(NamedTuple):
    """Keys that the queries of a part read."""

    first: int
    """Position of the first key. They read up to the end of the part."""
    segments: Segments
    """Lengths of the kernel call over these keys."""


class CarriedKeys(Carried):
    """Keys and values of one sequence in one layer, and their gradients."""

    def __init__(self, carry: Carry, key: CarryKey, length: int, *, keeps_grad: bool) -> None:
        super().__init__(carry, key, length, keeps_grad=keeps_grad)
        self._kv: torch.Tensor | None = None  # [2, length, kv_heads, head_dim]
        self._dk: torch.Tensor | None = None  # [start of last chunk, kv_heads, head_dim]
        self._dv: torch.Tensor | None = None  # as _dk

    def forward(
        self,
        cut: CutPart,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        reach: Reach,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens] of q [tokens, heads,
        head_dim] over prefix and chunk, k and v [tokens, kv_heads, head_dim]. Raises
        WrongOrder."""
        part = cut.part
        self._store(part, k, v)
        read = cut.read(reach)
        k, v = self._keys(read.first, part.stop)
        return cut.kernel.forward(KernelCall(q, k, v, read.segments, *scores))

    def backward(
        self, cut: CutPart, dout: torch.Tensor, saved: Tensors, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return the chunk's dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim],
        and keep its prefix's dk and dv for earlier chunks.

        dout: [tokens, heads, head_dim]. saved: q and out of the same shape, lse [heads, tokens].
        Raises WrongOrder when the part is not the next one to go backward.
        """
        part = cut.part
        q, out, lse = saved
        self.check_next_backward(part)
        # 1. dq [tokens, heads, head_dim]; dk, dv [keys, kv_heads, head_dim]
        read = cut.read(reach)
        k, v = self._keys(read.first, part.stop)
        call = KernelCall(q, k, v, read.segments, *scores)
        dq, dk, dv = cut.kernel.backward(call, dout, out, lse)
        # 2. of the chunk's own keys, with what later chunks have left for them
        before = part.start - read.first  # keys of the prefix
        # A copy: what waits for its W must not hold the prefix's, too.
        # 2 x [tokens, ...] -> [2, tokens, kv_heads, head_dim]
        dkv = torch.stack([dk[before:], dv[before:]])
        if self._dk is not None and self._dv is not None:
            dkv = dkv.to(self._dk.dtype)
            dkv[0] += self._dk[part.start : part.stop]
            dkv[1] += self._dv[part.start : part.stop]
        # 3. of the prefix
        if before:
            self._add_to_prefix(read.first, dk[:before], dv[:before])
        # 4. the marks
        self.went_backward(part)
        if self.drained == 0:  # autograd may still hold this object for a while
            self._kv = None
            self._dk = None
            self._dv = None
        return dq, dkv[0], dkv[1]

    def _store(self, part: Slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] into the buffer, unless this is a replay.
        Raises WrongOrder when the part is not the next one."""
        if not self.goes_forward(part):
            return
        if self._kv is None:
            self._kv = k.new_empty(2, self.length, *k.shape[1:])
        self._kv[0, part.start : part.stop] = k
        self._kv[1, part.start : part.stop] = v

    def _keys(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return stored k and v [stop - start, kv_heads, head_dim] of positions [start, stop)."""
        assert self._kv is not None, "nothing was stored"
        return self._kv[0, start:stop], self._kv[1, start:stop]

    def _add_to_prefix(self, first: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients [keys, kv_heads, head_dim] of the last keys and values of the prefix, from
        position `first` on, to the second buffer."""
        stop = first + dk.shape[0]
        if self._dk is None or self._dv is None:
            # The last chunk goes backward first, and its prefix is the longest one.
            wide = lse_dtype(dk.dtype)
            if first == 0:
                self._dk = dk.to(wide)
                self._dv = dv.to(wide)
                return
            self._dk = dk.new_zeros(stop, *dk.shape[1:], dtype=wide)
            self._dv = torch.zeros_like(self._dk)
        self._dk[first:stop] += dk
        self._dv[first:stop] += dv


class CutCall(NamedTuple):
    """Attention of one layer over the part of a cut sequence."""

    carried: CarriedKeys
    cut: CutPart

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens] of q, k and v [tokens,
        ...]."""
        return self.carried.forward(self.cut, q, k, v, scores, reach)

    def backward(
        self, dout: torch.Tensor, saved: Tensors, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim], in lse's
        dtype."""
        grads = self.carried.backward(self.cut, dout, saved, scores, reach)
        return tuple(grad.to(saved[2].dtype) for grad in grads)
