"""Tensors that leave the device behind the forward, and come back one layer ahead of their use.

    forward     a tensor is put    it is copied to the host; its memory on the device lives on
                                   until the compute stream has waited for the copy, one layer
                                   later
    backward    a tensor is taken  the other tensors of its layer come, too, and all tensors of the
                                   layer before, whose backward is next

So about one layer's tensors are under way at a time, in either direction, and the host need not
watch copies: it runs ahead of the device, and no call here waits for it. All copies are on one
stream, so bytes of a page are written again only after they were read.

The order of streams is

    out     compute stream ... tensor written | copy stream waits for this, copies | event
            | compute stream waits for the event | memory of the tensor is used again
    back    compute stream ... memory was last used | copy stream waits for this, copies | event
            | compute stream waits for the event | tensor is read

Rejected: `Tensor.record_stream`, under which the memory comes back when the host happens to notice
that a copy is over, so the peak depends on how far the host runs ahead. Rejected: to know tensors
by their addresses, which others get once a tensor is gone; so every stored tensor has a handle.

A CPU has one order of work, and a copy to the host is a plain copy.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hf_flexseq.memory.pages import PageBytes, Pages


class HostTensor:
    """A tensor that is on the host as long as its handle lives."""

    __slots__ = ("__weakref__", "_arriving", "_dtype", "_layer", "_pieces", "_shape", "_store")

    def __init__(
        self,
        store: "HostStore",
        layer: "_Layer",
        tensor: torch.Tensor,
        pieces: tuple[PageBytes, ...],
    ) -> None:
        self._store = store
        self._layer = layer
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._pieces = pieces
        self._arriving: _UnderWay | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor on the device: the bits, shape and dtype that were put, contiguous. It
        may be taken again, and then comes again."""
        return self._store._take(self)

    def __del__(self) -> None:
        self._store._dropped.append((self._pieces, self._arriving))


class _Layer:
    """The tensors that one layer has put in one run."""

    __slots__ = ("__weakref__", "before", "tensors")

    def __init__(self, before: "weakref.ref[_Layer] | None") -> None:
        self.before = before  # the last one that has put any
        self.tensors: list[weakref.ref[HostTensor]] = []  # that have not been fetched


class _UnderWay(NamedTuple):
    """A tensor on the device that a copy reads or writes."""

    tensor: torch.Tensor
    copied: torch.cuda.Event | None
    """When the copy is over; None on a CPU, where it is."""


class _Leaving(NamedTuple):
    """A tensor that goes to the host."""

    layer: int  # number of the run of a layer
    place: int  # among the tensors of this layer, from 0
    under_way: _UnderWay
    version: int  # of the tensor; torch counts it up at every write


class HostStore:
    """Takes tensors of one device to the host and back. All calls are of one thread at a time."""

    def __init__(self, device: torch.device, budget: int) -> None:
        """budget: the most bytes of the host, in pages; see `pages.py`."""
        self.device = device
        is_gpu = device.type == "cuda"
        self._pages = Pages(budget, pinned=is_gpu)
        self._copies = torch.cuda.Stream(device) if is_gpu else None
        self._layer = _Layer(None)  # whose forward runs
        self._number = 0  # of this run of a layer
        self._put = 0  # tensors of this layer so far
        self._leaving: deque[_Leaving] = deque()
        # Filled whenever a handle dies, in any thread and in the middle of anything.
        self._dropped: deque[tuple[tuple[PageBytes, ...], _UnderWay | None]] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._is_closed = False

    def __deepcopy__(self, memo: object) -> "HostStore":
        """Return a store without tensors: a copy of a model has no forward under way."""
        return HostStore(self.device, self._pages.budget)

    # ---- figures

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that have been on the host at a time."""
        return self._peak_bytes

    # ---- out

    def begin_layer(self) -> None:
        """Begin the next layer of a forward, which may put tensors or not."""
        last = self._layer
        self._layer = _Layer(weakref.ref(last) if self._put else last.before)
        self._number += 1
        self._put = 0
        self._let_go(before=self._number - 1)

    def put(self, tensor: torch.Tensor) -> HostTensor:
        """Copy a tensor of the device to the host, and return its handle. It must not be written
        to: RuntimeError is raised once that is noticed. Raises HostMemoryFull over the budget."""
        assert not self._is_closed, "this store has been closed"
        self._collect()
        self._let_go(before=self._number - 1, places=self._put)
        source = tensor.detach().contiguous()
        pieces = self._pages.take(source.nbytes)
        copied = self._copy(source, pieces, to_host=True)
        leaving = _UnderWay(source, copied)
        self._leaving.append(_Leaving(self._number, self._put, leaving, source._version))
        self._put += 1
        self._used_bytes += source.nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        stored = HostTensor(self, self._layer, source, pieces)
        self._layer.tensors.append(weakref.ref(stored))
        return stored

    def come_ahead(self, output: torch.Tensor) -> None:
        """Let the tensors of the last layer that has any come back when the backward of the layer
        after it begins. output: of that later layer, which puts none."""
        before = self._layer.before
        if before is not None and output.requires_grad:
            output.register_hook(lambda gradient: self._fetch_of(before))

    def settle(self) -> None:
        """End a forward: nothing that was put stays on the device."""
        self._let_go(before=self._number + 1)

    def _let_go(self, *, before: int, places: int = -1) -> None:
        """Free tensors that have left: all tensors of the layers before `before`, and the first
        `places + 1` of layer `before` itself."""
        while self._leaving:
            first = self._leaving[0]
            is_due = first.layer < before or (first.layer == before and first.place <= places)
            if not is_due:
                return
            self._leaving.popleft()
            self._wait_for(first.under_way)
            if first.under_way.tensor._version != first.version:
                raise RuntimeError(
                    "this model writes to a layer's input or to the result of attention after it "
                    "has left for the host: set activation_memory='as_set', without offload"
                )

    # ---- back

    def _take(self, stored: HostTensor) -> torch.Tensor:
        """Return a tensor on the device, and let those come that are needed next."""
        self._collect()
        self.settle()
        layer = stored._layer
        self._fetch(layer)
        if layer.before is not None:
            self._fetch_of(layer.before)
        if stored._arriving is None:  # taken for the second time
            self._fetch_one(stored)
        arriving = stored._arriving
        stored._arriving = None
        assert arriving is not None, "what is fetched is under way"
        self._wait_for(arriving)
        return arriving.tensor

    def _fetch_of(self, reference: "weakref.ref[_Layer]") -> None:
        """Let the tensors of a layer come, if any of them are needed still."""
        layer = reference()
        if layer is not None and not self._is_closed:
            self._fetch(layer)

    def _fetch(self, layer: _Layer) -> None:
        """Let all tensors of a layer come to the device, once."""
        tensors, layer.tensors = layer.tensors, []
        for one in tensors:
            stored = one()
            if stored is not None:
                self._fetch_one(stored)

    def _fetch_one(self, stored: HostTensor) -> None:
        target = torch.empty(stored._shape, dtype=stored._dtype, device=self.device)
        copied = self._copy(target, stored._pieces, to_host=False)
        stored._arriving = _UnderWay(target, copied)

    # ---- copies

    def _copy(
        self, on_device: torch.Tensor, pieces: tuple[PageBytes, ...], *, to_host: bool
    ) -> torch.cuda.Event | None:
        """Copy a contiguous tensor to its pieces or from them, after the work so far; return an
        event after which it is done, None if it is done."""
        if self._copies is None or not pieces:
            _copy_pieces(on_device, pieces, to_host=to_host)
            return None
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            _copy_pieces(on_device, pieces, to_host=to_host)
            return self._copies.record_event()

    def _wait_for(self, under_way: _UnderWay) -> None:
        """Let the work that follows on the device wait for a copy."""
        if under_way.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(under_way.copied)

    # ---- the end

    def _collect(self) -> None:
        """Free the memory of handles that are gone."""
        while self._dropped:
            pieces, arriving = self._dropped.popleft()
            if self._is_closed:
                continue
            if arriving is not None:
                self._wait_for(arriving)
            self._used_bytes -= sum(piece.stop - piece.start for piece in pieces)
            self._pages.give_back(pieces)

    def close(self) -> None:
        """Free all memory. Tensors that are still on the host are lost."""
        self._is_closed = True
        try:
            if self._copies is not None:
                self._copies.synchronize()
        finally:
            self._leaving.clear()
            self._dropped.clear()
            self._layer = _Layer(None)
            self._pages.close()
            self._used_bytes = 0
            if self._copies is not None:
                free_cached_pinned_memory()


def _copy_pieces(on_device: torch.Tensor, pieces: Iterable[PageBytes], *, to_host: bool) -> None:
    """Copy the bytes of a contiguous tensor to pieces of the host, or from them."""
    flat = on_device.view(-1).view(torch.uint8)  # [...] -> [elements] -> [bytes]
    at = 0
    for piece in pieces:
        on_host = piece.bytes()
        part = flat[at : at + len(on_host)]
        if to_host:
            on_host.copy_(part, non_blocking=True)
        else:
            part.copy_(on_host, non_blocking=True)
        at += len(on_host)


def free_cached_pinned_memory() -> None:
    """Give pinned memory that torch keeps for reuse back to the machine."""
    free = getattr(torch._C, "_host_emptyCache", None)  # CUDA builds have it
    if free is not None:
        free()
