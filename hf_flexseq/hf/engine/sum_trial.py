"""Try, before the first step, whether a user's code in the model keeps sequences apart.

Which sequences share a micro-batch is the plan's choice. The result depends on it, unless the
model's loss is a sum over tokens,

    L(A and B in one row) = L(A) + L(B) = L(A and B as the rows of a padded batch)

each divided by the same num_items_in_batch. A module or a hook that mixes tokens of a row breaks
this, and so does a forward that adds something of its own. So if the model has code of the user's
(`users_code.py`), these losses are computed once, without gradients, on a few tokens of the first
step and on each rank alone. The padded batch has no `seq_ctx`: the model runs it with its own
attention and loss. If the trainer computes its loss on its own batches, the squares of its head's
figures take the place of the loss.

A loss may hide a mixture: behind a norm, hidden states divided by their size in the whole row have
nearly the same loss and other gradients. So the last hidden states of tokens are compared, too. In
16 bits rounding hides changes of less than a thirtieth.

Which tokens of a sequence lie side by side is the plan's choice, too, so nothing but attention may
look at them. If each token is a sequence by itself, attention sees no other one, and the order of
tokens must not matter.

The code is looked at when the first step begins: a callback may bring some in on_train_begin.
Afterwards each step compares the modules of the model and their forwards with the first one's.

Rejected: reading the source of the user's code, which may do anything; comparing whole steps under
two plans, which would take as long as a step.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_flexseq.base.values import listed
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.call_count import forwards_of, replaced_attention
from hf_flexseq.hf.model.checks import unsuitable_hooks
from hf_flexseq.hf.model.facts import base_model, compute_dtype
from hf_flexseq.hf.model.rehearsal import code_of_model
from hf_flexseq.hf.model.shared_prefixes import KEEPS_OWN_LOSS, USERS_CODE
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.known_columns import shifted
from hf_flexseq.steps.source_row import Columns, SourceRow
from hf_flexseq.steps.users_code import users_forward_hooks
from hf_flexseq.steps.virtual_tokens import real_tokens, with_virtual_tokens

logger = logging.getLogger(__name__)


# ---- two short sequences


TOKENS = (5, 4)
"""Tokens of the two sequences."""
ITEMS = 8
"""Divisor of losses."""
_MOVED = [4 * index % sum(TOKENS) for index in range(sum(TOKENS))]  # another order of all tokens

# How far L(A and B) may be from L(A) + L(B), as a part of it: rounding of the arithmetic.
# Losses are often in float32 under a model in float64.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_16_BITS = 3e-2

# How far last hidden states may be off, relative to their size. A pretrained Llama of 30 layers
# has 9e-7 in float32, 6e-4 in float16 and 4e-3 in bfloat16.
_TOLERANCE_OF_HIDDEN = 1e-5
_TOLERANCE_OF_16_BIT_HIDDEN = 3e-2

# the model, as accelerate has wrapped it, and inputs of a micro-batch -> a sum over its tokens
Value = Callable[[nn.Module, Inputs], torch.Tensor]


class Found(NamedTuple):
    """The results of one forward."""

    value: float

    hidden: torch.Tensor | None
    """The model's last hidden states, [tokens, width]; None if it has given none."""


class TwoSequences:
    """Computes values of two short sequences, apart and together, on this rank alone."""

    def __init__(
        self,
        whole_model: WholeModel,
        base: PreTrainedModel,
        row: SourceRow,
        model: nn.Module,
    ) -> None:
        """base: without adapters. row: this rank's sequences, drawn for a step. model: as
        accelerate has wrapped it."""
        self._whole_model = whole_model
        self._name = type(base).__name__
        self._body = base.base_model
        self._model = model
        self._columns = _short_columns(real_tokens(row))
        self._virtual_tokens = row.virtual_tokens
        dtype = compute_dtype(base, whole_model.setup.accelerator)
        self._tolerance = _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)
        # TF32 rounds as 16 bits do
        has_32_bits = torch.get_float32_matmul_precision() == "highest"
        self._tolerance_of_hidden = _TOLERANCE_OF_16_BIT_HIDDEN
        if dtype in _TOLERANCES and has_32_bits:
            self._tolerance_of_hidden = _TOLERANCE_OF_HIDDEN

    def difference(self, value: Value, *, pads: bool) -> str | None:
        """Return in words that the value of both is not the sum of their values, in one row or in
        a padded batch, that a token's hidden states depend on the other sequence, or that an order
        of tokens matters outside of attention; None where nothing is so. pads: True to compute the
        value of a padded batch, too.

        The model is in training mode, without dropout; where values of one row differ from call to
        call, in evaluation mode. Where they differ even then, nothing can be said, and a warning
        says so.
        """
        stable = []
        for training in (True, False):  # all ranks compute in both, whatever each has found
            with _without_dropout(self._model, training=training):
                once, again = self._found(value, 0, TOKENS), self._found(value, 0, TOKENS)
                found = self._difference(value, once, pads=pads)
            size = abs(once.value) + abs(again.value)
            if abs(once.value - again.value) <= self._tolerance * size:
                stable.append(found)
        if stable:
            return stable[0]
        logger.warning(
            "what %s computes differs from call to call on the same tokens, so hf_flexseq cannot "
            "try if it keeps sequences apart: it has to",
            self._name,
        )
        return None

    def _difference(self, value: Value, together: Found, *, pads: bool) -> str | None:
        """Return the difference between results, in words; None without one. together: the results
        of both in one row."""
        first = self._found(value, 0, TOKENS[:1])
        second = self._found(value, TOKENS[0], TOKENS[1:])
        # of all tokens in one row, each a sequence by itself at its own position
        by_itself, moved = (
            self._found(value, 0, (1,) * sum(TOKENS), is_moved=is_moved)
            for is_moved in (False, True)
        )
        forms = {"in one row": together.value}
        if pads:
            where = "in a padded batch, as the plain Trainer has them"
            forms[where] = self._padded_value(value)
        for where, loss in forms.items():
            if not self._is_alike(loss, first.value, second.value):
                return (
                    f"two sequences have the losses {first.value:.6g} and {second.value:.6g} "
                    f"apart, but {loss:.6g} {where}"
                )
        if not self._is_alike(by_itself.value, moved.value):
            return (
                f"tokens that see themselves alone have the loss {by_itself.value:.6g}, and "
                f"{moved.value:.6g} in another order"
            )
        apart = self._hidden_apart(together, first, second)
        if apart > self._tolerance_of_hidden:
            return f"hidden states of two sequences in one row are {apart:.2g} off those apart"
        return None

    def _hidden_apart(self, together: Found, *parts: Found) -> float:
        """Return the distance of hidden states from the parts' hidden states, relative to their
        size; 0 where it is unknown."""
        own = [one.hidden for one in parts if one.hidden is not None]
        if together.hidden is None or len(own) < len(parts):
            return 0.0
        both = torch.cat(own)
        if both.shape != together.hidden.shape:
            return 0.0
        apart = float((together.hidden - both).norm() / together.hidden.norm())
        return apart if math.isfinite(apart) else 0.0

    def _is_alike(self, value: float, *parts: float) -> bool:
        """Tell if a value is the sum of others, or not finite, as an unknown one."""
        size = abs(value) + sum(map(abs, parts))
        return not math.isfinite(size) or abs(value - sum(parts)) <= self._tolerance * size

    def losses_apart(self, own: Value, ours: Value) -> tuple[float, float] | None:
        """Return the losses of both sequences by the model, in one row or in a padded batch, and
        by a substitute in one row, where they are not alike; None where all are, and where the
        substitute differs from call to call."""
        with _without_dropout(self._model, training=False):
            substitute, again = (self._found(ours, 0, TOKENS).value for _ in range(2))
            losses = self._found(own, 0, TOKENS).value, self._padded_value(own)
        if self._is_alike(substitute, again):
            for loss in losses:
                if not self._is_alike(loss, substitute):
                    return loss, substitute
        return None

    def _found(
        self, value: Value, start: int, lengths: tuple[int, ...], *, is_moved: bool = False
    ) -> Found:
        """Return the results of sequences that begin at token `start` of the columns. is_moved:
        True for all tokens in another order."""
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
            return self._computed(value, batch).value
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            logger.info("the loss of a padded batch is not compared: %s", error)
            return math.nan

    def _computed(self, value: Value, inputs: Inputs) -> Found:
        """Return the results of inputs, without gradients."""
        router = self._whole_model.router
        hidden: list[torch.Tensor] = []

        def keep(module: nn.Module, args: Any, outputs: Any) -> None:
            last = outputs[0]  # of a model without a part of its own below its head: maybe a loss
            if isinstance(last, torch.Tensor) and last.dim() == 3:
                hidden[:] = [last.flatten(0, 1).double()]

        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            if router is not None:
                around.enter_context(router.noting())
            around.enter_context(self._body.register_forward_hook(keep))
            found = float(value(self._model, inputs))
        return Found(found, hidden[0] if hidden else None)


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


# ---- the code of one model


def users_code_of(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a model that are of the user's, and the user's hooks, in words."""
    return (*code_of_model(model), *users_forward_hooks(model))


def loss_of_model(whole_model: WholeModel, items: int = ITEMS, **options: Any) -> Value:
    """Return a function that computes the loss of an attached model, with its share of any router
    loss. items: its divisor. options: of the model's forward."""

    def loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
        found: torch.Tensor = model(
            **inputs, use_cache=False, num_items_in_batch=items, **options
        ).loss
        router = whole_model.router
        if router is None or "seq_ctx" not in inputs:
            return found
        return found + router.coefficient * router.share()

    return loss


def _forwards(model: nn.Module) -> list[Any]:
    """Return the classes of a model's modules, the forwards that these run, all hooks on modules
    and parameters, and all other values in transformers' files of the classes."""
    modules = list(model.modules())
    kinds = [type(module) for module in modules]
    found: list[Any] = [*kinds, *forwards_of(modules)]
    hooks: list[Any] = []
    for module in modules:
        hooks += (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        for parameter in module._parameters.values():
            if parameter is not None:
                hooks += (parameter._backward_hooks or {}).values()
                hooks += (parameter._post_accumulate_grad_hooks or {}).values()
    for file in {kind.__module__ for kind in kinds}:
        if file.startswith("transformers.models."):
            found += vars(sys.modules[file]).values()
    return found + hooks


class SumTrial:
    """Tries the user's code of one model, each time that it has changed."""

    def __init__(
        self, model_of: Callable[[], nn.Module], attached: Callable[[], WholeModel]
    ) -> None:
        """model_of: returns the model to be tried, with adapters. attached: returns the model that
        is attached."""
        self._model_of = model_of
        self._attached = attached
        self._forwards: list[Any] = []  # of all modules, when the code was looked at
        self._code: tuple[str, ...] = ()
        self._passed: tuple[str, ...] = ()
        self._is_due = False  # on all ranks alike
        self.has_code_anywhere = False
        """True if a rank has found code of the user's; alike on all ranks."""

    @property
    def has_code(self) -> bool:
        """True if `look` has found any code of the user's on this rank."""
        return bool(self._code)

    def look(self) -> None:
        """Find out which code of the user's there is now. All ranks do so together."""
        self._code = users_code_of(self._model_of())
        self._forwards = _forwards(self._model_of())
        self._is_due = True

    def reason_not_shared(self) -> str | None:
        """Return why the loss keeps rows from sharing prefixes; None if it does not."""
        if self.has_code:
            return USERS_CODE
        return KEEPS_OWN_LOSS if self._attached().chunked_loss is None else None

    def run(
        self,
        row: SourceRow,
        model: nn.Module,
        value: Value,
        *,
        pads: bool = True,
        losses: tuple[Value, Value] | None = None,
    ) -> None:
        """Try the code that `look` has found, unless it has passed before. Collective over the
        world.

        row: this rank's sequences, drawn for a step. model: as accelerate has wrapped it.
        value: `loss_of_model`, or a value that represents a head's figures.
        pads: True for a value that a padded batch has, too.
        losses: the model's own, and the substitute that a loss gets for it; None without.
        Raises NotImplementedError, on all ranks, where the value depends on the plan, where the
        model's own loss is another one, and for code that has come into the model after its first
        step.
        """
        if not self._is_due:
            self._refuse_later_code()
            return
        self.look()  # on_step_begin may have brought some
        self._refuse_gradient_hooks()
        whole_model = self._attached()
        cpu_group = whole_model.setup.communicator.cpu_group
        is_new = self._code != self._passed and self.has_code
        of_ranks = cpu_group.gather_values((is_new, len(row.lengths), self.has_code))
        self.has_code_anywhere = any(of_rank[2] for of_rank in of_ranks)
        if not any(of_rank[0] for of_rank in of_ranks):
            self._is_due = False
            return
        if not all(of_rank[1] for of_rank in of_ranks):
            return  # a rank has drawn nothing: the next step will do
        self._is_due = False
        with ErrorCapture() as trying, _unchanged(self._model_of()):
            two = TwoSequences(whole_model, base_model(self._model_of()), row, model)
            found = two.difference(value, pads=pads)
            if found is not None:
                raise NotImplementedError(
                    f"{listed(self._code)}: {found}; tokens of one sequence change the loss of "
                    "another one in the same row: keep sequences apart by position_ids, or remove "
                    "it"
                )
            if losses is not None:
                self._compare(two, *losses)
        trying.raise_on_all_ranks(
            cpu_group.gather_values, "trying if the loss is a sum over tokens"
        )
        self._passed = self._code

    def _compare(self, two: TwoSequences, own: Value, next_token_loss: Value) -> None:
        """Raise NotImplementedError where the model's own loss is another one."""
        apart = two.losses_apart(own, next_token_loss)
        if apart is not None:
            raise NotImplementedError(
                f"{listed(self._code)}: two sequences have the loss {apart[0]:.6g} by the model, "
                f"and {apart[1]:.6g} by the log-probabilities of their tokens, which this "
                "trainer's loss gets: change labels in the data_collator, and add what else the "
                "model adds to its loss in compute_loss"
            )

    def _refuse_later_code(self) -> None:
        """Raise NotImplementedError for modules, forwards and hooks of the user's that `look` has
        not seen: other ranks run the step already, so that nothing can be tried."""
        forwards = _forwards(self._model_of())
        if forwards == self._forwards:
            return
        self._forwards = forwards
        attention = replaced_attention(self._model_of())
        if attention is not None:
            raise NotImplementedError(attention)
        self._refuse_gradient_hooks()
        new = [what for what in users_code_of(self._model_of()) if what not in self._code]
        if new:
            raise NotImplementedError(
                f"{listed(new)} came into the model while it trains, so nobody knows whether it "
                "keeps sequences apart: put it in before train(), or in the callback event "
                "on_train_begin"
            )

    def _refuse_gradient_hooks(self) -> None:
        """Raise NotImplementedError for hooks on gradients that have come since the model was
        attached, as `check_model` does for those before."""
        hooks = unsuitable_hooks(self._model_of())
        if hooks is not None:
            raise NotImplementedError(hooks)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore random numbers and the model's buffers after the block, and warn of buffers that
    its forwards have changed."""
    buffers = dict(model.named_buffers())
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    changed = []
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for name, buffer in buffers.items():
            if not torch.equal(buffer, before[name]):
                changed.append(name)
                buffer.data.copy_(before[name])
    if changed:
        logger.warning(
            "each forward changes %s of the model: a plan has other forwards than the plain "
            "Trainer has batches, and so other values there",
            listed(changed),
        )
