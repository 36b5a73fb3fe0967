"""The operations of programs, on tensors: one run of a program in one direction of one layer. It
obeys instructions, one after the other, and decides nothing. `bound_programs.py` makes the
programs that run.

Every operation that an instruction can name is a method of `Replay`; `program/builder.py` explains
them, with their shapes.
"""

from typing import Any, NamedTuple, Protocol

import torch

from hf_flexseq.base.layers import Reach, Scores
from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Message, Pending
from hf_flexseq.kernels import Kernel, KernelCall, lse_dtype
from hf_flexseq.kernels.fused_operations import Fused, Rows
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan.head_layout import HeadLayout
from hf_flexseq.program.instructions import AllToAllSpec

Tensors = tuple[torch.Tensor, ...]

SINK_ROWS = 8192  # rows whose gradient of the sinks is computed at once


class CutAttention(Protocol):
    """Attention of the part of a cut sequence in one layer of a pipeline (`pipeline/carry.py`)."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens]."""

    def backward(
        self, dout: torch.Tensor, saved: Tensors, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim].
        saved: q and out [tokens, heads, head_dim], lse [heads, tokens]."""


class Means(NamedTuple):
    """Device, kernels and links for this rank's programs."""

    device: torch.device
    kernel: Kernel
    fused: Fused
    links: Communicator | None
    """Ways to other ranks; None for a rank that works alone."""

    @property
    def communicator(self) -> Communicator:
        """The ways to other ranks."""
        assert self.links is not None, "a rank that works alone posts nothing"
        return self.links


class Replay:
    """One run of a program. Methods are its operations: tensors first, then constants."""

    __slots__ = ("_means", "cut", "pending", "scores")

    def __init__(self, means: Means, scores: Scores, cut: CutAttention | None) -> None:
        self._means = means
        self.scores = scores
        self.cut = cut
        self.pending: dict[int, list[Pending]] = {}  # what is under way, by number of the post

    # -- memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._means.device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._means.device)

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    # -- rows

    def take(self, *tensors_and_rows: Any) -> Tensors:
        *tensors, rows = tensors_and_rows
        targets = tuple(x.new_empty(len(rows), *x.shape[1:]) for x in tensors)
        self._means.fused.gather(tensors, [rows] * len(tensors), targets)
        return targets

    def part(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return x[start:stop]

    def put(self, total: torch.Tensor, part: torch.Tensor, rows: Rows) -> None:
        if isinstance(rows, slice):
            total[rows].copy_(part)
        else:
            total.index_copy_(0, rows, part.to(total.dtype))

    def add(self, total: torch.Tensor, part: torch.Tensor, rows: Rows) -> None:
        self._means.fused.add([total], [rows], [part])

    def accumulate(self, total: torch.Tensor, part: torch.Tensor, index: torch.Tensor) -> None:
        total.index_add_(0, index, part.to(total.dtype))

    def merge(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        part_out: torch.Tensor,
        part_lse: torch.Tensor,
        rows: Rows,
    ) -> None:
        self._means.fused.merge((out, lse), rows, (part_out, part_lse))

    def join(self, *parts_and_dim: Any) -> torch.Tensor:
        *parts, dim = parts_and_dim
        return torch.cat(parts, dim=dim)

    # -- heads

    def heads(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return x[:, start:stop]

    def columns(self, lse: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return lse[:, start:stop]

    def repeat_heads(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(1, index)

    def sum_heads(self, x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
        # Sums of 16-bit numbers are taken in float32, and rounded once.
        sums = x.new_zeros(x.shape[0], count, x.shape[2], dtype=lse_dtype(x.dtype))
        return sums.index_add_(1, index, x.to(sums.dtype)).to(x.dtype)

    def pair(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.stack((k, v), dim=1)

    def unpair(self, kv: torch.Tensor) -> Tensors:
        return kv.unbind(1)

    def turned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.t()

    def kernel_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.t().contiguous()

    def pack_heads(self, *tensors_and_layout: Any) -> torch.Tensor:
        *tensors, shape, layout = tensors_and_layout
        flat: torch.Tensor = tensors[0].new_empty(shape)
        self._means.fused.pack(tensors, layout, flat)
        return flat

    def unpack_heads(
        self,
        flat: torch.Tensor,
        shapes: tuple[tuple[int, ...], ...],
        dtype: torch.dtype,
        layout: HeadLayout,
    ) -> Tensors:
        tensors = tuple(self.empty(shape, dtype) for shape in shapes)
        self._means.fused.unpack(flat, layout, tensors)
        return tensors

    def flat_heads(self, *tensors: torch.Tensor) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0].reshape(-1)  # a view of what kernels have made
        return torch.cat(tensors, dim=1).view(-1)

    def arrived_heads(
        self, flat: torch.Tensor, tokens: int, heads: tuple[int, ...], head_dim: int
    ) -> Tensors:
        return flat.view(tokens, sum(heads), head_dim).split(heads, dim=1)

    # -- kernels

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments
    ) -> Tensors:
        return self._means.kernel.forward(self._call(q, k, v, segments))

    def gradients(self, *tensors_and_segments: Any) -> Tensors:
        dout, q, k, v, out, lse, segments = tensors_and_segments
        return self._means.kernel.backward(self._call(q, k, v, segments), dout, out, lse)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments
    ) -> KernelCall:
        """Return a kernel call of this layer."""
        return KernelCall(q, k, v, segments, *self.scores, beside_transfers=bool(self.pending))

    def sink(self, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
        with_sinks = torch.logaddexp(lse, sinks.unsqueeze(1))  # [H, t]
        kept = torch.exp(lse - with_sinks)  # [H, t]: the share that the sinks leave
        out.mul_(kept.t().unsqueeze(2))
        lse.copy_(with_sinks)

    def sink_gradient(
        self,
        total: torch.Tensor,
        sinks: torch.Tensor,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        shares = torch.exp(sinks.unsqueeze(1) - lse)  # [H, t]: of the sinks in each softmax
        # Some rows at a time: a product in WIDE is as large as a result that is.
        parts = (dout.split(SINK_ROWS), out.split(SINK_ROWS), shares.split(SINK_ROWS, dim=1))
        for part_dout, part_out, part_shares in zip(*parts, strict=True):
            products = (part_dout.to(lse.dtype) * part_out).sum(2)  # [n, H, D] -> [n, H]
            total.sub_((part_shares * products.t()).sum(1))

    def attend_cut(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: Reach
    ) -> Tensors:
        assert self.cut is not None, "this layer has no part of a cut sequence"
        return self.cut.forward(q, k, v, self.scores, reach)

    def gradients_of_cut(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        reach: Reach,
    ) -> Tensors:
        assert self.cut is not None, "this layer has no part of a cut sequence"
        return self.cut.backward(dout, (q, out, lse), self.scores, reach)

    # -- transfers

    def post(self, *tensors_and_post: Any) -> Tensors:
        *tensors, post = tensors_and_post
        made = tuple(self.empty(shape, dtype) for shape, dtype in post.made)
        tensors += made
        transport = self._means.communicator.transport
        pending = []
        for lane, sends, recvs in post.lanes:
            pending.append(
                transport.post(
                    lane,
                    sends=[
                        Message(tensors[at].contiguous(), peer, tag) for at, peer, tag in sends
                    ],
                    recvs=[Message(tensors[at], peer, tag) for at, peer, tag in recvs],
                    label=post.label,
                )
            )
        self.pending[post.number] = pending
        return made

    def all_to_all(
        self, sent: torch.Tensor, received: torch.Tensor, number: int, spec: AllToAllSpec
    ) -> None:
        self.pending[number] = all_to_all(
            self._means.communicator,
            spec.ranks,
            sent,
            received,
            spec.sent,
            spec.received,
            tag=spec.tag,
            label=spec.label,
        )

    def wait(self, number: int) -> None:
        for pending in self.pending.pop(number):
            pending.wait()
