"""Keys and values of a sequence's earlier chunks, and their gradients, from one chunk to the next.

A chunk's queries read [the prefix of their own sequence | their own chunk, causally]. For each
(layer, sequence):

    forward    write the chunk's K, V into one buffer of the sequence's length; attend to the
               prefix and to the chunk
               itself, and merge the two by their log-sum-exp
    backward   with the merged out and lse both parts are independent: the prefix's dK, dV are
               added to a second
               buffer, the chunk's own are returned together with what later chunks have left there
               for it

Chunks of a sequence go forward in order and backward in the opposite one (Seq1F1B, arXiv
2406.03488). Any other order would give wrong gradients in silence, so a forward mark (positions
stored) and a backward mark (positions not yet drained) are kept, and whatever is not next raises.
A chunk that is stored already and is next in the backward is the replay of a checkpointed layer:
it finds its K, V where they are, however often it comes.

Both buffers are written in place and sliced, where Seq1F1B's code joins the whole prefix anew for
every chunk and layer and holds K, V twice. The second buffer is as long as the prefix of the last
chunk, and in float32 (float64 for float64), because many chunks add to it.

Rejected: transformers' cache, which appends, so that a replayed forward appends twice, and which
its checkpointing drops without an error.
"""

from collections.abc import Iterator

import torch

from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.merge import merge_partials
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan.shard import Slice

Tensors = tuple[torch.Tensor, ...]


class WrongOrder(RuntimeError):
    """A chunk is not the next one of its sequence, or something was left when all should be
    over."""


class KVCarry:
    """What one stage carries, by (layer, sequence)."""

    __slots__ = ("_carried", "kernel")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._carried: dict[tuple[int, int], Carried] = {}

    def at(self, layer: int, piece: Slice, length: int, *, keeps_grad: bool) -> "Carried":
        """What `layer` carries of the sequence that `piece` is a part of. keeps_grad: whether a
        backward will follow; otherwise the sequence is over with its last chunk's forward."""
        key = (layer, piece.sequence)
        if key not in self._carried:
            if piece.start:
                raise WrongOrder(
                    f"layer {layer}: sequence {piece.sequence} begins at "
                    f"{piece.start} instead of 0"
                )
            self._carried[key] = Carried(self, key, length, keeps_grad=keeps_grad)
        return self._carried[key]

    def drop(self, key: tuple[int, int]) -> None:
        del self._carried[key]

    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(
            x.numel() * x.element_size()
            for carried in self._carried.values()
            for x in carried.buffers()
        )

    def check_empty(self) -> None:
        """Raise WrongOrder unless every sequence that began has been drained."""
        if self._carried:
            left = ", ".join(str(carried) for carried in self._carried.values())
            self._carried.clear()
            raise WrongOrder(f"the step is over, but not drained: {left}")


class Carried:
    """K and V of one sequence in one layer. Positions before `stored` are written, from `drained`
    on done."""

    __slots__ = ("_carry", "_dkv", "_keeps_grad", "_key", "_kv", "drained", "length", "stored")

    def __init__(
        self, carry: KVCarry, key: tuple[int, int], length: int, *, keeps_grad: bool
    ) -> None:
        self._carry, self._key, self._keeps_grad = carry, key, keeps_grad
        self.length, self.stored, self.drained = length, 0, length
        self._kv: torch.Tensor | None = None  # [2, length, Hkv, D]
        self._dkv: torch.Tensor | None = None  # [2, start of the last chunk, Hkv, D]

    def buffers(self) -> Iterator[torch.Tensor]:
        yield from (x for x in (self._kv, self._dkv) if x is not None)

    def forward(
        self, piece: Slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [t, H, D], k and v [t, Hkv, D] of the chunk -> out [t, H, D] and lse [H, t] over
        prefix and chunk."""
        self._store(piece, k, v)
        out, lse = self._block(piece.start, piece, q, scale)
        if piece.start:
            prefix_out, prefix_lse = self._block(0, piece, q, scale)
            # [t, H, D] and [t, H]; the kernel's own lse is [H, t]
            out, lse_t = merge_partials(prefix_out, prefix_lse.t(), out, lse.t())
            lse = lse_t.t()
        if self.stored == self.length and not self._keeps_grad:
            self._carry.drop(self._key)
        return out.to(q.dtype), lse

    def backward(
        self,
        piece: Slice,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> Tensors:
        """dq [t, H, D], dk and dv [t, Hkv, D] of the chunk; those of its prefix are kept for the
        chunks before."""
        if self.stored < self.length or piece.stop != self.drained:
            raise WrongOrder(
                f"{self}: the backward of [{piece.start}, {piece.stop}) is not the next one"
            )
        dq, *own = self._block_backward(piece.start, piece, dout, q, out, lse, scale)
        dkv = torch.stack(own)  # [2, t, Hkv, D]
        if self._dkv is not None:
            dkv = self._dkv[:, piece.start : piece.stop] + dkv
        if piece.start:
            dq_prefix, *of_prefix = self._block_backward(0, piece, dout, q, out, lse, scale)
            dq = dq.to(lse.dtype) + dq_prefix
            self._add_to_prefix(piece.start, of_prefix)
        self.drained = piece.start
        if self.drained == 0:
            self._carry.drop(self._key)
            self._kv = self._dkv = None  # autograd may still hold this object for a while
        return dq, dkv[0], dkv[1]

    def _store(self, piece: Slice, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.stored == self.length and piece.stop == self.drained:
            return  # a replay
        if piece.start != self.stored or piece.stop > self.length:
            raise WrongOrder(
                f"{self}: the forward of [{piece.start}, {piece.stop}) is not the next one"
            )
        if self._kv is None:
            self._kv = k.new_empty(2, self.length, *k.shape[1:])
        self._kv[0, piece.start : piece.stop] = k
        self._kv[1, piece.start : piece.stop] = v
        self.stored = piece.stop

    def _keys(self, start: int, piece: Slice) -> tuple[torch.Tensor, torch.Tensor, Segments]:
        """K, V and who reads whom: of the chunk itself, causally, if that is where `start` is;
        else of the prefix."""
        assert self._kv is not None, "nothing was stored"
        causal = start == piece.start
        rows = slice(start, piece.stop if causal else piece.start)
        segments = Segments(
            [piece.tokens], [rows.stop - rows.start], causal=causal, device=self._kv.device
        )
        return self._kv[0, rows], self._kv[1, rows], segments

    def _block(
        self, start: int, piece: Slice, q: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, segments = self._keys(start, piece)
        return self._carry.kernel.forward(q, k, v, segments, scale=scale)

    def _block_backward(
        self,
        start: int,
        piece: Slice,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> Tensors:
        k, v, segments = self._keys(start, piece)
        return self._carry.kernel.backward(dout, q, k, v, out, lse, segments, scale=scale)

    def _add_to_prefix(self, stop: int, gradients: list[torch.Tensor]) -> None:
        if self._dkv is None:
            dtype = lse_dtype(gradients[0].dtype)
            self._dkv = torch.zeros(
                2, stop, *gradients[0].shape[1:], dtype=dtype, device=gradients[0].device
            )
        for total, gradient in zip(self._dkv, gradients, strict=True):
            total[:stop] += gradient

    def __str__(self) -> str:
        layer, sequence = self._key
        return (
            f"layer {layer}, sequence {sequence} (stored {self.stored} of {self.length} "
            f"positions, "
            f"{self.length - self.drained} drained)"
        )
