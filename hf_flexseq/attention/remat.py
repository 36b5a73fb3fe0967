"""Attention that activation checkpointing does not run again.

A checkpointed layer runs twice: in the forward, and again when its gradient is needed. Attention
and its transfers are the dearest part of the second run, and the one that need not be: with its
result and log-sum-exp at hand, all that its backward lacks is q, k and v, which the layer computes
again anyway.

1. The first run leaves out and lse in a store on the `SequenceContext`, under the checkpointed
   region it runs in.
2. The replay takes them from there instead of attending. It moves no bytes.
3. The backward gets q, k and v of the replay. Ulysses, which attends in another layout, exchanges
   them there, together with the gradient that it exchanges in any case: as many collectives as
   without checkpointing.

Where the checkpoint lies is DistFlashAttn's idea (arXiv 2310.03294, section 3.3), for any model
and not by moving the bounds of the checkpointed regions. Rejected: lists by layer number, which
mix two models; one store per process, which mixes two micro-batches; taking a call for a replay
because the store holds something for its layer, which hands the result of a forward that never had
a backward to the next forward.

The region is known from the hooks with which torch's non-reentrant checkpointing catches saved
tensors: they hold its frame, the same one in both runs. Entries live no longer than their frame,
so a graph that is dropped leaves none.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import _CheckpointFrame

Hook = Callable[[torch.Tensor], Any]


class Region(NamedTuple):
    """A checkpointed region in one of its runs. hook: another one in every run."""

    frame: _CheckpointFrame
    hook: Hook
    replays: bool


def checkpointed_region() -> Region | None:
    """The region that runs at this moment in this thread; None outside of any, and where nothing
    needs a gradient."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not torch.is_grad_enabled():
        return None
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        held = cell.cell_contents
        # the replay's hook holds it weakly
        frame = held() if isinstance(held, weakref.ref) else held
        if isinstance(frame, _CheckpointFrame):
            return Region(frame, hooks[0], replays=frame is not held)
    return None


class Kept(NamedTuple):
    """What one call of attention left. out: [tokens, heads, D], this rank's. lse: flat, of all
    zones; lse_shapes: of each. version: of out, to see whether the model has written to it."""

    out: torch.Tensor
    lse: torch.Tensor
    lse_shapes: tuple[torch.Size, ...]
    version: int

    @classmethod
    def of(cls, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]) -> "Kept":
        """saved: what every zone's backward needs, its log-sum-exp last."""
        lses = [tensors[-1] for tensors in saved]
        flat = [lse.flatten() for lse in lses]
        lse = flat[0] if len(flat) == 1 else torch.cat(flat)
        return cls(out, lse, tuple(x.shape for x in lses), out._version)

    def check(self) -> "Kept":
        """Raises RuntimeError when the model has written to the result."""
        if self.out._version != self.version:
            raise RuntimeError(
                "this model changes the result of attention in place: set attention_remat=False"
            )
        return self


class _Calls:
    """The calls of attention in one region, in their order, which the replay repeats."""

    __slots__ = ("_hook", "_kept", "_place")

    def __init__(self) -> None:
        self._kept: list[Kept | None] = []
        self._hook: Hook | None = None
        self._place = 0

    def append(self, kept: Kept) -> None:
        self._kept.append(kept)

    def take(self, hook: Hook) -> Kept | None:
        """What the next call of this run left; None in a second replay, for a second backward
        through one graph."""
        if hook is not self._hook:
            self._hook, self._place = hook, 0
        kept, self._kept[self._place] = self._kept[self._place], None
        self._place += 1
        return None if kept is None else kept.check()

    def __len__(self) -> int:
        return sum(kept is not None for kept in self._kept)


class KeptAttention:
    """Results of attention that wait for the replay of their layers. Its length is how many do."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[_CheckpointFrame, _Calls] = (
            weakref.WeakKeyDictionary()
        )

    def serves(self, region: Region) -> bool:
        """Whether attention in this region is kept. A replay does as its first run did, whatever
        has changed since; under a dispatch mode, such as selective checkpointing, the mode decides
        what is kept."""
        return region.frame in self._calls if region.replays else not _in_dispatch_mode()

    def put(self, region: Region, kept: Kept) -> None:
        self._calls.setdefault(region.frame, _Calls()).append(kept)

    def take(self, region: Region) -> Kept | None:
        return self._calls[region.frame].take(region.hook) if region.replays else None

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))


def _in_dispatch_mode() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0
