"""What a trainer of TRL's that makes its own samples does with them.

A *generation batch* is made in one go and split into slices. Every batch of the loss is one slice,
and all of them may be gone through several times (`num_iterations`):

    per rank, 4 slices, iterated twice, 2 batches per step

    batch            0  1 | 2  3 | 4  5 | 6  7 | 8 ...
    slice            0  1 | 2  3 | 0  1 | 2  3 | 0 of the next generation batch
    optimizer step     0  |   1  |   2  |   3  |   4

So when batch 0 has been prepared, those of the steps 1 to 3 are known, too.
"""

from collections.abc import Sequence
from typing import Any

from transformers import Trainer


class Generations:
    """The generation batches of one trainer, with its current settings."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer

    @property
    def _per_step(self) -> int:
        """Batches of an optimizer step."""
        per_step: int = self._trainer.args.gradient_accumulation_steps
        return per_step

    @property
    def _slices(self) -> int:
        """Slices of a generation batch. DistillationTrainer generates once in a step."""
        slices: int = getattr(self._trainer.args, "steps_per_generation", self._per_step)
        return slices

    @property
    def _batches_of_one(self) -> int:
        """Batches of the loss that one generation batch serves."""
        iterations: int = getattr(self._trainer, "num_iterations", 1)
        return self._slices * iterations

    @property
    def span_steps(self) -> bool:
        """True if a generation batch can serve several optimizer steps."""
        return self._batches_of_one > self._per_step

    def prepared(self, batches: Sequence[Any]) -> list[Any]:
        """Return the slices that stand for the batches of one step; generate where one is due."""
        trainer = self._trainer
        first = trainer._step
        prepared = []
        for index, batch in enumerate(batches):
            trainer._step = first + index  # it counts batches, to know which slice is next
            prepared.append(trainer._prepare_inputs(batch))
        trainer._step = first
        return prepared

    def steps_to_come(self, num_batches: int) -> list[list[Any]]:
        """Return the batches of each later step of the present generation batch alone.
        num_batches: of the step whose batches have been prepared and not been trained on."""
        slices = self._trainer._buffered_inputs or []
        if len(slices) != self._slices:  # a subclass keeps its samples elsewhere
            return []
        first = self._trainer._step + num_batches
        end = -(-first // self._batches_of_one) * self._batches_of_one
        steps = []
        while first + self._per_step <= end:
            numbers = range(first, first + self._per_step)
            steps.append([slices[number % self._slices] for number in numbers])
            first += self._per_step
        return steps
