"""A step of a trainer that computes its loss at home.

`PlannedLoss.train` runs a step:

1. batches         of the whole step, prepared as the trainer prepares them (GRPO generates here)
2. one plan        of all their sequences, over all ranks
3. the reference   and whatever else is asked without gradients, forward only
4. first pass      of the trained model, forward only but for its last micro-batch
5. the loss        the trainer's own `training_step`, batch by batch; where it calls a model, it
                   gets the results of 3 and 4, and its backward ends at them
6. second pass     with the gradients of 5 as weights

Where these gradients are known beforehand (`divergences.py`), one pass does for 4 and 6, and 5
comes last.

In an evaluation, and where a loss asks for something that was not foreseen, a call is planned and
run when it comes (`answers.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.executors import base_model
from hf_flexseq.hf.losses import distills, reads_figures, rolls_out
from hf_flexseq.hf.objectives.answers import POLICY, REFERENCE, Answers
from hf_flexseq.hf.objectives.divergences import Divergences
from hf_flexseq.hf.objectives.drawing import Drawing
from hf_flexseq.hf.objectives.heads import Head, head_of
from hf_flexseq.hf.objectives.reference import attached_reference, reference_of
from hf_flexseq.hf.objectives.trainers import Foreseen
from hf_flexseq.hf.sum_trial import SumTrial
from hf_flexseq.hf.watch import Watch
from hf_flexseq.steps.calls import joined
from hf_flexseq.steps.exchange import Columns
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.logged_loss import filtered
from hf_flexseq.steps.passes import PassStep
from hf_flexseq.steps.training_mode import in_training_mode
from hf_flexseq.steps.users_code import users_method

# Runs the trainer's own training_step on a model and a batch.
StockStep = Callable[[nn.Module, Any], torch.Tensor]


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
        self._trial = SumTrial(trainer, engine)
        where = users_method(trainer, "training_step")
        self._watch = None if where is None else Watch(trainer, [where])

    # ---- the model

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surround training or an evaluation, inside the engine's own `attached`; nothing happens
        in an evaluation while it trains."""
        if self._is_attached:
            yield
            return
        self._is_attached = True
        policy = base_model(self._trainer.model)
        self.answers.begin()
        hooks = self._head.attach()
        self._trial.look()
        try:
            with ExitStack() as attached:
                reference = getattr(self._trainer, "ref_model", None)
                attached.enter_context(attached_reference(reference, policy))
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
        """Surround the preparation of a batch: a trainer that makes its samples generates with
        the model's own attention."""
        if not rolls_out(self._trainer):
            yield
            return
        with self.answers.pausing(True), self._engine.whole_model.own_attention():
            yield

    # ---- a step

    def train(self, model: nn.Module, stock_step: StockStep, *, is_last: bool) -> torch.Tensor:
        """Run the step whose batches have come, and return the sum of this rank's losses as the
        Trainer would log it, a detached scalar. Collective over the world.

        model: as accelerate has wrapped it. is_last: whether no step comes after it.
        """
        began = time.perf_counter()
        with in_training_mode(model), self._timed_since(began):
            # 1., 2. batches, and one plan for all of them
            batches = self.drawing.prepared_batches()
            calls = self.drawing.foreseen(batches)
            step = self.drawing.planned_step([own.policy for own in calls])
            # 3. whatever is asked without gradients, before the first pass keeps a graph
            with self._engine.whole_model.planned_attention():
                if not isinstance(self._head, Divergences):  # whose figures are of two models
                    self._trial.run(step.row, model, self._figures)
                self._foresee(step, model, calls)
                # 4. to 6.
                objective = _OfStep(self, model, batches, calls, stock_step)
                self._engine.train_passes(
                    step, objective, model, weights=objective.weights(), is_last=is_last
                )
        self.answers.clear()
        self._engine.finish(step)
        return objective.logged

    def _figures(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Return the figures of each token that the head finds, without sums over tokens."""
        found = self._head.forward(model, inputs)
        return {name: value for name, value in found.items() if name not in self._head.totals}

    @contextmanager
    def _timed_since(self, began: float) -> Iterator[None]:
        """Surround a step: where TRL logs its seconds, which it takes around the loss at home, put
        those of the whole step."""
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

    def _foresee(self, step: PassStep, model: nn.Module, calls: Sequence[Foreseen]) -> None:
        """Compute what the loss will ask for without gradients. Collective over the world."""
        others = [own.others for own in calls if own.others is not None]
        others_step = None
        if others:
            others_step = self._engine.passes_of(
                joined(others), number=step.number, forward_only=True
            )
            self.answers.run(others_step, model, POLICY, others)
        if not calls[0].wants_reference:
            return
        with reference_of(self._trainer, model) as reference:
            self.answers.run(step, reference, REFERENCE, [own.policy for own in calls])
            if others_step is not None:
                self.answers.run(others_step, reference, REFERENCE, others)


class _OfStep:
    """The loss of one step's batches, as `PassStep` asks for it."""

    def __init__(
        self,
        planned: PlannedLoss,
        model: nn.Module,
        batches: Sequence[Any],
        calls: Sequence[Foreseen],
        stock_step: StockStep,
    ) -> None:
        self._drawing = planned.drawing
        self._answers = planned.answers
        self._model = model
        self._batches = batches
        self._calls = [own.policy for own in calls]
        self._stock_step = stock_step
        self._trainer = planned._trainer
        self._head = planned._head
        self._watch = planned._watch
        self.totals = planned._head.totals
        self.logged = torch.zeros((), device=self._trainer.args.device)
        """The sum of the losses as the Trainer would log it, a scalar."""

    def forward(self, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...]."""
        with self._trainer.compute_loss_context_manager():
            return self._head.forward(self._model, inputs)

    def weights(self) -> Columns | None:
        """Return the gradients of the loss, each [tokens, ...] on the CPU, where they are known
        before it is computed; None where they depend on figures."""
        if not isinstance(self._head, Divergences):
            return None
        return self._head.weights(self._batches, self._calls)

    def loss(self, figures: Columns) -> tuple[torch.Tensor, Columns]:
        """Return the sum of the losses of this rank's batches, and its gradients with respect to
        figures, each [tokens, ...] on the CPU.

        A batch without labels, of which models have a loss of NaN and gradients of 0, has no part
        in the sum.
        """
        # 1. the figures of each batch, at which its backward ends
        leaves = self._answers.split(figures, self._calls)
        for call, own in zip(self._calls, leaves, strict=True):
            for name in self._head.differentiable:
                if name in own:
                    own[name] = own[name].detach().requires_grad_()
            self._answers.note(POLICY, call, own)

        # 2. the trainer's own steps
        total = torch.zeros((), device=self._trainer.args.device)
        last = len(self._batches) - 1
        loader_state = self._drawing.loader_state
        with ExitStack() as around:
            around.enter_context(self._answers.answering(self._model))
            around.enter_context(self._backward_at_home())
            if self._watch is not None:
                around.enter_context(self._watch.no_gradients_yet(self._model))
            for index, batch in enumerate(self._batches):
                with self._answers.loss_of(batch, loader_state, is_last=index == last):
                    loss = self._stock_step(self._trainer.model, batch).detach()
                total = total + torch.where(_is_mean_of_nothing(loss, batch), 0.0, loss)
                self.logged = self.logged + self._filtered(loss)

        # 3. gradients, of all batches in a row
        gradients: Columns = {}
        for name in self._head.differentiable:
            if name not in figures:
                continue
            parts = [own[name].grad for own in leaves]
            if name in self.totals:
                found = [part.detach().cpu() for part in parts if part is not None]
                if found:
                    gradients[name] = torch.stack(found).sum(dim=0)
            elif name == self._head.main or any(part is not None for part in parts):
                gradients[name] = _in_a_row(parts, [own[name] for own in leaves])
        return total, gradients

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the Trainer would add to the losses that it logs for one more, a scalar."""
        trainer = self._trainer
        if not trainer.args.logging_nan_inf_filter:
            return loss
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        return filtered(loss, before=trainer._tr_loss + self.logged, steps=steps)

    @contextmanager
    def _backward_at_home(self) -> Iterator[None]:
        """Let the trainer's backward end at the figures: nothing is scaled for fp16 or handed to
        DeepSpeed before the second pass."""
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
    """Return whether a loss is not finite for want of a label in its batch, a boolean on the
    loss's device."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return torch.zeros_like(loss, dtype=torch.bool)
    has_none = (labels == IGNORE_INDEX).all().to(loss.device)
    return has_none & ~torch.isfinite(loss)


def _plain_backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:  # not so where a batch has nothing to learn
        loss.backward()


def _in_a_row(parts: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all batches one behind the other, on the CPU; zeros for None.

    like: the figures that they are of, each [tokens, ...].
    """
    filled = []
    for part, own in zip(parts, like, strict=True):
        filled.append((torch.zeros_like(own) if part is None else part).detach().cpu())
    return torch.cat(filled)
