"""Keys and values of a sequence's earlier chunks, and their gradients, from one chunk to the next.

A chunk's queries read [the prefix of their own sequence | their own chunk], causally, as far as
the window or the chunk of the layer reaches. For each (layer, sequence):

    forward     write the chunk's K, V into one buffer of the sequence's length, and attend to
                prefix and chunk in one kernel call
    backward    the prefix's dK, dV are added to a second buffer; the chunk's own are returned
                together with the dK, dV that later chunks have added for it

Chunks of a sequence go forward in order and backward in the opposite one (Seq1F1B, arXiv
2406.03488). Any other order would silently give wrong gradients, so a forward mark (positions
stored) and a backward mark (positions not yet drained) are kept, and another order raises. A chunk
that is stored already and is next in the backward is the replay of a checkpointed layer: it finds
its K, V. If K and V need no gradient, no backward ends the replays, and they stay until the step
ends.

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

from hf_flexseq.attention.recurrent.carry import Part, WrongOrder
from hf_flexseq.base.layers import Reach, Scores
from hf_flexseq.kernels import Kernel, KernelCall, lse_dtype
from hf_flexseq.kernels.segments import Segments

Tensors = tuple[torch.Tensor, ...]


class CutPart:
    """The part of a sequence that a chunk begins with, and its queries' keys, made once per chunk:
    on CUDA segments copy their lengths to the device."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
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


class KVCarry:
    """Everything that one stage carries, by (layer, sequence)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._carried: dict[tuple[int, int], Carried] = {}

    def at(
        self,
        layer: int,
        part: Part,
        *,
        keeps_grad: bool,
        runs_again: bool = False,
    ) -> "Carried":
        """Return the keys and values that `layer` carries of the sequence to which `part` belongs,
        beginning with the sequence's first chunk.

        keeps_grad: True if a backward will follow; otherwise the sequence is over with its last
            chunk's forward
        runs_again: True if the part is in a checkpointed region; then it is over with the step

        Raises WrongOrder when the first part that is seen is not the sequence's first.
        """
        key = (layer, part.sequence)
        if key not in self._carried:
            if part.start:
                raise WrongOrder(
                    f"layer {layer}: sequence {part.sequence} begins at {part.start} instead of 0"
                )
            self._carried[key] = Carried(self, key, part.length, keeps_grad=keeps_grad)
        carried = self._carried[key]
        carried.runs_again |= runs_again
        return carried

    def drop(self, key: tuple[int, int]) -> None:
        """Forget a sequence that is over. key: (layer, sequence)"""
        del self._carried[key]

    def check_empty(self) -> None:
        """Raise WrongOrder unless all begun sequences have been drained; forget all of them."""
        left = [str(carried) for carried in self._carried.values() if not carried.is_over]
        self._carried.clear()
        if left:
            raise WrongOrder(f"the step is over, but not drained: {', '.join(left)}")


class Carried:
    """Keys and values of one sequence in one layer, and their gradients. Positions before `stored`
    are written, those from `drained` on have gone backward."""

    def __init__(
        self, carry: KVCarry, key: tuple[int, int], length: int, *, keeps_grad: bool
    ) -> None:
        self._carry = carry
        self._key = key  # (layer, sequence)
        self._keeps_grad = keeps_grad
        self.runs_again = False  # True if a part is in a checkpointed region
        self.length = length
        self.stored = 0
        self.drained = length
        self._kv: torch.Tensor | None = None  # [2, length, kv_heads, head_dim]
        self._dk: torch.Tensor | None = None  # [start of last chunk, kv_heads, head_dim]
        self._dv: torch.Tensor | None = None  # as _dk

    @property
    def is_over(self) -> bool:
        """True if no backward is missing, though replays may have been."""
        return self.stored == self.length and not self._keeps_grad

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
        out, lse = self._carry.kernel.forward(KernelCall(q, k, v, read.segments, *scores))
        if self.is_over and not self.runs_again:
            self._carry.drop(self._key)
        return out, lse

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
        if self.stored < self.length or part.stop != self.drained:
            raise WrongOrder(f"{self}: the backward of {part} is not the next one")
        # 1. dq [tokens, heads, head_dim]; dk, dv [keys, kv_heads, head_dim]
        read = cut.read(reach)
        k, v = self._keys(read.first, part.stop)
        call = KernelCall(q, k, v, read.segments, *scores)
        dq, dk, dv = self._carry.kernel.backward(call, dout, out, lse)
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
        self.drained = part.start
        if self.drained == 0:
            self._carry.drop(self._key)
            # Autograd may still hold this object for a while.
            self._kv = None
            self._dk = None
            self._dv = None
        return dq, dkv[0], dkv[1]

    def _store(self, part: Part, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] into the buffer, unless this is a replay.
        Raises WrongOrder when the part is not the next one."""
        if self.is_over or (self.stored == self.length and part.stop == self.drained):
            return  # a replay
        if part.start != self.stored or part.stop > self.length:
            raise WrongOrder(f"{self}: the forward of {part} is not the next one")
        if self._kv is None:
            self._kv = k.new_empty(2, self.length, *k.shape[1:])
        self._kv[0, part.start : part.stop] = k
        self._kv[1, part.start : part.stop] = v
        self.stored = part.stop

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

    def __str__(self) -> str:
        layer, sequence = self._key
        return (
            f"layer {layer}, sequence {sequence} (stored {self.stored} of {self.length} "
            f"positions, {self.length - self.drained} drained)"
        )
