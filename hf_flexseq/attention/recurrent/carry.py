"""Values that recurrent layers carry from one chunk of a sequence to the next, on a stage of a
pipeline.

    scan           the state after a chunk goes to the next one; the gradient of that state comes
                   back from it
    convolution    so do the last W - 1 rows before the next chunk, its *halo*

Chunks of a sequence go forward in order and backward in the opposite one (Seq1F1B). The values
that a chunk was given are kept until its backward, because the replay of a checkpointed layer
needs them again; where no gradient is needed, and so no backward comes, until the end of the step.
As for keys and values (`pipeline/carry.py`) any other order raises.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch

CarryKey = tuple[Hashable, int]  # (layer and call in it, sequence)


class WrongOrder(RuntimeError):
    """A chunk is not the next one of its sequence, or something was left at the end of a step."""


class _Sequence:
    """Carried state of one sequence in one call of one layer."""

    __slots__ = ("drained", "goes_back", "gradient", "runs_again", "stored", "values")

    def __init__(self, length: int, *, goes_back: bool) -> None:
        self.goes_back = goes_back  # True if a backward follows
        self.runs_again = False  # True if a part is in a checkpointed region
        self.values: dict[int, torch.Tensor] = {}  # given to the chunk that begins there
        self.gradient: torch.Tensor | None = None  # of what the next chunk backward gave on
        self.stored = 0  # tokens that have gone forward
        self.drained = length  # first of the tokens that have gone backward

    @property
    def is_over(self) -> bool:
        """True if no backward is missing, though replays may have been."""
        return not self.goes_back and self.stored == self.drained


class StateCarry:
    """Everything that the recurrent layers of one stage carry, by call and sequence."""

    def __init__(self) -> None:
        self.sequences: dict[CarryKey, _Sequence] = {}

    def check_empty(self) -> None:
        """Raise WrongOrder unless all begun sequences have been drained; forget all of them."""
        left = [_name(key) for key, one in self.sequences.items() if not one.is_over]
        self.sequences.clear()
        if left:
            raise WrongOrder(f"the step is over, but not drained: {', '.join(left)}")


class Part(NamedTuple):
    """The part of a cut sequence that a chunk begins with."""

    sequence: int
    """Id of the sequence."""
    start: int
    stop: int
    """One past its last token."""
    length: int
    """Tokens of the whole sequence."""

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class Carrying(NamedTuple):
    """One call of a recurrent layer on a chunk whose first segment is part of a cut sequence."""

    carry: StateCarry
    layer: Hashable
    """The layer, and the number of the call in it."""
    part: Part
    keeps_grad: bool
    """True if a backward will follow."""
    runs_again: bool = False
    """True if the call is in a checkpointed region."""

    @property
    def _key(self) -> CarryKey:
        return (self.layer, self.part.sequence)

    def given(self) -> torch.Tensor | None:
        """Return the value from which the part continues; None at the start of its sequence.
        Raises WrongOrder when nothing was stored there."""
        start = self.part.start
        if start == 0:
            return None
        sequence = self.carry.sequences.get(self._key)
        if sequence is None or start not in sequence.values:
            raise WrongOrder(f"nothing is carried to token {start} of {_name(self._key)}")
        return sequence.values[start]

    def store(self, value: torch.Tensor) -> None:
        """Keep the value from which the next part continues, unless this is a replay. Raises
        WrongOrder when the part is not the next one to go forward."""
        key, part, sequences = self._key, self.part, self.carry.sequences
        if part.start == 0 and key not in sequences:
            sequences[key] = _Sequence(part.length, goes_back=self.keeps_grad)
        sequence = sequences.get(key)
        if sequence is not None and part.stop <= sequence.stored:
            return  # a replay
        if sequence is None or part.start != sequence.stored:
            raise WrongOrder(f"the forward of {part} of {_name(key)} is not the next one")
        sequence.stored = part.stop
        if part.stop < part.length:
            sequence.values[part.stop] = value
        sequence.runs_again |= self.runs_again
        if self.keeps_grad:
            return
        if not self.runs_again:
            sequence.values.pop(part.start, None)
        if sequence.is_over and not sequence.runs_again:
            del sequences[key]

    def gradient_after(self) -> torch.Tensor | None:
        """Return the gradient of the stored value; None after the last part. Raises WrongOrder
        when the part is not the next one to go backward."""
        part = self.part
        sequence = self.carry.sequences.get(self._key)
        if sequence is None or sequence.stored < part.length or part.stop != sequence.drained:
            raise WrongOrder(f"the backward of {part} of {_name(self._key)} is not the next one")
        return sequence.gradient

    def leave_gradient(self, gradient: torch.Tensor) -> None:
        """Keep, for the previous part, the gradient of the given value."""
        start = self.part.start
        sequence = self.carry.sequences[self._key]
        sequence.drained = start
        sequence.gradient = gradient
        sequence.values.pop(start, None)
        if start == 0:
            del self.carry.sequences[self._key]


def _name(key: CarryKey) -> str:
    layer, sequence = key
    return f"sequence {sequence} in layer {layer}"
