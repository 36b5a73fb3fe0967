"""Hooks on the layers of a model that runs on tensors without memory (`live_bytes.py`): how many
bytes live before and behind each layer and its MLPs, and the most in each part of its backward.

    forward     before and behind a layer, in between, before and behind its MLPs
    backward    from the gradient of a layer's output to the gradient of its input, in three parts:
                before the backward of its MLP, inside of it, and behind it

A layer's input may live on in its backward, because it is needed there, or because a checkpoint
keeps it. It is counted as one of the layer's bytes in both cases, once.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_flexseq.memory.live_bytes import LiveBytes

# A layer's forward, parts of its backward, and those of the model's run outside of layers.
_FORWARD = "forward"
_ABOVE, _INSIDE, _BELOW = "above", "inside", "below"
_HEAD, _BETWEEN = "head", "between"


@dataclass(slots=True)
class SeenLayer:
    """Bytes of all tokens that were seen of a layer."""

    input: int = 0
    """Bytes of its input."""
    before: int = 0
    """Bytes that lived before its forward, the input included."""
    behind: int = 0
    """Bytes that lived behind its forward, the input included."""
    keeps_input: bool = True
    """Whether its input still lived when its backward began."""
    mlp: int = 0
    """Bytes that its MLPs have kept."""
    tiled: int = 0
    """Bytes of these, and of the MLP's backward, that exist for one tile at a time."""
    peaks: dict[str, int] = field(default_factory=dict)
    """The most bytes that lived at once, in its forward and by part of its backward."""

    @property
    def gone(self) -> int:
        """Bytes of its input if it is not needed in the backward."""
        return 0 if self.keeps_input else self.input

    @property
    def kept(self) -> int:
        """Bytes that it keeps for its backward, with its output for its input."""
        return self.behind - self.before - self.gone

    @property
    def peak(self) -> int:
        """The most bytes that lived in its backward, with its input; or in its forward, which runs
        again when the gradient of its output, as large as its input, is there."""
        parts = [peak for part, peak in self.peaks.items() if part != _FORWARD]
        return max(max(parts) + self.gone, self.peaks[_FORWARD] + self.input)

    @property
    def rest(self) -> int:
        """The most bytes that would live outside of its MLPs, if these were tiled."""
        above = self.peaks.get(_ABOVE, 0) - self.mlp
        return max(above, self.peaks.get(_BELOW, 0)) + self.gone


class LayerWatch:
    """Hooks on some layers of a model, for one forward and backward."""

    def __init__(self, tracker: LiveBytes) -> None:
        self._tracker = tracker
        self._place: tuple[SeenLayer | None, str] = (None, _BETWEEN)
        self._hooks: list[Any] = []
        self._before_mlp = 0
        self.layers: list[SeenLayer] = []
        """The layers in their order."""
        self.head = 0
        """The most bytes that lived between the last layer's forward and its backward."""

    def on(self, layer: nn.Module, mlps: Sequence[nn.Module]) -> None:
        """Watch a layer, and those MLPs of it that can be tiled."""
        seen = SeenLayer()
        self.layers.append(seen)
        begin, end = partial(self._begin, seen), partial(self._end, seen)
        self._hooks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        self._hooks.append(layer.register_forward_hook(end, with_kwargs=True))
        for mlp in mlps:
            begin_mlp, end_mlp = partial(self._begin_mlp, seen), partial(self._end_mlp, seen)
            self._hooks.append(mlp.register_forward_pre_hook(begin_mlp))
            self._hooks.append(mlp.register_forward_hook(end_mlp))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _go_to(self, seen: SeenLayer | None, part: str) -> None:
        """Note that another part begins, and credit the peak since the last call to the former."""
        peak = self._tracker.take_peak()
        former, name = self._place
        if former is not None:
            former.peaks[name] = max(peak, former.peaks.get(name, 0))
        elif name == _HEAD:
            self.head = peak
        self._place = (seen, part)

    # ---- layers

    def _begin(self, seen: SeenLayer, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the live bytes before the forward of a layer."""
        self._go_to(None, _BETWEEN)
        seen.before = self._tracker.live
        seen.input = _hidden(args, kwargs).untyped_storage().nbytes()
        self._go_to(seen, _FORWARD)

    def _end(self, seen: SeenLayer, layer: nn.Module, args: Any, kwargs: Any, given: Any) -> None:
        """Note the live bytes behind the forward of a layer, and wait for its backward."""
        seen.behind = self._tracker.live
        hidden = _hidden(args, kwargs)
        output = given[0] if isinstance(given, tuple) else given
        storage = weakref.ref(hidden.untyped_storage())

        def backward_begins(_: torch.Tensor) -> None:
            seen.keeps_input = storage() is not None
            self._go_to(seen, _ABOVE)

        def backward_ends(_: torch.Tensor) -> None:
            # The layer before it may have begun already: its output is the same tensor.
            if self._place[0] is seen:
                self._go_to(None, _BETWEEN)

        output.register_hook(backward_begins)
        hidden.register_hook(backward_ends)
        self._go_to(None, _HEAD)

    # ---- MLPs

    def _begin_mlp(self, seen: SeenLayer, mlp: nn.Module, args: Any) -> None:
        """Note the live bytes before the forward of an MLP."""
        self._before_mlp = self._tracker.live

    def _end_mlp(self, seen: SeenLayer, mlp: nn.Module, args: Any, output: torch.Tensor) -> None:
        """Note the bytes that the forward of an MLP keeps, and wait for its backward."""
        # No hook may hold a tensor, which would then live on.
        given_bytes = args[0].untyped_storage().nbytes()
        kept = self._tracker.live - self._before_mlp - output.untyped_storage().nbytes()
        seen.mlp += kept
        before = 0

        def backward_begins(_: torch.Tensor) -> None:
            nonlocal before
            before = self._tracker.live
            self._go_to(seen, _INSIDE)

        def backward_ends(_: torch.Tensor) -> None:
            self._go_to(seen, _BELOW)
            work = seen.peaks[_INSIDE] - before
            # The gradient of its input is whole, whatever the tiles.
            seen.tiled = max(seen.tiled, kept + work - given_bytes)

        output.register_hook(backward_begins)
        args[0].register_hook(backward_ends)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the hidden states that a layer is given, [1, tokens, hidden]."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
