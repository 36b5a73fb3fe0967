"""Try, before the first step, whether a user's code leaves the loss a sum over tokens.

Which sequences share a micro-batch is the plan's choice. In one pass the result depends on it,
unless the loss of two sequences together is the sum of their losses:

    L(A and B in one row) = L(A) + L(B),    each divided by the same num_items_in_batch

and the loss of a row without labels is 0. A mean over the micro-batch, a penalty on weights, a
square, a module or a hook that mixes tokens of a row: each of them breaks this. So where the user
has put code of their own in the way of the loss (`users_code.py`), these losses are computed once,
without gradients, on a few tokens of the first step and on each rank alone.

Rejected: reading the source of the user's code, which may do anything; comparing whole steps under
two plans, which would take as long as a step.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.executors import base_model
from hf_flexseq.hf.model.facts import compute_dtype
from hf_flexseq.hf.overrides import AT_HOME, IN_PARTS
from hf_flexseq.hf.users_code import (
    is_known,
    library_method,
    users_forward_hooks,
    users_methods,
    users_modules,
)
from hf_flexseq.hf.watch import Watch
from hf_flexseq.steps.collator import shifted
from hf_flexseq.steps.exchange import Columns, SourceRow
from hf_flexseq.values import listed

logger = logging.getLogger(__name__)

TOKENS = (5, 4)
"""Tokens of the two sequences."""
ITEMS = 8
"""What the losses are divided by."""

# How far L(A and B) may be from L(A) + L(B), as a part of it: rounding of the arithmetic.
# Losses are often in float32 under a model in float64.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_16_BITS = 3e-2

ComputeLoss = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class UsersCode:
    """The code of the user's that the loss of a micro-batch goes through, in words."""

    methods: tuple[str, ...]
    """Methods of the trainer."""
    of_model: tuple[str, ...]
    """Modules of the model, hooks on them, and its loss function."""

    @classmethod
    def of(cls, trainer: Any) -> "UsersCode":
        """Find the user's code on a trainer and on its model."""
        model = trainer.model
        of_model = [*users_modules(model), *users_forward_hooks(model)]
        own_loss = vars(base_model(model)).get("_loss_function")
        if own_loss is not None and not is_known(own_loss):
            of_model.append(f"the model's loss_function {getattr(own_loss, '__name__', own_loss)}")
        return cls(
            methods=tuple(users_methods(trainer, IN_PARTS)),
            of_model=tuple(of_model),
        )


_NO_CODE = UsersCode((), ())


class SumTrial:
    """Tries the user's code of one trainer, each time that it has changed."""

    def __init__(self, trainer: Any, engine: FlexSeqEngine, watch: Watch) -> None:
        self._trainer = trainer
        self._engine = engine
        self._watch = watch
        self._code = _NO_CODE
        self._passed = _NO_CODE
        self._is_due = False  # on all ranks alike

    def look(self) -> None:
        """Find out which code of the user's there is now. All ranks do so together."""
        self._code = UsersCode.of(self._trainer)
        self._is_due = True

    def run(self, row: SourceRow, model: nn.Module) -> None:
        """Try the code that `look` has found, unless it has passed before. Collective over the
        world.

        row: what this rank has drawn for a step. model: as accelerate has wrapped it.
        Raises NotImplementedError, on all ranks, where the loss depends on the plan.
        """
        if not self._is_due:
            return
        host = self._engine.communicator.host
        is_new = self._code not in (self._passed, _NO_CODE)
        of_ranks = host.gather_ints([int(is_new), len(row.lengths)])
        is_wanted = any(of_rank[0] for of_rank in of_ranks)
        if is_wanted and not all(of_rank[1] for of_rank in of_ranks):
            return  # a rank has drawn nothing: the next step will do
        self._is_due = False
        if not is_wanted:
            return
        with Attempt() as trying, _unchanged(self._trainer):
            self._try(row, model)
        trying.raise_together(host.gather_values, "trying if the loss is a sum over tokens")
        self._passed = self._code

    def _try(self, row: SourceRow, model: nn.Module) -> None:
        """Raise NotImplementedError where the user's code makes the loss depend on the plan."""
        losses = _Losses(self._trainer, self._engine, self._watch, row, model)
        if self._code.of_model:
            found = losses.of(library_method(self._trainer, "compute_loss"))
            if not found.add_up:
                raise NotImplementedError(
                    f"{listed(self._code.of_model)}: {found}; tokens of one sequence change the "
                    "loss of another one in the same row: keep sequences apart by position_ids, "
                    "read shift_labels, or remove it"
                )
        if self._code.methods:
            found = losses.of(self._trainer.compute_loss)
            if not found.add_up:
                raise NotImplementedError(
                    f"{listed(self._code.methods)}: {found}; the loss is not a sum over tokens "
                    "divided by num_items_in_batch: pass num_items_in_batch on to the model or to "
                    f"super().compute_loss and add no other term, or set {AT_HOME} in the class"
                )


@dataclass(frozen=True, slots=True)
class _Found:
    """The losses of two sequences."""

    first: float
    second: float
    together: float
    unlabelled: float
    """The loss of both without any label."""
    tolerance: float

    @property
    def add_up(self) -> bool:
        """True if the loss of both is the sum of their losses, or not finite, which is reported
        when the step has run."""
        if self.unlabelled != 0:
            return False
        total = self.first + self.second
        size = abs(self.first) + abs(self.second) + abs(self.together)
        return not math.isfinite(size) or abs(self.together - total) <= self.tolerance * size

    def __str__(self) -> str:
        if self.unlabelled != 0:
            return f"a row without labels has the loss {self.unlabelled:.6g}, and not 0"
        return (
            f"two sequences have the losses {self.first:.6g} and {self.second:.6g} apart, but "
            f"{self.together:.6g} in one row"
        )


class _Losses:
    """Computes the losses of two short sequences, apart and in one row, on this rank alone."""

    def __init__(
        self,
        trainer: Any,
        engine: FlexSeqEngine,
        watch: Watch,
        row: SourceRow,
        model: nn.Module,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._watch = watch
        self._model = model
        self._columns = _short_columns(row.columns)
        dtype = compute_dtype(base_model(trainer.model), trainer.accelerator)
        self._tolerance = _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)

    def of(self, compute_loss: ComputeLoss) -> _Found:
        """Return the three losses that a function like `Trainer.compute_loss` gives.

        Dropout is off. Where the losses of one row still differ from call to call, the model is in
        evaluation mode; where they differ even then, nothing can be said, and a warning says so.
        """
        of_modes = [self._in_mode(compute_loss, training=mode) for mode in (True, False)]
        for found in of_modes:  # all ranks have computed both, whatever each has found
            if found is not None:
                return found
        logger.warning(
            "the loss of %s differs from call to call on the same tokens, so hf_flexseq cannot "
            "try if it is a sum over tokens: it has to be one",
            type(self._trainer).__name__,
        )
        return _Found(0.0, 0.0, 0.0, 0.0, self._tolerance)

    def _in_mode(self, compute_loss: ComputeLoss, *, training: bool) -> _Found | None:
        """Return the three losses with the model in training or in evaluation mode; None where
        the same tokens have other losses in the next call."""
        first, second = TOKENS
        with _without_dropout(self._model, training=training):
            once = self._loss(compute_loss, 0, TOKENS)
            again = self._loss(compute_loss, 0, TOKENS)
            found = _Found(
                self._loss(compute_loss, 0, (first,)),
                self._loss(compute_loss, first, (second,)),
                once,
                self._loss(compute_loss, 0, TOKENS, is_labelled=False),
                self._tolerance,
            )
        is_stable = abs(once - again) <= self._tolerance * (abs(once) + abs(again))
        return found if is_stable or not math.isfinite(once) else None

    def _loss(
        self,
        compute_loss: ComputeLoss,
        start: int,
        lengths: tuple[int, ...],
        *,
        is_labelled: bool = True,
    ) -> float:
        """Return the loss of sequences that begin at token `start` of the columns."""
        stop = start + sum(lengths)
        own = {name: value[start:stop] for name, value in self._columns.items()}
        if not is_labelled:
            own["labels"] = torch.full_like(own["labels"], IGNORE_INDEX)
        inputs = self._engine.whole_model.inputs_alone(SourceRow(columns=own, lengths=lengths))
        trainer = self._trainer
        items = torch.full((), ITEMS, device=trainer.args.device)
        watched = self._watch.calls(inputs)
        with torch.no_grad(), watched, trainer.compute_loss_context_manager():
            loss = compute_loss(
                self._model, trainer._prepare_inputs(inputs), num_items_in_batch=items
            )
        return float(loss)


def _short_columns(drawn: Columns) -> Columns:
    """Return columns of the two sequences, [tokens], made of the first tokens of a drawn row.

    Every token but the last of a sequence has a target.
    """
    total = sum(TOKENS)
    indices = torch.arange(total)
    columns = {name: value[indices % len(value)] for name, value in drawn.items()}
    ids = columns["input_ids"].split(TOKENS)
    columns["labels"] = torch.cat([shifted(own) for own in ids])
    columns["position_ids"] = torch.cat([torch.arange(length) for length in TOKENS])
    return columns


@contextmanager
def _without_dropout(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode inside the block, with its dropout off."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    for module in modes:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Take back, after the block, what it has counted: numbers on the trainer, TRL's lists of
    metrics, and random numbers."""
    numbers = {}
    for name, value in vars(trainer).items():
        if isinstance(value, int | float):
            numbers[name] = value
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))
    try:
        with torch.random.fork_rng():
            yield
    finally:
        vars(trainer).update(numbers)
        if metrics is not None:
            trainer._metrics = metrics
