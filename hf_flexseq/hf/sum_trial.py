"""Try, before the first step, whether a user's code leaves the loss a sum over tokens.

Which sequences share a micro-batch is the plan's choice. In one pass the result depends on it,
unless, with each loss divided by the same num_items_in_batch,

    L(A and B in one row) = L(A) + L(B) = L(A and B as the rows of a padded batch)

and the loss of a row without labels is 0. A mean over the micro-batch, a penalty on weights, a
square, a factor that counts rows, and code that mixes tokens of a row all break this. So if the
loss runs code of the user's (`users_code.py`), these losses are computed once, without gradients,
on a few tokens of the first step and on each rank alone. The padded batch has no `seq_ctx`: the
model runs it with its own attention and loss.

Which tokens of a sequence lie side by side is the plan's choice, too, so nothing but attention may
look at them. If each token is a sequence by itself, attention sees no other one, and the order of
tokens must not matter.

The code is looked at when the first step begins: a callback may bring some in on_train_begin.
Afterwards each step compares the modules of the model and their forwards with the first one's.

If the trainer computes its loss on whole samples, only the model is tried: the squares of its
head's figures add up in the same way.

Rejected: reading the source of the user's code, which may do anything; comparing whole steps under
two plans, which would take as long as a step.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from hf_flexseq.base.values import listed
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.hf.model.call_count import forwards_of, replaced_attention
from hf_flexseq.hf.model.checks import unsuitable_hooks
from hf_flexseq.hf.model.equal_models import code_of_model
from hf_flexseq.hf.overrides import IN_PARTS, RANKS_FACTOR, WHOLE_SAMPLES
from hf_flexseq.hf.shared_prefixes import KEEPS_OWN_LOSS, USERS_CODE
from hf_flexseq.hf.trainer_numbers import TrainerNumbers
from hf_flexseq.hf.two_sequences import ComputeLoss, Figures, LossesOfTwo
from hf_flexseq.hf.watch import Watch
from hf_flexseq.hf.whole_model import WholeModel
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.source_row import SourceRow
from hf_flexseq.steps.users_code import library_method, users_forward_hooks, users_methods

logger = logging.getLogger(__name__)


class LoopLoss:
    """The loss of a hand-written loop, as what a trial asks of a trainer: the model's own."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.model = model
        self.accelerator = accelerator

    def compute_loss(self, model: nn.Module, inputs: Inputs, **given: Any) -> Any:
        """Return the model's loss, a scalar."""
        return model(**inputs, use_cache=False, **given).loss

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        """Return nothing to surround the loss with."""
        return nullcontext()

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        return inputs


@dataclass(frozen=True, slots=True)
class UsersCode:
    """The code of the user's that the loss of a micro-batch goes through, in words."""

    methods: tuple[str, ...]
    """Methods of the trainer."""
    of_model: tuple[str, ...]
    """Modules of the model, and hooks on them."""

    @classmethod
    def of(cls, trainer: Trainer | LoopLoss) -> "UsersCode":
        """Find the user's code on a trainer and on its model."""
        model: Any = trainer.model
        return cls(
            methods=tuple(users_methods(trainer, IN_PARTS)),
            of_model=(*code_of_model(model), *users_forward_hooks(model)),
        )


def _forwards(model: nn.Module) -> list[Any]:
    """Return the classes of a model's modules, what these run as forwards, all hooks on modules
    and parameters, and what the files of the classes have besides."""
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


NO_CODE = UsersCode((), ())


class SumTrial:
    """Tries the user's code of one trainer, each time that it has changed."""

    def __init__(
        self, trainer: Trainer | LoopLoss, cpu_group: CpuGroup, watch: Watch | None = None
    ) -> None:
        """cpu_group: of all ranks. watch: of the calls of a loss in one pass."""
        self._trainer: Any = trainer
        self._cpu_group = cpu_group
        self._whole_model: WholeModel | None = None  # when the code was looked at
        self._watch = watch
        self._forwards: list[Any] | None = None  # of all modules, when the code was looked at
        self._code = NO_CODE
        self._passed = NO_CODE
        self._is_due = False  # on all ranks alike
        self.has_code_anywhere = False
        """True if a rank has found code of the user's; alike on all ranks."""

    @property
    def has_code(self) -> bool:
        """True if `look` has found any code of the user's on this rank."""
        return bool(self._code.methods or self._code.of_model)

    def look(self, whole_model: WholeModel) -> None:
        """Find out which code of the user's there is now. All ranks do so together. whole_model:
        the attached one."""
        self._whole_model = whole_model
        self._code = UsersCode.of(self._trainer)
        self._forwards = _forwards(self._trainer.model)
        self._is_due = True

    @property
    def _attached(self) -> WholeModel:
        assert self._whole_model is not None, "look is told the attached model"
        return self._whole_model

    def reason_not_shared(self) -> str | None:
        """Return why the loss keeps rows from sharing prefixes; None if it does not."""
        if self.has_code:
            return USERS_CODE
        return KEEPS_OWN_LOSS if self._attached.keeps_own_loss else None

    def run(self, row: SourceRow, model: nn.Module, figures: Figures | None = None) -> None:
        """Try the code that `look` has found, unless it has passed before. Collective over the
        world.

        row: what this rank has drawn for a step. model: as accelerate has wrapped it.
        figures: what a loss on whole samples reads of a micro-batch; None for a loss in one pass.
        Raises NotImplementedError, on all ranks, where the loss depends on the plan, and for code
        that has come into the model after its first step.
        """
        if self._forwards is None:
            return
        if not self._is_due:
            self._refuse_later_code()
            return
        self.look(self._attached)  # on_step_begin may have brought some
        self._refuse_gradient_hooks()
        cpu_group = self._cpu_group
        is_new = self._code != self._passed
        own = [is_new and bool(self._code.of_model), is_new and bool(self._code.methods)]
        of_ranks = cpu_group.gather_ints([*map(int, own), len(row.lengths), int(self.has_code)])
        self.has_code_anywhere = any(of_rank[3] for of_rank in of_ranks)
        has_model_code = any(of_rank[0] for of_rank in of_ranks)
        has_methods = any(of_rank[1] for of_rank in of_ranks) and figures is None
        if not has_model_code and not has_methods:
            self._is_due = False
            return
        if not all(of_rank[2] for of_rank in of_ranks):
            return  # a rank has drawn nothing: the next step will do
        self._is_due = False
        with ErrorCapture() as trying, _unchanged(self._trainer):
            losses = LossesOfTwo(self._trainer, self._attached, self._watch, row, model)
            if has_model_code:
                self._try_model(losses, figures)
            if has_methods:
                self._try_methods(losses)
        trying.raise_on_all_ranks(
            cpu_group.gather_values, "trying if the loss is a sum over tokens"
        )
        self._passed = self._code

    def _refuse_later_code(self) -> None:
        """Raise NotImplementedError for modules, forwards and hooks of the user's that `look` has
        not seen: other ranks run the step already, so that nothing can be tried."""
        forwards = _forwards(self._trainer.model)
        if forwards == self._forwards:
            return
        self._forwards = forwards
        model = self._trainer.model
        attention = replaced_attention(model)
        if attention is not None:
            raise NotImplementedError(attention)
        self._refuse_gradient_hooks()
        now = (*code_of_model(model), *users_forward_hooks(model))
        new = [what for what in now if what not in self._code.of_model]
        if new:
            raise NotImplementedError(
                f"{listed(new)} came into the model while it trains, so nobody knows whether it "
                "keeps sequences apart: put it in before train(), or in the callback event "
                "on_train_begin"
            )

    def _refuse_gradient_hooks(self) -> None:
        """Raise NotImplementedError for hooks on gradients that have come since the model was
        attached, as `check_model` does for those before."""
        hooks = unsuitable_hooks(self._trainer.model)
        if hooks is not None:
            raise NotImplementedError(hooks)

    def _try_model(self, losses: LossesOfTwo, figures: Figures | None) -> None:
        """Raise NotImplementedError where modules or hooks mix sequences."""
        if figures is not None:
            found = losses.of_figures(figures)
        else:
            found = losses.of(_stock_loss(self._trainer, self._attached))
        if found is not None and not found.add_up:
            raise NotImplementedError(
                f"{listed(self._code.of_model)}: {found}; tokens of one sequence change the "
                "loss of another one in the same row: keep sequences apart by position_ids, "
                "or remove it"
            )

    def _try_methods(self, losses: LossesOfTwo) -> None:
        """Raise NotImplementedError if methods of the trainer make the loss depend on the plan;
        warn if they leave out of the plain loss what makes up for the mean over ranks."""
        found = losses.of(self._trainer.compute_loss)
        if found is None:
            return
        if not found.add_up:
            raise NotImplementedError(
                f"{listed(self._code.methods)}: {found}; the loss is not a sum over tokens "
                "divided by num_items_in_batch: pass num_items_in_batch on to "
                "super().compute_loss, or to the model, whose loss takes the factor "
                f"{RANKS_FACTOR}, and add no other term; or set {WHOLE_SAMPLES} in the class"
            )
        accelerator = self._trainer.accelerator
        ranks = accelerator.num_processes
        plain = losses.of(library_method(self._trainer, "compute_loss"))
        if plain is None or ranks == 1 or not accelerator.is_main_process:
            return
        if abs(ranks * found.together - plain.together) <= found.tolerance * plain.together:
            logger.warning(
                "%s: two sequences have the loss %.6g, and %.6g without it, so loss and gradients "
                "are divided by the %d ranks, as under the plain Trainer. Unless you mean it, "
                "return loss %s, as Trainer.compute_loss does",
                *(listed(self._code.methods), found.together, plain.together, ranks, RANKS_FACTOR),
            )


def _stock_loss(trainer: Trainer, whole_model: WholeModel) -> ComputeLoss:
    """Return `compute_loss` without the user's overrides, plus the share of any router loss."""
    compute_loss = library_method(trainer, "compute_loss")
    router = whole_model.router
    if router is None:
        return compute_loss

    def with_share(*args: Any, **kwargs: Any) -> Any:
        return compute_loss(*args, **kwargs) + router.share()

    return with_share


@contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """Restore numbers on the trainer, TRL's metrics, random numbers and the model's buffers after
    the block."""
    numbers = TrainerNumbers(trainer)
    buffers = [(buffer, buffer.detach().clone()) for buffer in trainer.model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        numbers.restore()
        for buffer, value in buffers:
            buffer.data.copy_(value)
