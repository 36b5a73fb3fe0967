"""Attention that activation checkpointing does not run again.

A checkpointed layer runs twice: in the forward, and again (the *replay*) when its gradient is
needed. Attention and its transfers are the most expensive part of the replay, and need not be
repeated: with result and log-sum-exp kept, the backward lacks only q, k and v, which the replay of
the layer computes anyway.

1. The first run leaves out and lse in a store on the `SequenceContext`, under the checkpointed
   region it runs in.
2. The replay takes them from there instead of attending. It moves no bytes.
3. The backward gets q, k and v of the replay. Ulysses, which attends in another layout, exchanges
   them with the gradient: as many collectives as without checkpointing.

Meanwhile they are on the device, or on the host (`memory/store.py`); or they are not kept, and the
replay attends again. The caller of a layer says which (`KeptAttention.of_layer`).

The place of the checkpoint is DistFlashAttn's idea (arXiv 2310.03294, section 3.3), here for any
model and without moving the bounds of the checkpointed regions.

Requirements on torch
---------------------
The region is known from the hooks with which torch's non-reentrant checkpointing catches saved
tensors: they hold the frame of the region, the same one in both runs. These names are private:

    torch._C._autograd._top_saved_tensors_default_hooks(True)
        returns the innermost pair of hooks, or None
    torch.utils.checkpoint._CheckpointFrame
        the frame; it is in a closure cell of the pack hook: itself in the first run, in a
        weakref.ref in the replay
    torch._C._len_torch_dispatch_stack()
        returns the number of active dispatch modes

If the hooks change, no region is found and attention is simply replayed; tests/hf/test_remat.py
counts kernel calls and fails. Entries live no longer than their frame.

Rejected: lists by layer number, which mix up two models; one store per process, which mixes up two
micro-batches; taking a call for a replay because the store has something for its layer, which
confuses it with a forward that never had a backward.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import _CheckpointFrame

from hf_flexseq.memory.store import HostStore, HostTensor

Hook = Callable[[torch.Tensor], Any]


class Region(NamedTuple):
    """A checkpointed region of a model in one of its runs."""

    frame: _CheckpointFrame
    """Identifies the region: the same object in the first run and in every replay."""
    hook: Hook
    """Identifies the run: torch makes a new pack hook for each."""
    replays: bool
    """True if this run is a replay."""


def checkpointed_region() -> Region | None:
    """Return the region that runs now in this thread; None outside of any, and without
    gradients."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not torch.is_grad_enabled():
        return None
    pack_hook = hooks[0]
    cells = getattr(inspect.unwrap(pack_hook), "__closure__", None) or ()
    for cell in cells:
        content = cell.cell_contents
        if isinstance(content, _CheckpointFrame):
            return Region(content, pack_hook, replays=False)
        if isinstance(content, weakref.ref):  # a replay's hook holds its frame weakly
            frame = content()
            if isinstance(frame, _CheckpointFrame):
                return Region(frame, pack_hook, replays=True)
    return None


class Kept(NamedTuple):
    """Result of one call of attention, or of one exchange or scan, for the replay of its layer."""

    out: torch.Tensor
    """The result, [tokens, heads, head_dim] of this rank in attention."""
    others: tuple[torch.Tensor, ...]
    """Other inputs of the backward: in attention, the log-sum-exp of each zone."""
    version: int
    """The version of `out` when it was kept; torch counts it up at every write."""

    @classmethod
    def of(cls, out: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> "Kept":
        """Return the result of a call, and further tensors that its backward needs, to be kept."""
        return cls(out, tuple(others), out._version)

    def take(self) -> "Kept":
        """Return this, or raise RuntimeError when the model has written to the result."""
        if self.out._version != self.version:
            raise RuntimeError(
                "this model changes the result of attention in place: set "
                "save_attention_output=False and activation_memory='as_set'"
            )
        return self


class KeptOnHost(NamedTuple):
    """The tensors of a `Kept`, on the host."""

    out: HostTensor
    others: tuple[HostTensor, ...]

    @classmethod
    def of(cls, kept: Kept, host: HostStore) -> "KeptOnHost":
        """Return `kept` on the host; it leaves the device from now on."""
        return cls(host.put(kept.out), tuple(map(host.put, kept.others)))

    def take(self) -> Kept:
        """Return it on the device."""
        return Kept.of(self.out.take(), [other.take() for other in self.others])


def kept_region(kept: "KeptAttention | None") -> Region | None:
    """Return the checkpointed region that runs now, if its results are kept for its replay."""
    if kept is None:
        return None
    region = checkpointed_region()
    if region is None or not kept.serves(region):
        return None
    return region


class _KeptCalls:
    """The calls of attention in one region, in their order, which every replay repeats."""

    __slots__ = ("_hook", "_kept", "_next")

    def __init__(self) -> None:
        self._kept: list[Kept | KeptOnHost | None] = []  # by call; None once taken
        self._hook: Hook | None = None  # of the run that takes
        self._next = 0  # the call that this run takes next

    def append(self, kept: Kept | KeptOnHost) -> None:
        self._kept.append(kept)

    def take(self, hook: Hook) -> Kept | None:
        """Return and drop the result that the next call of this run left; None in a second
        replay."""
        if hook is not self._hook:  # a new run begins
            self._hook = hook
            self._next = 0
        kept = self._kept[self._next]
        self._kept[self._next] = None
        self._next += 1
        if kept is None:
            return None
        return kept.take()

    def __len__(self) -> int:
        return sum(kept is not None for kept in self._kept)


class KeptAttention:
    """Results of attention that wait for the replay of their layers; `len` counts them."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[_CheckpointFrame, _KeptCalls] = (
            weakref.WeakKeyDictionary()
        )
        # of the layer whose forward runs now
        self._keeps = True
        self._host: HostStore | None = None

    @contextmanager
    def of_layer(self, *, keeps: bool, host: HostStore | None) -> Iterator[None]:
        """Surround the forward of a layer. keeps: False if its replay attends again. host: where
        its results wait; None for the device."""
        former = self._keeps, self._host
        self._keeps, self._host = keeps, host
        try:
            yield
        finally:
            self._keeps, self._host = former

    def serves(self, region: Region) -> bool:
        """Return True if the results of attention in this region are kept. A replay does as its
        first run did. Under a dispatch mode, such as selective checkpointing, the mode decides."""
        if region.replays:
            return region.frame in self._calls
        return self._keeps and not _in_dispatch_mode()

    def put(self, region: Region, kept: Kept) -> None:
        """Keep the result of the region's next call."""
        one = kept if self._host is None else KeptOnHost.of(kept, self._host)
        self._calls.setdefault(region.frame, _KeptCalls()).append(one)

    def take(self, region: Region) -> Kept | None:
        """Return the result that the first run kept of this call; None in a first run."""
        if not region.replays:
            return None
        return self._calls[region.frame].take(region.hook)

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._calls.values())


def _in_dispatch_mode() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0
