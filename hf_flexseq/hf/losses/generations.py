"""Samples that a trainer of TRL's makes itself, and the steps in which it uses them.

A *generation batch* is made in one go and split into slices. Every batch of the loss is one slice,
and all of them may be gone through several times (`num_iterations`):

    per rank, 4 slices, iterated twice, 2 batches per step

    batch            0  1 | 2  3 | 4  5 | 6  7 | 8 ...
    slice            0  1 | 2  3 | 0  1 | 2  3 | 0 of the next generation batch
    optimizer step     0  |   1  |   2  |   3  |   4

So when batch 0 has been prepared, the batches of steps 1 to 3 are known, too.

TRL shuffles a generation batch before it slices it. The samples of one prompt are then spread over
several steps, which cannot share the prompt. With `shared_prefixes="groups"` they are put side by
side again: steps have other samples than TRL's, and a generation batch has the same. Advantages
are known by then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer


class Generations:
    """The generation batches of one trainer, with its current settings."""

    def __init__(self, trainer: Trainer, *, keeps_groups: bool = False) -> None:
        """keeps_groups: whether the samples of a prompt are put side by side."""
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._keeps_groups = keeps_groups

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
        """Return the slices that replace the batches of one step; generate where one is due."""
        trainer = self._trainer
        first = trainer._step
        prepared = []
        for index, batch in enumerate(batches):
            trainer._step = first + index  # it counts batches, to know which slice is next
            made = trainer._prepare_inputs(batch)
            if self._keeps_groups and trainer._step % self._batches_of_one == 0:
                trainer._buffered_inputs = grouped(trainer._buffered_inputs)
                made = trainer._buffered_inputs[0]
            prepared.append(made)
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


def grouped(slices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of all slices in slices of the same size, with the samples of a prompt
    side by side, prompts in the order of their first samples. The pixels of a slice are joined, so
    samples with images stay as they are.

    slices: `prompt_ids` and other tensors [samples, ...], lists of samples, or values for all.
    """
    if "num_images" in slices[0]:
        return [dict(own) for own in slices]
    prompts: dict[tuple[int, ...], list[int]] = {}
    size = len(slices[0]["prompt_ids"])
    sample = 0
    for own in slices:
        mask = own.get("prompt_mask")
        for index, ids in enumerate(own["prompt_ids"]):
            kept = ids if mask is None else ids[mask[index].bool()]  # without padding
            prompts.setdefault(tuple(kept.tolist()), []).append(sample)
            sample += 1
    order = [number for of_prompt in prompts.values() for number in of_prompt]
    made: list[dict[str, Any]] = [dict(own) for own in slices]
    for name, value in slices[0].items():
        values = [own[name] for own in slices]
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == size:
            parts = torch.cat(values)[torch.tensor(order, device=value.device)].split(size)
        elif isinstance(value, list) and len(value) == size:
            flat = [one for own in values for one in own]
            parts = [[flat[i] for i in order[at : at + size]] for at in range(0, sample, size)]
        else:
            continue  # one value for all samples
        for own, part in zip(made, parts, strict=True):
            own[name] = part
    return made
