"""The batches of steps whose loss is computed on the source ranks, and the plans of their
sequences.

When a step can be planned depends on when its sequences are known:

    batches of a dataset      as they are drawn: up to `lookahead` steps ahead
    a trainer's own samples   the step that they are made for, when it runs; those that reuse
                              the same samples up to `lookahead` steps ahead

A trainer of TRL's makes its samples as a *generation batch*, in one go, and splits it into slices.
Every batch of the loss is one slice, and all of them may be gone through several times
(`num_iterations`):

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

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from transformers import Trainer

from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.loaders import BEFORE_END, LoaderState, drawn_batches, lengths_of
from hf_flexseq.hf.losses.heads import Head
from hf_flexseq.hf.losses.trainers import Foreseen, foreseen
from hf_flexseq.hf.model.loss_kinds import rolls_out
from hf_flexseq.hf.model.shared_prefixes import GROUPS
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.users_code import users_methods

# The sequences of steps, as DataCollatorForFlexSeq makes them.
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StepBatches:
    """Batches that a rank draws for one step."""

    batches: list[Any]
    loader_state: LoaderState
    """State of their loader after the last of them."""
    calls: tuple[ModelCall, ...] = ()
    """Planned calls of each batch, if the trainer may change batches later."""


_NOTHING = StepBatches([], BEFORE_END)

# Methods in which a user may change batches between their drawing and their loss.
_CHANGE_BATCHES = ("_prepare_input", "_prepare_inputs", "training_step")

# How the calls of a step have come, from the best to the worst.
_AS_PLANNED = 0
_NOT_PLANNED = 1
_CHANGED = 2  # others than those that were planned


class Drawing:
    """Draws the batches of one step after the other, and has their sequences planned."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine, head: Head) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._head = head
        self._generations: Generations | None = None
        if rolls_out(trainer):
            keeps_groups = engine.args.shared_prefixes == GROUPS
            self._generations = Generations(trainer, keeps_groups=keeps_groups)
        self._may_change = bool(users_methods(trainer, _CHANGE_BATCHES))
        self._num_batches = 0  # of a step
        self._changes_samples = False  # on their way to the loss, as a subclass may
        self.clear()

    def clear(self) -> None:
        """Forget all drawn batches."""
        # of the steps to come
        self._iterator: Iterator[Any] | None = None
        self._rows: Rows = iter(())
        self._drawn: deque[StepBatches] = deque()  # of a dataset
        self._to_come: deque[list[ModelCall]] = deque()  # of samples that are there already
        # of the step whose batches were returned
        self._current = _NOTHING
        self._step: RankMicroBatches | None = None
        self._taken: list[Any] = []  # those of its batches that have come

    # ---- batches

    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError, on all ranks, for a loader that gives them different numbers of
        batches: one would wait for the others in its loss. Collective over the world."""
        lengths = lengths_of(dataloader, self._engine.communicator)
        if len(set(lengths)) > 1:
            raise ValueError(self._uneven(f"{min(lengths)} to {max(lengths)}"))

    def _uneven(self, counts: str) -> str:
        """Return the error message for ranks that draw different numbers of batches."""
        return (
            f"ranks draw {counts} batches, and the loss of {type(self._trainer).__name__} is "
            "computed by all of them together: leave even_batches on, or set "
            "dataloader_drop_last=True"
        )

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, *, first_number: int
    ) -> list[Any]:
        """Return the batches of the next step, at most `num_batches`, from the trainer's iterator.
        Collective over the world. first_number: of the first step of all."""
        self._taken = []
        if self._generations is None:
            self._current = self._next_planned(iterator, num_batches, first_number)
        else:
            self._current = self._draw(iterator, num_batches)
        return self._current.batches

    def _draw(self, iterator: Iterator[Any], num_batches: int) -> StepBatches:
        return StepBatches(*drawn_batches(iterator, num_batches, self._trainer.accelerator))

    def _next_planned(
        self, iterator: Iterator[Any], num_batches: int, first_number: int
    ) -> StepBatches:
        """Return the batches of the next step, and keep the step, which was planned ahead."""
        self._num_batches = num_batches
        if iterator is not self._iterator:
            self._iterator = iterator
            self._drawn.clear()
            self._rows = self._rows_of(iterator)
        self._step = self._next_step(first_number)
        if self._step is None:
            return _NOTHING
        if not self._drawn:
            raise ValueError(self._uneven("different numbers of"))
        return self._drawn.popleft()

    def _rows_of(self, iterator: Iterator[Any]) -> Rows:
        """Yield the sequences of each step, and keep the batches that they come from."""
        while True:
            drawn = self._draw(iterator, self._num_batches)
            if not drawn.batches:
                return
            calls = self._policy_calls(drawn.batches)
            kept = tuple(calls) if self._may_change else ()
            self._drawn.append(replace(drawn, calls=kept))
            yield from self._rows_of_step(calls)

    # ---- the step whose batches were returned

    @property
    def loader_state(self) -> LoaderState:
        """State of the loader after the batches of the step."""
        return self._current.loader_state

    def is_complete(self, batch: Any) -> bool:
        """Take the next batch of the step; tell if it was the last one."""
        self._taken.append(batch)
        return len(self._taken) >= len(self._current.batches)

    def prepared_batches(self) -> list[Any]:
        """Return the batches that were taken as the trainer's loss gets them."""
        taken, self._taken = self._taken, []
        if self._generations is not None:
            return self._generations.prepared(taken)
        return [self._trainer._prepare_inputs(batch) for batch in taken]

    def foreseen(self, batches: Sequence[Any]) -> list[Foreseen]:
        """Return the calls that the loss will make on each of the batches."""
        return [foreseen(self._trainer, batch, self._head) for batch in batches]

    def _rows_of_step(self, calls: Sequence[ModelCall]) -> Rows:
        """Yield the sequences of a step's calls, as one batch of the engine."""
        return self._engine.whole_model.rows_of(calls)

    def _policy_calls(self, batches: Sequence[Any]) -> list[ModelCall]:
        return [own.policy for own in self.foreseen(batches)]

    def planned_step(self, calls: Sequence[ModelCall]) -> RankMicroBatches:
        """Return the step with all ranks' sequences. Collective over the world. calls: with
        gradients."""
        number = self._trainer.state.global_step
        if self._generations is None:
            step, self._step = self._step, None
            if self._may_change and self._arrival(calls, self._current.calls) != _AS_PLANNED:
                step = self._engine.step_of(self._rows_of_step(calls), number=number)
        elif self._generations.span_steps:
            step = self._step_of_samples(calls, number)
        else:
            step = self._engine.step_of(self._rows_of_step(calls), number=number)
        assert step is not None, "a batch has a sequence at least"
        return step

    def _step_of_samples(self, calls: Sequence[ModelCall], number: int) -> RankMicroBatches | None:
        """Return the step, which was planned ahead where its samples were there already; and have
        those planned that will go on with them. Collective over the world."""
        expected = self._to_come.popleft() if self._to_come else []
        arrival = self._arrival(calls, expected)
        if arrival == _CHANGED:
            self._changes_samples = True
        if arrival != _AS_PLANNED:
            self._to_come = deque(self._calls_to_come(len(calls)))
            self._rows = chain.from_iterable(map(self._rows_of_step, [calls, *self._to_come]))
        return self._next_step(number)

    def _next_step(self, first_number: int) -> RankMicroBatches | None:
        """Return the step with the next sequences of `self._rows`. Collective over the world."""
        step = self._engine.next_step(self._rows, 1, first_number=first_number)
        assert step is None or isinstance(step, RankMicroBatches), "the model is whole"
        return step

    def _arrival(self, calls: Sequence[ModelCall], expected: Sequence[ModelCall]) -> int:
        """Return how the calls of a step compare with the expected ones, on the worst rank.
        Collective over the world. The last step of an epoch may have fewer batches."""
        own = _AS_PLANNED
        if len(calls) != len(expected):
            own = _NOT_PLANNED
        elif not all(map(ModelCall.same_as, calls, expected)):
            own = _CHANGED
        return max(self._engine.communicator.cpu_group.gather_values(own))

    def _calls_to_come(self, num_batches: int) -> Iterator[list[ModelCall]]:
        """Yield the calls of each later step of the present samples. num_batches: of a step."""
        assert self._generations is not None, "the samples are the trainer's own"
        if not self._changes_samples:
            for batches in self._generations.steps_to_come(num_batches):
                yield self._policy_calls(batches)


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
