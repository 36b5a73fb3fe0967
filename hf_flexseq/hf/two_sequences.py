"""Compute the loss of two short sequences apart, in one row, and as rows of a padded batch; and of
their tokens, each of which sees itself alone, in two orders.

`sum_trial.py` compares them. All of it runs on one rank alone, without gradients.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.facts import base_model, compute_dtype
from hf_flexseq.hf.watch import Watch
from hf_flexseq.hf.whole_model import WholeModel
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.known_columns import shifted
from hf_flexseq.steps.source_row import Columns, SourceRow
from hf_flexseq.steps.virtual_tokens import real_tokens, with_virtual_tokens

logger = logging.getLogger(__name__)

TOKENS = (5, 4)
"""Tokens of the two sequences."""
ITEMS = 8
"""Divisor of the losses."""
_MOVED = [4 * index % sum(TOKENS) for index in range(sum(TOKENS))]  # another order of all tokens

# How far L(A and B) may be from L(A) + L(B), as a part of it: rounding of the arithmetic.
# Losses are often in float32 under a model in float64.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_16_BITS = 3e-2

# model, inputs, num_items_in_batch -> the loss, a scalar
ComputeLoss = Callable[..., Any]
# model, inputs of a micro-batch -> figures of its tokens, each [tokens, ...]
Figures = Callable[[nn.Module, Inputs], Columns]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The losses of two sequences."""

    first: float
    second: float
    together: float
    """Loss of both in one row."""
    padded: float
    """Loss of both as the rows of a padded batch."""
    unlabelled: float
    """Loss of both in one row, without any label."""
    by_itself: float
    """Loss of all tokens in one row, each a sequence by itself at its own position."""
    moved: float
    """The same of another order of tokens."""
    tolerance: float

    @property
    def add_up(self) -> bool:
        """True if the loss of both is the sum of their losses in either form, or not finite, and
        no order of tokens matters outside of attention."""
        sums = all(map(self._is_sum, (self.together, self.padded)))
        return self.unlabelled == 0 and sums and self._is_alike(self.by_itself, self.moved)

    def _is_sum(self, loss: float) -> bool:
        return self._is_alike(loss, self.first, self.second)

    def _is_alike(self, loss: float, *parts: float) -> bool:
        size = abs(loss) + sum(map(abs, parts))
        return not math.isfinite(size) or abs(loss - sum(parts)) <= self.tolerance * size

    def __str__(self) -> str:
        if self.unlabelled != 0:
            return f"a row without labels has the loss {self.unlabelled:.6g}, and not 0"
        loss, where = self.together, "in one row"
        if self._is_sum(loss):
            loss, where = self.padded, "in a padded batch, as the plain Trainer has them"
        if self._is_sum(loss):
            return (
                f"tokens that see themselves alone have the loss {self.by_itself:.6g}, and "
                f"{self.moved:.6g} in another order"
            )
        return (
            f"two sequences have the losses {self.first:.6g} and {self.second:.6g} apart, but "
            f"{loss:.6g} {where}"
        )


class LossesOfTwo:
    """Computes the losses of two short sequences, apart and together, on this rank alone."""

    def __init__(
        self,
        trainer: Trainer,
        whole_model: WholeModel,
        watch: Watch | None,
        row: SourceRow,
        model: nn.Module,
    ) -> None:
        self._trainer: Any = trainer
        self._whole_model = whole_model
        self._watch = watch
        self._model = model
        self._columns = _short_columns(real_tokens(row))
        self._virtual_tokens = row.virtual_tokens
        dtype = compute_dtype(base_model(trainer.model), trainer.accelerator)
        self._tolerance = _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)

    def of(self, compute_loss: ComputeLoss) -> Found | None:
        """Return the losses by a function like `Trainer.compute_loss`; None if they vary."""

        def prepared(model: nn.Module, inputs: Inputs, **given: Any) -> Any:
            return compute_loss(model, self._trainer._prepare_inputs(inputs), **given)

        return self._in_either_mode(
            partial(self._loss, prepared),
            padded=partial(self._padded_loss, prepared),
            unlabelled=partial(self._loss, prepared, is_labelled=False),
        )

    def of_figures(self, figures: Figures) -> Found | None:
        """Return the sums of squares of what a head finds for tokens."""

        def sizes(model: nn.Module, inputs: Inputs, num_items_in_batch: Any) -> torch.Tensor:
            squares = [value.double().square().sum() for value in figures(model, inputs).values()]
            return torch.stack(squares).sum()

        return self._in_either_mode(partial(self._loss, sizes))

    def _in_either_mode(
        self,
        loss: Callable[..., float],
        padded: Callable[[], float] | None = None,
        unlabelled: Callable[..., float] | None = None,
    ) -> Found | None:
        """Return the losses with the model in training mode, without dropout; where those of one
        row differ from call to call, in evaluation mode. Where they differ even then, nothing can
        be said, and a warning says so.

        loss: of sequences of so many tokens, from a token on. padded: of both in a padded batch.
        unlabelled: as `loss`, without labels.
        """
        first, second = TOKENS
        stable = []
        for training in (True, False):  # all ranks compute in both, whatever each has found
            with _without_dropout(self._model, training=training):
                once, again = loss(0, TOKENS), loss(0, TOKENS)
                found = Found(
                    first=loss(0, (first,)),
                    second=loss(first, (second,)),
                    together=once,
                    padded=math.nan if padded is None else padded(),
                    unlabelled=0.0 if unlabelled is None else unlabelled(0, TOKENS),
                    by_itself=loss(0, (1,) * sum(TOKENS)),
                    moved=loss(0, (1,) * sum(TOKENS), is_moved=True),
                    tolerance=self._tolerance,
                )
            differs = abs(once - again) > self._tolerance * (abs(once) + abs(again))
            if not differs:
                stable.append(found)
        if stable:
            return stable[0]
        logger.warning(
            "the loss of %s differs from call to call on the same tokens, so hf_flexseq cannot "
            "try if it is a sum over tokens: it has to be one",
            type(self._trainer).__name__,
        )
        return None

    def _loss(
        self,
        compute_loss: ComputeLoss,
        start: int,
        lengths: tuple[int, ...],
        *,
        is_labelled: bool = True,
        is_moved: bool = False,
    ) -> float:
        """Return the loss of sequences that begin at token `start` of the columns. is_moved: True
        for all tokens in another order."""
        tokens = _MOVED if is_moved else slice(start, start + sum(lengths))
        own = {name: value[tokens] for name, value in self._columns.items()}
        if not is_labelled:
            own["labels"] = torch.full_like(own["labels"], IGNORE_INDEX)
        row = SourceRow(columns=own, lengths=lengths)
        if self._virtual_tokens:
            row = self._with_virtual_tokens(row, is_labelled=is_labelled)
        inputs = self._whole_model.inputs_alone(row)
        with nullcontext() if self._watch is None else self._watch.calls(inputs, notes=False):
            return self._computed(compute_loss, inputs)

    def _with_virtual_tokens(self, row: SourceRow, *, is_labelled: bool) -> SourceRow:
        """Return a row with the virtual tokens that the model puts in front of its sequences. The
        last of them predicts a sequence's first token, as in a padded batch."""
        firsts = [own[0] for own in row.columns["input_ids"].split(row.lengths)]
        labels = [int(first) if is_labelled else IGNORE_INDEX for first in firsts]
        return with_virtual_tokens(replace(row, first_labels=tuple(labels)), self._virtual_tokens)

    def _padded_loss(self, compute_loss: ComputeLoss) -> float:
        """Return the loss of both sequences in a padded batch, [2, tokens]; NaN where the user's
        code or the model cannot compute it, which is not needed for planned steps."""
        if self._whole_model.router is not None:
            return math.nan  # the model would add a router loss of the batch
        batch: Inputs = {}
        for name, value in self._columns.items():
            if name in _MADE_HERE:
                continue
            filler = IGNORE_INDEX if name == "labels" else 0
            parts = self._columns["input_ids"] if name == "labels" else value
            row = pad_sequence(parts.split(TOKENS), batch_first=True, padding_value=filler)
            batch[name] = row.to(self._trainer.accelerator.device)
        ones = [torch.ones(length, dtype=torch.int64) for length in TOKENS]
        batch["attention_mask"] = pad_sequence(ones, batch_first=True).to(batch["labels"].device)
        try:
            return self._computed(compute_loss, batch)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            logger.info("the loss of a padded batch is not compared: %s", error)
            return math.nan

    def _computed(self, compute_loss: ComputeLoss, inputs: Inputs) -> float:
        """Return the loss that a function gives of inputs, without gradients."""
        trainer = self._trainer
        items = torch.full((), ITEMS, device=trainer.accelerator.device)
        router = self._whole_model.router
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            around.enter_context(trainer.compute_loss_context_manager())
            if router is not None:
                around.enter_context(router.noting())
            return float(compute_loss(self._model, inputs, num_items_in_batch=items))


# Columns that a padded batch of the plain Trainer does not have.
_MADE_HERE = ("position_ids", "shift_labels")


def _short_columns(drawn: Columns) -> Columns:
    """Return columns of the two sequences, [tokens], from a drawn row's first tokens, with targets
    for every token but the last of a sequence."""
    indices = torch.arange(sum(TOKENS))
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
