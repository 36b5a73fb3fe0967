"""What recurrent layers carry from one chunk of a sequence to the next, on a stage of a pipeline.

    scan           the state after a chunk goes to the next one; the gradient of that state comes
                   back from it
    convolution    so do the last W - 1 rows before the next chunk, its *halo*

Chunks of a sequence go forward in order and backward in the opposite one (Seq1F1B). What a chunk
was given is kept until its backward, because the replay of a checkpointed layer wants it again;
until the end of the step where no gradient is needed, and so no backward comes. As for keys and
values (`pipeline/carry.py`) any other order raises.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch

Key = tuple[Hashable, int]  # (layer and call in it, sequence)


class WrongOrder(RuntimeError):
    """A chunk is not the next one of its sequence, or something was left at the end of a step."""


class _Sequence:
    """What one call of one layer carries of one sequence."""

    __slots__ = ("drained", "goes_back", "gradient", "runs_again", "stored", "values")

    def __init__(self, length: int, *, goes_back: bool) -> None:
        self.goes_back = goes_back  # whether a backward follows
        self.runs_again = False  # whether a part is in a checkpointed region
        self.values: dict[int, torch.Tensor] = {}  # given to the chunk that begins there
        self.gradient: torch.Tensor | None = None  # of what the next chunk backward gave on
        self.stored = 0  # tokens that have gone forward
        self.drained = length  # first of the tokens that have gone backward

    @property
    def is_over(self) -> bool:
        """Whether no backward is missing, though replays may have been."""
        return not self.goes_back and self.stored == self.drained


class StateCarry:
    """Everything that the recurrent layers of one stage carry."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: dict[Key, _Sequence] = {}

    def given(self, key: Key, start: int) -> torch.Tensor | None:
        """Return the input of the chunk at `start`; None at 0. Raises WrongOrder without one."""
        if start == 0:
            return None
        sequence = self._sequences.get(key)
        if sequence is None or start not in sequence.values:
            raise WrongOrder(f"nothing is carried to token {start} of {_name(key)}")
        return sequence.values[start]

    def store(
        self, key: Key, part: "Part", value: torch.Tensor, *, keeps_grad: bool, runs_again: bool
    ) -> None:
        """Keep what the next chunk goes on from, unless this is a replay.

        keeps_grad: whether a backward will follow. runs_again: whether the part is in a
        checkpointed region. Raises WrongOrder when the part is not the next one to go forward.
        """
        if part.start == 0 and key not in self._sequences:
            self._sequences[key] = _Sequence(part.length, goes_back=keeps_grad)
        sequence = self._sequences.get(key)
        if sequence is None or part.start > sequence.stored:
            raise WrongOrder(f"the forward of {part} of {_name(key)} is not the next one")
        if part.stop <= sequence.stored:
            return  # a replay
        sequence.stored = part.stop
        if part.stop < part.length:
            sequence.values[part.stop] = value
        sequence.runs_again |= runs_again
        if keeps_grad:
            return
        if not runs_again:
            sequence.values.pop(part.start, None)
        if sequence.is_over and not sequence.runs_again:
            del self._sequences[key]

    def gradient_after(self, key: Key, part: "Part") -> torch.Tensor | None:
        """Return the gradient that the next chunk has left. Raises WrongOrder."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.stored < part.length or part.stop != sequence.drained:
            raise WrongOrder(f"the backward of {part} of {_name(key)} is not the next one")
        return sequence.gradient

    def leave_gradient(self, key: Key, part: "Part", gradient: torch.Tensor) -> None:
        """Keep the gradient of what this part was given, for the part before it."""
        sequence = self._sequences[key]
        sequence.drained = part.start
        sequence.gradient = gradient
        sequence.values.pop(part.start, None)
        if part.start == 0:
            del self._sequences[key]

    def bytes(self) -> int:
        """Return the memory of all that is carried."""
        total = 0
        for sequence in self._sequences.values():
            tensors = [*sequence.values.values()]
            if sequence.gradient is not None:
                tensors.append(sequence.gradient)
            total += sum(x.numel() * x.element_size() for x in tensors)
        return total

    def check_empty(self) -> None:
        """Raise WrongOrder unless all begun sequences have been drained; forget all of them."""
        left = [_name(key) for key, one in self._sequences.items() if not one.is_over]
        self._sequences.clear()
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
    """The layer, and which of its calls."""
    part: Part
    keeps_grad: bool
    """Whether a backward will follow."""
    runs_again: bool = False
    """Whether the call is in a checkpointed region."""

    @property
    def _key(self) -> Key:
        return (self.layer, self.part.sequence)

    def given(self) -> torch.Tensor | None:
        """Return what the part goes on from; None at the start of its sequence."""
        return self.carry.given(self._key, self.part.start)

    def store(self, value: torch.Tensor) -> None:
        """Keep what the next part goes on from."""
        self.carry.store(
            self._key,
            self.part,
            value,
            keeps_grad=self.keeps_grad,
            runs_again=self.runs_again,
        )

    def gradient_after(self) -> torch.Tensor | None:
        """Return the gradient of what was stored; None after the last part."""
        return self.carry.gradient_after(self._key, self.part)

    def leave_gradient(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of what was given."""
        self.carry.leave_gradient(self._key, self.part, gradient)


def _name(key: Key) -> str:
    layer, sequence = key
    return f"sequence {sequence} in layer {layer}"
