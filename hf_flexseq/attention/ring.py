"""The one executor of the ring family: obeys a list of steps (`schedule/attention.py`) and knows no schedule.

Forward, for every step of this rank: fetch the keys and values that the step reads from their owner, while the step
before computes; attend; merge the partial result into the running one by its log-sum-exp.

Backward, with the *merged* out and lse every step's gradient is independent of the others and is only summed: fetch
again, compute, send dK and dV straight back to the owner, who adds them up in schedule order.

Ring Attention (arXiv 2310.01889) for the blockwise merge, DistFlashAttn (arXiv 2310.03294, section 3) for fetching
ahead. Partial results are merged in float32 and dK, dV travel and accumulate in float32 (float64 for float64): a
16-bit accumulator costs several times the error of a single kernel. Rejected: keeping the fetched keys and values for
the backward, which would hold whole sequences on every rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.schedule.attention import zigzag
from hf_flexseq.shard import Zone, zigzag_bounds, zigzag_chunks


class Rows(NamedTuple):
    """Some chunks of every sequence, as places in the owner's rows. index: None when they are all its rows."""

    lengths: tuple[int, ...]
    index: torch.Tensor | None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.index is None else x.index_select(0, self.index)

    def add_to(self, total: torch.Tensor, part: torch.Tensor) -> None:
        if self.index is None:
            total += part
        else:
            total.index_add_(0, self.index, part.to(total.dtype))


class StepCall(NamedTuple):
    """A step made concrete for one micro-batch: which rows attend to which, whose, and what others read of ours."""

    queries: Rows
    segments: Segments
    source: int
    fetched: int
    reader: int
    lent: Rows


class RingZone:
    """This rank's part in a group of the ring family."""

    __slots__ = ("calls", "communicator", "kernel", "rows")

    def __init__(self, zone: Zone, communicator: Communicator, kernel: Kernel, device: torch.device) -> None:
        self.rows = slice(zone.start, zone.stop)
        self.communicator, self.kernel = communicator, kernel
        bounds = zigzag_bounds(zone.lengths, zone.group.degree)
        self.calls = _step_calls(zone, bounds, device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, Tensors]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's chunks -> out [t, H, D], and what `backward` needs."""
        kv = torch.stack((k, v), dim=1)  # [t, 2, Hkv, D]
        out = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)
        lse = out.new_full((q.shape[1], q.shape[0]), -torch.inf)  # [H, t]
        fetch = self._fetch(0, kv)
        for t, call in enumerate(self.calls):
            block_kv = fetch.result()
            fetch = self._fetch(t + 1, kv)  # travels while this step computes
            if call.segments.has_work():
                block_k, block_v = block_kv.unbind(1)
                block = self.kernel.forward(call.queries.take(q), block_k, block_v, call.segments, scale=scale)
                _merge(out, lse, *block, call.queries)
        out = out.to(q.dtype)
        return out, (q, kv, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors:
        q, kv, out, lse = saved
        dq = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)
        dkv = torch.zeros(kv.shape, dtype=dq.dtype, device=q.device)
        fetch = self._fetch(0, kv)
        returning: tuple[Transfers, Rows, torch.Tensor] | None = None
        for t, call in enumerate(self.calls):
            block_kv = fetch.result()
            fetch = self._fetch(t + 1, kv)
            if call.segments.has_work():
                dq_block, *dkv_block = self._block_backward(call, dout, q, block_kv, out, lse, scale)
                call.queries.add_to(dq, dq_block)
                block_dkv = torch.stack(dkv_block, dim=1).to(dkv.dtype)
            else:
                block_dkv = torch.zeros(block_kv.shape, dtype=dkv.dtype, device=q.device)
            _add_returned(returning, dkv)  # of the step before: it travelled while this one computed
            if t == 0:
                dkv += block_dkv
            else:
                returning = self._return(t, block_dkv, kv)
        _add_returned(returning, dkv)
        dk, dv = dkv.to(q.dtype).unbind(1)
        return dq.to(q.dtype), dk, dv

    def _block_backward(
        self,
        call: StepCall,
        dout: torch.Tensor,
        q: torch.Tensor,
        block_kv: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> Tensors:
        rows = call.queries
        block_lse = lse if rows.index is None else lse.index_select(1, rows.index)
        block_k, block_v = block_kv.unbind(1)
        return self.kernel.backward(
            rows.take(dout), rows.take(q), block_k, block_v, rows.take(out), block_lse, call.segments, scale=scale
        )

    def _fetch(self, t: int, kv: torch.Tensor) -> "_Fetch":
        """Keys and values of step t on their way here, and ours to the rank that reads them at that step."""
        if t == 0 or t == len(self.calls):
            return _Fetch(kv, None)
        call = self.calls[t]
        block = kv.new_empty(call.fetched, *kv.shape[1:])
        lent = call.lent.take(kv)
        return _Fetch(
            block,
            Transfers(
                self.communicator, sends=[(lent.contiguous(), call.reader)], recvs=[(block, call.source)], tag=2 * t
            ),
        )

    def _return(self, t: int, block_dkv: torch.Tensor, kv: torch.Tensor) -> tuple[Transfers, Rows, torch.Tensor]:
        """Gradients of the keys and values of step t on their way to their owner, and of ours back from the reader."""
        call = self.calls[t]
        part = block_dkv.new_empty(sum(call.lent.lengths), *kv.shape[1:])
        transfers = Transfers(
            self.communicator, sends=[(block_dkv, call.source)], recvs=[(part, call.reader)], tag=2 * t + 1
        )
        return transfers, call.lent, part


def _add_returned(returning: tuple[Transfers, Rows, torch.Tensor] | None, dkv: torch.Tensor) -> None:
    """Wait for gradients that a reader of our keys and values sends back, and add them."""
    if returning is not None:
        transfers, lent, part = returning
        transfers.wait()
        lent.add_to(dkv, part)


class _Fetch:
    """Keys and values that are on their way, or were here all along."""

    __slots__ = ("_block", "_transfers")

    def __init__(self, block: torch.Tensor, transfers: Transfers | None) -> None:
        self._block, self._transfers = block, transfers

    def result(self) -> torch.Tensor:
        if self._transfers is not None:
            self._transfers.wait()
        return self._block


def _step_calls(zone: Zone, bounds: Sequence[Sequence[int]], device: torch.device) -> tuple[StepCall, ...]:
    degree, index, start = zone.group.degree, zone.index, zone.group.start
    steps = zigzag(index, degree)
    calls = []
    for t, step in enumerate(steps):
        reader = (index + t) % degree  # whose step t reads from this rank
        lent = zigzag(reader, degree)[t]
        assert lent.source == index, f"step {t}: rank {index} lends to {reader}, who reads from {lent.source}"
        key_lengths = _lengths(bounds, step.keys)
        queries = _rows(bounds, zigzag_chunks(index, degree), step.queries, device)
        calls.append(
            StepCall(
                queries=queries,
                segments=Segments(queries.lengths, key_lengths, causal=step.causal, device=device),
                source=start + step.source,
                fetched=sum(key_lengths),
                reader=start + reader,
                lent=_rows(bounds, zigzag_chunks(index, degree), lent.keys, device),
            )
        )
    return tuple(calls)


def _lengths(bounds: Sequence[Sequence[int]], chunks: Sequence[int]) -> tuple[int, ...]:
    """Tokens of these chunks, for each sequence."""
    return tuple(sum(b[c + 1] - b[c] for c in chunks) for b in bounds)


def _rows(bounds: Sequence[Sequence[int]], owned: Sequence[int], chunks: Sequence[int], device: torch.device) -> Rows:
    """Where `chunks` of every sequence lie among the rows of a rank that owns the chunks `owned`."""
    lengths = _lengths(bounds, chunks)
    if tuple(chunks) == tuple(owned):
        return Rows(lengths, None)
    places: list[int] = []
    row = 0
    for b in bounds:
        for chunk in owned:
            size = b[chunk + 1] - b[chunk]
            if chunk in chunks:
                places.extend(range(row, row + size))
            row += size
    return Rows(lengths, torch.tensor(places, dtype=torch.int64, device=device))


def _merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor, rows: Rows) -> None:
    """Merge a partial result, normalised over its own keys, into the running one, in place.

    out [t, H, D] and lse [H, t] accumulate; `rows` says which queries the block covers. A query that has read nothing
    yet has lse = -inf, and so has the block where a sequence has no key in it; logaddexp of two -inf is -inf, and the
    weights below are then taken as zero instead of exp(nan).
    """
    index = slice(None) if rows.index is None else rows.index
    before, running = lse[:, index], out[index]
    merged = torch.logaddexp(before, block_lse)
    empty = merged == -torch.inf
    keep = torch.where(empty, 0.0, (before - merged).exp()).t().unsqueeze(-1)  # [rows, H, 1]
    add = torch.where(empty, 0.0, (block_lse - merged).exp()).t().unsqueeze(-1)
    out[index] = running * keep + block_out.to(out.dtype) * add
    lse[:, index] = merged
