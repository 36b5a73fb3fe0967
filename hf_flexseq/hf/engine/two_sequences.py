"""Compute a value of two short sequences apart, in one row, and as rows of a padded batch; and of
their tokens, each of which sees itself alone, in two orders.

`sum_trial.py` compares them. All of it runs on one rank alone, without gradients.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.facts import compute_dtype
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.known_columns import shifted
from hf_flexseq.steps.source_row import Columns, SourceRow
from hf_flexseq.steps.virtual_tokens import real_tokens, with_virtual_tokens

logger = logging.getLogger(__name__)

TOKENS = (5, 4)
"""Tokens of the two sequences."""
ITEMS = 8
"""Divisor of losses."""
_MOVED = [4 * index % sum(TOKENS) for index in range(sum(TOKENS))]  # another order of all tokens

# How far L(A and B) may be from L(A) + L(B), as a part of it: rounding of the arithmetic.
# Losses are often in float32 under a model in float64.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_16_BITS = 3e-2

# the model, as accelerate has wrapped it, and inputs of a micro-batch -> a sum over its tokens
Value = Callable[[nn.Module, Inputs], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The values of two sequences."""

    first: float
    second: float
    together: float
    """Value of both in one row."""
    padded: float
    """Value of both as the rows of a padded batch; NaN if unknown."""
    by_itself: float
    """Value of all tokens in one row, each a sequence by itself at its own position."""
    moved: float
    """The same of another order of tokens."""
    tolerance: float

    @property
    def add_up(self) -> bool:
        """True if the value of both is the sum of their values in either form, or not finite, and
        no order of tokens matters outside of attention."""
        sums = all(map(self._is_sum, (self.together, self.padded)))
        return sums and self._is_alike(self.by_itself, self.moved)

    def _is_sum(self, value: float) -> bool:
        return self._is_alike(value, self.first, self.second)

    def _is_alike(self, value: float, *parts: float) -> bool:
        size = abs(value) + sum(map(abs, parts))
        return not math.isfinite(size) or abs(value - sum(parts)) <= self.tolerance * size

    def __str__(self) -> str:
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


class TwoSequences:
    """Computes values of two short sequences, apart and together, on this rank alone."""

    def __init__(
        self,
        whole_model: WholeModel,
        base: PreTrainedModel,
        row: SourceRow,
        model: nn.Module,
    ) -> None:
        """base: without adapters. row: what this rank has drawn for a step. model: as accelerate
        has wrapped it."""
        self._whole_model = whole_model
        self._name = type(base).__name__
        self._model = model
        self._columns = _short_columns(real_tokens(row))
        self._virtual_tokens = row.virtual_tokens
        dtype = compute_dtype(base, whole_model.setup.accelerator)
        self._tolerance = _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)

    def of(self, value: Value, *, pads: bool) -> Found | None:
        """Return the values with the model in training mode, without dropout; where those of one
        row differ from call to call, in evaluation mode. Where they differ even then, nothing can
        be said, and a warning says so. pads: True to compute that of a padded batch, too."""
        first, second = TOKENS
        stable = []
        own = partial(self._value, value)
        for training in (True, False):  # all ranks compute in both, whatever each has found
            with _without_dropout(self._model, training=training):
                once, again = own(0, TOKENS), own(0, TOKENS)
                found = Found(
                    first=own(0, (first,)),
                    second=own(first, (second,)),
                    together=once,
                    padded=self._padded_value(value) if pads else math.nan,
                    by_itself=own(0, (1,) * sum(TOKENS)),
                    moved=own(0, (1,) * sum(TOKENS), is_moved=True),
                    tolerance=self._tolerance,
                )
            differs = abs(once - again) > self._tolerance * (abs(once) + abs(again))
            if not differs:
                stable.append(found)
        if stable:
            return stable[0]
        logger.warning(
            "what %s computes differs from call to call on the same tokens, so hf_flexseq cannot "
            "try if it keeps sequences apart: it has to",
            self._name,
        )
        return None

    def are_alike(self, value: Value, other: Value) -> tuple[bool, float, float]:
        """Return whether two values of both sequences in one row are alike, and both values."""
        with _without_dropout(self._model, training=False):
            found = self._value(value, 0, TOKENS), self._value(other, 0, TOKENS)
        size = sum(map(abs, found))
        return abs(found[0] - found[1]) <= self._tolerance * size, *found

    def _value(
        self, value: Value, start: int, lengths: tuple[int, ...], *, is_moved: bool = False
    ) -> float:
        """Return the value of sequences that begin at token `start` of the columns. is_moved: True
        for all tokens in another order."""
        tokens = _MOVED if is_moved else slice(start, start + sum(lengths))
        own = {name: column[tokens] for name, column in self._columns.items()}
        row = SourceRow(columns=own, lengths=lengths)
        if self._virtual_tokens:
            row = self._with_virtual_tokens(row)
        return self._computed(value, self._whole_model.inputs_alone(row))

    def _with_virtual_tokens(self, row: SourceRow) -> SourceRow:
        """Return a row with the virtual tokens that the model puts in front of its sequences. The
        last of them predicts a sequence's first token, as in a padded batch."""
        labels = tuple(int(own[0]) for own in row.columns["input_ids"].split(row.lengths))
        return with_virtual_tokens(replace(row, first_labels=labels), self._virtual_tokens)

    def _padded_value(self, value: Value) -> float:
        """Return the value of both in a padded batch, [2, tokens]; NaN where the user's code or
        the model cannot compute it, which is not needed for planned steps."""
        if self._whole_model.router is not None:
            return math.nan  # the model would add a router loss of the batch
        device = self._whole_model.setup.accelerator.device
        batch: Inputs = {}
        for name, column in self._columns.items():
            if name in _MADE_HERE:
                continue
            filler = IGNORE_INDEX if name == "labels" else 0
            parts = self._columns["input_ids"] if name == "labels" else column
            row = pad_sequence(parts.split(TOKENS), batch_first=True, padding_value=filler)
            batch[name] = row.to(device)
        ones = [torch.ones(length, dtype=torch.int64) for length in TOKENS]
        batch["attention_mask"] = pad_sequence(ones, batch_first=True).to(device)
        try:
            return self._computed(value, batch)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            logger.info("the loss of a padded batch is not compared: %s", error)
            return math.nan

    def _computed(self, value: Value, inputs: Inputs) -> float:
        """Return a value of inputs, without gradients."""
        router = self._whole_model.router
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            if router is not None:
                around.enter_context(router.noting())
            return float(value(self._model, inputs))


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
