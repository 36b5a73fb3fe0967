"""Tensors that a pipeline stage carries from one chunk of a sequence to the next.

    attention      keys and values of earlier chunks, and their gradients (`pipeline/carry.py`)
    scan           the state after a chunk goes to the next one; the gradient of that state comes
                   back from it
    convolution    so do the last W - 1 rows before the next chunk, its *halo*

Chunks of a sequence go forward in order and backward in the opposite one (Seq1F1B, arXiv
2406.03488). Any other order would silently give wrong gradients, so a forward mark (positions
stored) and a backward mark (positions not yet drained) are kept, and another order raises. A chunk
that is stored already and is next in the backward is the replay of a checkpointed layer: it finds
the values that its first run was given, which are kept until its backward. Where no gradient is
needed no backward ends the replays, and they stay until the step ends.
"""

from collections.abc import Hashable
from typing import NamedTuple, TypeVar

import torch

from hf_flexseq.attention.remat import checkpointed_region
from hf_flexseq.plan.shard import Slice

CarryKey = tuple[Hashable, int]  # (layer, or layer and call in it; sequence)


class WrongOrder(RuntimeError):
    """A chunk is not the next one of its sequence, or something was left at the end of a step."""


class Carry:
    """Everything that one stage carries, by layer and sequence."""

    def __init__(self) -> None:
        self._carried: dict[CarryKey, Carried] = {}

    def find(
        self,
        kind: "type[Kind]",
        layer: Hashable,
        part: Slice,
        length: int,
        *,
        keeps_grad: bool,
    ) -> "Kind":
        """Return the record of the sequence to which `part` belongs, which begins with the
        sequence's first chunk. With a part in a checkpointed region it is over with the step.

        kind: of the record
        layer: the layer, or also the number of the call in it
        length: tokens of the whole sequence
        keeps_grad: True if a backward will follow; otherwise the sequence is over with its last
            chunk's forward. Read with the sequence's first part alone

        Raises WrongOrder when the first part that is seen is not the sequence's first.
        """
        key = (layer, part.sequence)
        if key not in self._carried:
            if part.start:
                raise WrongOrder(
                    f"layer {layer}: sequence {part.sequence} begins at {part.start} instead of 0"
                )
            self._carried[key] = kind(self, key, length, keeps_grad=keeps_grad)
        carried = self._carried[key]
        assert isinstance(carried, kind), f"{carried} is of another kind"
        carried.runs_again |= checkpointed_region() is not None
        return carried

    def drop(self, key: CarryKey) -> None:
        """Forget a sequence that is over."""
        del self._carried[key]

    def check_empty(self) -> None:
        """Raise WrongOrder unless all begun sequences have been drained; forget all of them."""
        # A rank without a query head of a layer stores nothing.
        begun = [carried for carried in self._carried.values() if carried.stored]
        left = [str(carried) for carried in begun if not carried.is_over]
        self._carried.clear()
        if left:
            raise WrongOrder(f"the step is over, but not drained: {', '.join(left)}")


class Carried:
    """The record of one sequence in one layer. Positions before `stored` have gone forward, those
    from `drained` on backward."""

    def __init__(self, carry: Carry, key: CarryKey, length: int, *, keeps_grad: bool) -> None:
        self._carry = carry
        self._key = key
        self.keeps_grad = keeps_grad
        self.runs_again = False  # True if a part is in a checkpointed region
        self.length = length
        self.stored = 0
        self.drained = length

    @property
    def is_over(self) -> bool:
        """True if no backward is missing, though replays may have been."""
        return self.stored == self.length and not self.keeps_grad

    def goes_forward(self, part: Slice) -> bool:
        """Move the forward mark to the end of a part, or return False for its replay. Raises
        WrongOrder when the part is not the next one."""
        if self.is_over or (self.stored == self.length and part.stop == self.drained):
            return False
        if part.start != self.stored or part.stop > self.length:
            raise WrongOrder(
                f"{self}: the forward of [{part.start}, {part.stop}) is not the next one"
            )
        self.stored = part.stop
        if self.is_over and not self.runs_again:
            self._carry.drop(self._key)
        return True

    def check_next_backward(self, part: Slice) -> None:
        """Raise WrongOrder when a part is not the next one to go backward."""
        if self.stored < self.length or part.stop != self.drained:
            raise WrongOrder(
                f"{self}: the backward of [{part.start}, {part.stop}) is not the next one"
            )

    def went_backward(self, part: Slice) -> None:
        """Move the backward mark to the start of a part."""
        self.drained = part.start
        if self.drained == 0:
            self._carry.drop(self._key)

    def __str__(self) -> str:
        layer, sequence = self._key
        return (
            f"layer {layer}, sequence {sequence} (stored {self.stored} of {self.length} "
            f"positions, {self.length - self.drained} drained)"
        )


Kind = TypeVar("Kind", bound=Carried)


class CarriedState(Carried):
    """The record of a scan, which carries its state, or of a convolution, which carries a halo."""

    def __init__(self, carry: Carry, key: CarryKey, length: int, *, keeps_grad: bool) -> None:
        super().__init__(carry, key, length, keeps_grad=keeps_grad)
        self.values: dict[int, torch.Tensor] = {}  # given to the chunk that begins there
        self.gradient: torch.Tensor | None = None  # from the backward of the next chunk


class Carrying(NamedTuple):
    """One call of a recurrent layer on a chunk whose first segment is part of a cut sequence."""

    carried: CarriedState
    part: Slice

    def given(self) -> torch.Tensor | None:
        """Return the value from which the part continues; None at the start of its sequence.
        Raises WrongOrder when nothing was stored there."""
        start = self.part.start
        if start == 0:
            return None
        if start not in self.carried.values:
            raise WrongOrder(f"{self.carried}: nothing is carried to token {start}")
        return self.carried.values[start]

    def store(self, value: torch.Tensor) -> None:
        """Keep the value from which the next part continues, unless this is a replay. Raises
        WrongOrder when the part is not the next one to go forward."""
        carried, part = self
        if not carried.goes_forward(part):
            return
        if part.stop < carried.length:
            carried.values[part.stop] = value
        if not (carried.keeps_grad or carried.runs_again):
            carried.values.pop(part.start, None)

    def gradient_after(self) -> torch.Tensor | None:
        """Return the gradient of the stored value; None after the last part. Raises WrongOrder
        when the part is not the next one to go backward."""
        self.carried.check_next_backward(self.part)
        return self.carried.gradient

    def leave_gradient(self, gradient: torch.Tensor) -> None:
        """Keep, for the previous part, the gradient of the given value."""
        self.carried.gradient = gradient if self.part.start else None
        self.carried.values.pop(self.part.start, None)
        self.carried.went_backward(self.part)
