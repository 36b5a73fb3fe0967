"""A step of a trainer that computes its loss on the source ranks.

`PlannedLoss.batches` runs a step:

1. batches         of the whole step, prepared as the trainer prepares them (GRPO generates here)
2. one plan        of all their sequences, over all ranks
3. the reference   and whatever else is asked without gradients, forward only
4. first pass      of the trained model, forward only but for its last micro-batch
5. the loss        the trainer's own `training_step`, batch by batch; where it calls a model, it
                   gets the results of 3 and 4, and its backward ends at them
6. second pass     with the gradients of 5 as weights

Where these gradients are known beforehand (`divergences.py`), one pass does for 4 and 6, and 5
comes last.

GRPO asks for the reference when it generates, and gets results that round otherwise than on the
plan of the step. Where policy and reference are the same, its KL term would have gradients of this
difference instead of 0, of which AdamW makes whole steps. So 3 computes the reference anew as long
as both give the same bits on one plan.

In an evaluation, and where a loss asks for something that was not foreseen, a call is planned and
run when it comes (`answers.py`).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.losses import distills, reads_figures, rolls_out
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.objectives.answers import POLICY, REFERENCE, Answers
from hf_flexseq.hf.objectives.divergences import Divergences
from hf_flexseq.hf.objectives.drawing import Drawing
from hf_flexseq.hf.objectives.heads import Head, head_of
from hf_flexseq.hf.objectives.reference import attached_reference, reference_of
from hf_flexseq.hf.objectives.trainers import Foreseen
from hf_flexseq.hf.sum_trial import SumTrial
from hf_flexseq.hf.watch import Watch
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.figure_passes import FigurePasses, check_known
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.logged_loss import filtered
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import Columns
from hf_flexseq.steps.training_mode import in_training_mode
from hf_flexseq.steps.users_code import users_method

# of GRPO's batches: log-probabilities by the reference, [samples, tokens of completions]
_OF_REFERENCE = "ref_per_token_logps"


class PlannedLoss:
    """Computes a trainer's loss, and its gradients, on planned results."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._head: Head = head_of(
            base_model(trainer.model),
            reads_figures=reads_figures(trainer),
            has_router_loss=getattr(trainer, "aux_loss_enabled", False),
        )
        if distills(trainer):
            self._head = Divergences(trainer)
        self.drawing = Drawing(trainer, engine, self._head)
        self.answers = Answers(trainer, engine, self._head)
        self._is_attached = False
        self._equals_reference = True  # unless a step has shown otherwise; alike on all ranks
        self._trial = SumTrial(trainer, engine.communicator.cpu_group)
        where = users_method(trainer, "training_step")
        self._watch = None if where is None else Watch(trainer, [where])
        self._loss: _SourceLoss | None = None  # of the step that runs

    # ---- the model

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surround training or an evaluation, inside the engine's `attached`; no-op if nested."""
        if self._is_attached:
            yield
            return
        self._is_attached = self._equals_reference = True
        policy = base_model(self._trainer.model)
        self.answers.begin()
        hooks = self._head.attach()
        self._trial.look(self._engine.whole_model)
        try:
            with ExitStack() as attached:
                reference = getattr(self._trainer, "ref_model", None)
                takes_images = self._engine.whole_model.takes_images
                attached.enter_context(
                    attached_reference(reference, policy, takes_images=takes_images)
                )
                if isinstance(self._head, Divergences):
                    answer = self.answers.answer_of_policy
                    attached.enter_context(self._head.attached(self._engine.whole_model, answer))
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._is_attached = False
            self.drawing.clear()
            self.answers.clear()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Surround the preparation of a batch: generation uses the model's own attention."""
        if not rolls_out(self._trainer):
            yield
            return
        with self.answers.pausing(True), self._engine.whole_model.attention.own():
            yield

    # ---- a step

    def batches(self, model: nn.Module, *, is_last: bool) -> Iterator[tuple[nn.Module, Any]]:
        """Run the step whose batches have come: between the passes yield the trainer's model and
        each prepared batch, whose loss the caller adds. Collective over the world."""
        began = time.perf_counter()
        with in_training_mode(model), self._timed_since(began):
            # 1., 2. batches, and one plan for all of them
            batches = self.drawing.prepared_batches()
            calls = self.drawing.foreseen(batches)
            policy_calls = [own.policy for own in calls]
            step = self.drawing.planned_step(policy_calls)
            # 3. whatever is asked without gradients, before the first pass keeps a graph
            with self._engine.whole_model.attention.planned():
                if not isinstance(self._head, Divergences):  # whose figures are of two models
                    self._trial.run(step.row, model, self._figures)
                self._foresee(step, model, calls)
                reference = self._renew_reference(step, model, batches, policy_calls)
                # 4. to 6.
                self._loss = loss = _SourceLoss(self, model, batches, calls)
                with self._engine.passes(step, model, is_last=is_last) as before_last:
                    passes = FigurePasses(step, loss, before_last)
                    weights = loss.weights()
                    figures = passes.first() if weights is None else passes.only(weights)
                    if reference:
                        same = torch.equal(figures["log_probs"], reference["log_probs"])
                        of_ranks = self._engine.communicator.cpu_group.gather_ints([int(same)])
                        self._equals_reference = all(of_rank[0] for of_rank in of_ranks)
                    yield from loss.batches(figures)
                    gradients = loss.gradients(figures)
                    if weights is None:
                        passes.second(figures, gradients)
                    else:
                        check_known(weights, gradients)
                    step.loss = loss.total
        self.answers.clear()
        self._engine.finish(step)

    def add(self, loss: torch.Tensor) -> None:
        """Add the trainer's loss of the batch that `batches` has yielded last, a scalar."""
        assert self._loss is not None, "batches makes it"
        self._loss.add(loss.detach())

    @property
    def logged(self) -> torch.Tensor:
        """The sum of this rank's losses of the last step as the Trainer would log it, a scalar."""
        assert self._loss is not None, "batches makes it"
        return self._loss.logged

    def _figures(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Return the figures of each token that the head finds, without sums over tokens."""
        found = self._head.forward(model, inputs)
        return {name: value for name, value in found.items() if name not in self._head.totals}

    @contextmanager
    def _timed_since(self, began: float) -> Iterator[None]:
        """Surround a step: TRL's logged seconds become those of the whole step."""
        logged = len(self._logged_seconds())
        yield
        seconds = self._logged_seconds()
        if len(seconds) > logged:
            seconds[-1] = time.perf_counter() - began

    def _logged_seconds(self) -> list[float]:
        """Return the seconds of steps that TRL is to log, which may be changed."""
        of_training = getattr(self._trainer, "_metrics", {}).get("train", {})
        seconds: list[float] = of_training.get("step_time", [])
        return seconds

    def _foresee(
        self, step: RankMicroBatches, model: nn.Module, calls: Sequence[Foreseen]
    ) -> None:
        """Compute what the loss will ask for without gradients. Collective over the world."""
        others = [own.others for own in calls if own.others is not None]
        others_step = None
        if others:
            others_step = self._engine.step_of(
                self._engine.whole_model.rows_of(others), number=step.number, forward_only=True
            )
            self.answers.run(others_step, model, POLICY, others)
        if not calls[0].wants_reference:
            return
        with reference_of(self._trainer, model) as reference:
            self.answers.run(step, reference, REFERENCE, [own.policy for own in calls])
            if others_step is not None:
                self.answers.run(others_step, reference, REFERENCE, others)

    def _renew_reference(
        self,
        step: RankMicroBatches,
        model: nn.Module,
        batches: Sequence[Any],
        calls: list[ModelCall],
    ) -> Columns:
        """Put the reference's log-probabilities on the step's plan into GRPO's batches. Return the
        figures of all drawn tokens, each [tokens] on the CPU; none for other trainers, or where
        policy and reference are known to differ. Collective over the world."""
        if not self._equals_reference or _OF_REFERENCE not in batches[0]:
            return {}
        with reference_of(self._trainer, model) as reference:
            figures = self.answers.figures(step, reference)
        parts = self.answers.split(figures, calls)
        for batch, call, own in zip(batches, calls, parts, strict=True):
            length = batch[_OF_REFERENCE].shape[1]
            batch[_OF_REFERENCE] = self._head.answer(call, own, {}).log_probs[:, -length:]
        return figures


class _SourceLoss:
    """The loss of one step's batches, and its gradients with respect to figures."""

    def __init__(
        self,
        planned: PlannedLoss,
        model: nn.Module,
        batches: Sequence[Any],
        calls: Sequence[Foreseen],
    ) -> None:
        self._drawing = planned.drawing
        self._answers = planned.answers
        self._model = model
        self._batches = batches
        self._calls = [own.policy for own in calls]
        self._trainer = planned._trainer
        self._head = planned._head
        self._watch = planned._watch
        self.totals = planned._head.totals
        self._batch: Any = None  # whose loss is computed
        self._leaves: list[Columns] = []  # figures of each batch, at which its backward ends
        device = self._trainer.args.device
        self.total = torch.zeros((), device=device)
        """The sum of the losses, a scalar. A batch without labels, of which models have a loss of
        NaN and gradients of 0, has no part in it."""
        self.logged = torch.zeros((), device=device)
        """The sum of the losses as the Trainer would log it, a scalar."""

    def forward(self, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...]."""
        with self._trainer.compute_loss_context_manager():
            return self._head.forward(self._model, inputs)

    def weights(self) -> Columns | None:
        """Return the loss's gradients, each [tokens, ...] on the CPU, if known before, or None."""
        if not isinstance(self._head, Divergences):
            return None
        return self._head.weights(self._batches, self._calls)

    def batches(self, figures: Columns) -> Iterator[tuple[nn.Module, Any]]:
        """Yield the trainer's model and each prepared batch, for the trainer's own steps. figures:
        of this rank's drawn tokens, each [tokens, ...], and totals, on the CPU."""
        # 1. the figures of each batch, at which its backward ends
        self._leaves = self._answers.split(figures, self._calls)
        for call, own in zip(self._calls, self._leaves, strict=True):
            for name in self._head.differentiable:
                if name in own:
                    own[name] = own[name].detach().requires_grad_()
            self._answers.note(POLICY, call, own)

        # 2. the trainer's own steps
        last = len(self._batches) - 1
        loader_state = self._drawing.loader_state
        with ExitStack() as around:
            around.enter_context(self._answers.answering(self._model))
            around.enter_context(self._backward_to_figures())
            if self._watch is not None:
                around.enter_context(self._watch.no_gradients_yet(self._model))
            for index, batch in enumerate(self._batches):
                self._batch = batch
                with self._answers.loss_of(batch, loader_state, is_last=index == last):
                    yield self._trainer.model, batch

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of the batch that was yielded last, a detached scalar."""
        has_nothing = _is_mean_of_nothing(loss, self._batch)
        self.total = self.total + torch.where(has_nothing, 0.0, loss)
        self.logged = self.logged + self._filtered(loss)

    def gradients(self, figures: Columns) -> Columns:
        """Return gradients of figures, batches in a row, each [tokens, ...] on the CPU."""
        gradients: Columns = {}
        for name in self._head.differentiable:
            if name not in figures:
                continue
            parts = [own[name].grad for own in self._leaves]
            if name in self.totals:
                found = [part.detach().cpu() for part in parts if part is not None]
                if found:
                    gradients[name] = torch.stack(found).sum(dim=0)
            elif name == self._head.main or any(part is not None for part in parts):
                gradients[name] = _in_a_row(parts, [own[name] for own in self._leaves])
        return gradients

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the Trainer would add to the losses that it logs for one more, a scalar."""
        trainer = self._trainer
        if not trainer.args.logging_nan_inf_filter:
            return loss
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        return filtered(loss, before=trainer._tr_loss + self.logged, steps=steps)

    @contextmanager
    def _backward_to_figures(self) -> Iterator[None]:
        """Let the trainer's backward end at the figures, without fp16 scaling or DeepSpeed."""
        accelerator = self._trainer.accelerator
        accelerator.backward = _plain_backward
        try:
            yield
        finally:
            del accelerator.backward

    def backward(self, weighted: torch.Tensor) -> None:
        """Run backward of a scalar, as the trainer does."""
        options = {"scale_wrt_gas": False} if self._trainer.is_deepspeed_enabled else {}
        self._trainer.accelerator.backward(weighted, **options)


def _is_mean_of_nothing(loss: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return whether a loss is not finite because its batch has no labels, a boolean tensor."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return torch.zeros_like(loss, dtype=torch.bool)
    has_none = (labels == IGNORE_INDEX).all().to(loss.device)
    return has_none & ~torch.isfinite(loss)


def _plain_backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:  # not so where a batch has nothing to learn
        loss.backward()


def _in_a_row(parts: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all batches in a row, on the CPU, zeros for None. like: figures."""
    filled = []
    for part, own in zip(parts, like, strict=True):
        filled.append((torch.zeros_like(own) if part is None else part).detach().cpu())
    return torch.cat(filled)
