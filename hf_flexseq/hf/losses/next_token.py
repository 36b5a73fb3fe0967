"""Next-token loss, as the Trainer and SFTTrainer have it: a sum over tokens.

The Trainer's own `training_step` and `compute_loss` run on each micro-batch of the plan, wherever
its tokens are, and get the target tokens of the whole step: one pass, and no figure of a token
travels. Code of the user's in the loss sees the trainer's own batches instead
(`on_samples.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.loaders import BEFORE_END, as_drawn
from hf_flexseq.hf.engine.out_of_memory import noted
from hf_flexseq.hf.engine.sum_trial import SumTrial, loss_of_model
from hf_flexseq.hf.losses.micro_batch_losses import AddedRouterLoss, TokenMeans
from hf_flexseq.hf.losses.predictions import TokenPredictions, without_metrics
from hf_flexseq.hf.losses.step_loss import (
    PlannedLoss,
    Prediction,
    RunStep,
    StockPrediction,
    divisor,
)
from hf_flexseq.hf.losses.watch import LabelGuard
from hf_flexseq.hf.model.loss_kinds import (
    has_other_compute_loss,
    reads_fused_head,
    set_later,
)
from hf_flexseq.hf.model.shared_prefixes import GIVES_SUMS, USERS_CODE
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.prefetch import Step
from hf_flexseq.steps.row_outputs import outputs_of_rows
from hf_flexseq.steps.source_row import Columns, SourceRow
from hf_flexseq.steps.step_items import StepItem


class NextTokenLoss(PlannedLoss):
    """Computes the loss of each micro-batch where its tokens are."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        super().__init__(trainer, engine)
        self._notes_figures = has_other_compute_loss(trainer)
        # Such code has collectives between forwards and backwards.
        self.lockstep = self._notes_figures
        self._guard = LabelGuard(trainer)
        self._trial = SumTrial(lambda: trainer.model, lambda: engine.whole_model)
        # in older versions of TRL the head gives sums over tokens, and no value of each
        is_fused = reads_fused_head(trainer) and not is_older("trl", FUSED_HEAD_FROM)
        self._options = {"fused_lm_head": True} if is_fused else {}
        self._router = AddedRouterLoss(trainer)
        self._means = TokenMeans(trainer)
        engine.reason_of_loss = self._reason_not_shared

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surround training or an evaluation: micro-batches get their shares of a router loss, and
        SFTTrainer the outputs of its head for all rows."""
        router = self._engine.whole_model.router
        self._trial.look()
        with ExitStack() as around:
            if reads_fused_head(self._trainer):
                around.enter_context(outputs_of_rows(self._trainer.model))
            if router is not None:
                around.enter_context(self._router.adding(router))
            yield

    def _try_model(self, row: SourceRow, model: nn.Module) -> None:
        """Refuse code of the user's in the model that mixes sequences. Collective over the world.
        row: the sequences that this rank has drawn for a step."""
        smooths = self._trainer.args.label_smoothing_factor > 0  # on planned steps alone
        loss = loss_of_model(self._engine.whole_model, **self._options)
        self._trial.run(row, model, loss, pads=not smooths)

    def _reason_not_shared(self) -> str | None:
        """Return why the loss keeps rows from sharing prefixes, or None."""
        self._trial.look()  # callbacks have come between
        if not self._trial.has_code and reads_fused_head(self._trainer):
            return None if self._options else GIVES_SUMS
        return USERS_CODE if self._notes_figures else self._trial.reason_not_shared()

    # ---- training

    def run_step(self, model: nn.Module, batch: Any, items: Any, run: RunStep) -> torch.Tensor:
        """Run every micro-batch of a step, at its last item. Collective over the world."""
        step = self._step_of(batch)
        if step is None:
            return torch.zeros((), device=self._trainer.args.device)
        self._try_model(step.row, model)
        self._means.begin("train")
        with closing(self._engine.micro_batches(step, model, is_last=self._is_last_step)) as parts:
            for micro_batch in parts:
                with self._on_part(micro_batch):
                    step.add(run(model, micro_batch, items))
        value = step.final_loss.detach()
        self._raise_noted()
        if self._notes_figures:
            self._means.add(_targets_in_order(step))
            self._means.end("train")
            self._means.count(step.real_tokens)
        self._router.note("train")
        self._engine.finish(step)
        self._note(value)
        return value

    def _step_of(self, batch: Any) -> Step | None:
        """Return the step of the last item of `next_batches`, None for the others. Raises
        NotImplementedError for a loss that came later."""
        assert isinstance(batch, StepItem), "no code of the user's has come between"
        self._refuse_later_loss()
        return batch.step

    def _refuse_later_loss(self) -> None:
        late = set_later(self._trainer)
        if late is not None:
            raise NotImplementedError(
                f"{late} of this {type(self._trainer).__name__} was set after the trainer was "
                "made, which plans micro-batches for the loss that it had: define it in the class"
            )

    @contextmanager
    def _on_part(self, micro_batch: Inputs) -> Iterator[None]:
        """Surround a `compute_loss` on a micro-batch. All of its parts of samples count, also if
        their samples fill up a loader's last batches, and its labels must stay."""
        if not self._notes_figures and not self._trial.has_code:
            yield
            return
        as_whole = as_drawn(BEFORE_END, self._trainer.accelerator)
        with self._guard.of(micro_batch), as_whole:
            yield

    def _raise_noted(self) -> None:
        """Raise a rank's noted error on all ranks. Collective over the world with users' code."""
        if self._trial.has_code_anywhere:
            self._guard.raise_together(self._engine.communicator.cpu_group)

    # ---- evaluation

    @contextmanager
    def evaluating(self, dataloader: Any, *, predicts: bool) -> Iterator[Any]:
        """Surround an evaluation, whose figures are summed anew."""
        self._refuse_later_loss()
        self._means.begin("eval")
        with super().evaluating(dataloader, predicts=predicts) as loader:
            yield loader

    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock: StockPrediction
    ) -> Prediction:
        """Run the forwards of a step, and return its loss, a scalar, with predictions and labels
        for a padded batch alone. Collective over the world."""
        if self._tokens is not None:
            return self._predict_tokens(self._tokens, model, batch)
        if not isinstance(batch, StepItem):
            return stock(model, batch, loss_only)
        step = batch.step
        assert step is not None, "an evaluation batch without its step"
        # TRL divides by all targets, also those of virtual tokens
        items = step.targets if reads_fused_head(self._trainer) else step.items
        divided_by = divisor(items, self._trainer.args.device)
        self._try_model(step.row, model)
        micro_batches = closing(self._engine.forward_micro_batches(step))
        with noted(self._engine.whole_model.planning, step), micro_batches as of_step:
            for micro_batch in of_step:
                step.add(self._forward(model, micro_batch, divided_by))
        loss = step.final_loss
        self._raise_noted()
        if self._notes_figures:
            self._means.add(_targets_in_order(step))
        self._router.note("eval")
        self._sum.add(loss, items)
        return self._of_all_ranks(loss), None, None

    def _predict_tokens(
        self, tokens: TokenPredictions, model: nn.Module, batch: Any
    ) -> Prediction:
        """Return loss, a scalar, predictions and labels of a padded batch."""

        device = self._trainer.args.device
        losses = []

        def forward(micro_batch: Inputs, step: RankMicroBatches) -> Columns:
            losses.append(self._forward(model, micro_batch, divisor(step.targets, device)))
            return {}

        found, figures, step = tokens.predict(batch, forward)
        if not found.has_labels:
            return None, found.predictions, None
        loss = torch.stack(losses).sum()
        router = self._engine.whole_model.router
        if router is not None:
            loss = loss + router.weighted(figures).to(device)
        self._try_model(without_metrics(step.row), model)
        self._raise_noted()
        self._sum.add(loss, step.targets)
        loss = self._of_all_ranks(loss) if found.loss is None else found.loss
        return loss, found.predictions, found.labels

    def _of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' shares of an evaluation step's loss, a scalar, on each of
        them: at the end of a rank's loader accelerate drops values of padded batches, and a
        subclass may read the loss. Collective over the world."""
        mean: torch.Tensor = self._trainer.accelerator.reduce(loss, reduction="mean")
        return mean

    def _forward(
        self, model: nn.Module, micro_batch: Inputs, divided_by: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of a micro-batch, a scalar without gradients. divided_by: a scalar."""
        trainer = self._trainer
        with (
            torch.no_grad(),
            self._on_part(micro_batch),
            trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = trainer.compute_loss(
                model, trainer._prepare_inputs(micro_batch), num_items_in_batch=divided_by
            )
        return loss

    def evaluated(self, output: Any, name: str) -> Any:
        """Return the output with the mean loss over all targets. Collective over the world."""
        self._means.end("eval")
        return super().evaluated(output, name)


def _targets_in_order(step: Step) -> list[int]:
    """Return all ranks' targets of each micro-batch, in the order of their losses."""
    assert isinstance(step, RankMicroBatches), "a stage of a model has no compute_loss of its own"
    return step.targets_of(step.ran)
