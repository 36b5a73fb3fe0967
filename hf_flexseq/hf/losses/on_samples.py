"""A loss that the trainer computes itself, on its own batches, on the rank that drew them: the
loss of TRL's DPOTrainer, for example, or a `compute_loss` of the user's.

`LossOnSamples.run_step` runs a step:

1. batches         of the whole step, prepared as the trainer prepares them (GRPO generates here)
2. one plan        of all their sequences, over all ranks
3. the reference   and whatever else is asked without gradients, forward only
4. first pass      of the trained model, forward only but for its last micro-batch
5. the loss        the trainer's own `training_step`, batch by batch; where it calls a model, it
                   gets the results of 3 and 4, and its backward ends at them
6. second pass     with the gradients of 5 as weights

Where these gradients are known beforehand (`known_weights.py`), one pass does for 4 and 6, and 5
shows that they were right. Otherwise the gradients of the step are dropped, and 6 follows.

GRPO asks for the reference when it generates, and gets results that round otherwise than on the
plan of the step. Where policy and reference are the same, its KL term would have gradients of this
difference instead of 0, of which AdamW makes whole steps. So 3 computes the reference anew as long
as both give the same bits on one plan.

In an evaluation, and where a loss asks for something that was not foreseen, a call is planned and
run when it comes (`answers.py`).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from transformers import Trainer

from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.sum_trial import ITEMS, SumTrial, loss_of_model
from hf_flexseq.hf.losses.answers import (
    POLICY,
    REFERENCE,
    Answers,
    attached_reference,
    reference_of,
)
from hf_flexseq.hf.losses.batch_losses import BatchLosses
from hf_flexseq.hf.losses.divergences import Divergences
from hf_flexseq.hf.losses.drawing import Drawing
from hf_flexseq.hf.losses.heads import Head, head_of
from hf_flexseq.hf.losses.known_weights import SumOverTokens
from hf_flexseq.hf.losses.predictions import PredictedBatch, TokenPredictions, without_metrics
from hf_flexseq.hf.losses.step_loss import (
    Prediction,
    RunStep,
    StepLoss,
    StockPrediction,
    StockPreparation,
)
from hf_flexseq.hf.losses.trainers import Foreseen
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.loss_kinds import FIGURES, rolls_out
from hf_flexseq.hf.model.shared_prefixes import USERS_CODE
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.figure_passes import FigurePasses, difference_of
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import Columns, SourceRow

logger = logging.getLogger(__name__)

# of GRPO's batches: log-probabilities by the reference, [samples, tokens of completions]
_OF_REFERENCE = "ref_per_token_logps"


class LossOnSamples(StepLoss):
    """Lets the trainer compute its loss on its own batches, from planned figures."""

    lockstep = False  # the loss runs between the passes

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        super().__init__(trainer, engine)
        self._head: Head = head_of(trainer)
        self.has_predictions = self._head.is_own  # TRL's own heads give no logits
        self.drawing = Drawing(trainer, engine, self._head)
        self.answers = Answers(trainer, engine, self._head, self._try_model)
        self._is_attached = False
        self._equals_reference = True  # unless a step has shown otherwise; alike on all ranks
        self._trial = SumTrial(lambda: trainer.model, lambda: engine.whole_model)
        self._trial_of_other = SumTrial(
            lambda: extract_model_from_parallel(self._other), lambda: engine.whole_model
        )
        self._sum = SumOverTokens() if self._head.is_own else None
        engine.reason_of_loss = self._reason_not_shared

    def _reason_not_shared(self) -> str | None:
        """Return why the loss keeps rows from sharing prefixes, or None: a token that rows share
        may have a label in some of them alone, and gets the sum of their gradients."""
        has_code = self._look()  # callbacks have come between
        has_figures = getattr(self._trainer, FIGURES, None) is not None
        return USERS_CODE if has_code or has_figures else None

    @property
    def _other(self) -> nn.Module | None:
        """The reference or the teacher, as accelerate has wrapped it, if there is one."""
        name = "teacher_model" if isinstance(self._head, Divergences) else "ref_model"
        other = getattr(self._trainer, name, None)
        return other if isinstance(other, nn.Module) else None

    def _look(self) -> bool:
        """Find out which code of the user's there is in the models; tell if there is any."""
        trials = [self._trial] if self._other is None else [self._trial, self._trial_of_other]
        for trial in trials:
            trial.look()
        return any(trial.has_code for trial in trials)

    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError for ranks with different numbers of batches. Collective."""
        self.drawing.check_loader(dataloader)

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
        whole_model = self._engine.whole_model
        self._look()
        reference = getattr(self._trainer, "ref_model", None)
        try:
            with (
                self._head.attached(whole_model, self.answers.answer_of_policy),
                attached_reference(reference, policy, takes_images=whole_model.vision is not None),
            ):
                yield
        finally:
            self._is_attached = False
            self.drawing.clear()
            self.answers.clear()

    # ---- training

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return the next step's batches and the Trainer's count of targets. Collective."""
        number = self._trainer.state.global_step
        batches = self.drawing.next_batches(iterator, num_batches, first_number=number)
        return batches, self._trainer._get_num_items_in_batch(batches, device)

    def prepare(self, batch: Any, stock_preparation: StockPreparation) -> Any:
        """Return a prepared batch; samples are made with the model's own attention."""
        if not rolls_out(self._trainer):
            return stock_preparation(batch)
        with self.answers.pausing(True), self._engine.whole_model.attention.own():
            return stock_preparation(batch)

    def run_step(self, model: nn.Module, batch: Any, items: Any, run: RunStep) -> torch.Tensor:
        """Run the step whose batches have come with its last one. Collective over the world."""
        if not self.drawing.is_complete(batch):
            return torch.zeros((), device=self._trainer.args.device)
        began = time.perf_counter()
        self._begin_training(model)
        with self._timed_since(began):
            # 1., 2. batches, and one plan for all of them
            batches = self.drawing.prepared_batches()
            foreseen = self.drawing.foreseen(batches)
            calls = [own.policy for own in foreseen]
            step = self.drawing.planned_step(calls)
            losses = BatchLosses(self._trainer, self._head, self.answers, model, batches, calls)
            with self._engine.whole_model.attention.planned():
                # 3. whatever is asked without gradients, before the first pass keeps a graph
                self._try_model(step.row, model)
                self._foresee(step, model, foreseen)
                reference = self._renew_reference(step, model, batches, calls)
                # 4. to 6.
                with self._engine.passes(step, model, is_last=self._is_last_step) as before_last:
                    passes = FigurePasses(step, losses, before_last)
                    weights = self._known_weights(step, losses, items)
                    if weights is None:
                        figures = passes.first()
                    else:
                        figures = passes.only(weights)
                    if reference:
                        self._compare(reference, figures)
                    self._compute(losses, figures, items, run)
                    gradients = losses.gradients(figures)
                    if weights is None:
                        passes.second(figures, gradients)
                        self._learn(gradients, losses, items)
                    elif self._is_other(weights, gradients, losses):
                        losses.drop_gradients()
                        passes.second(figures, gradients)
                    step.loss = losses.total
        self.answers.clear()
        self._engine.finish(step)
        return losses.logged

    def _known_weights(
        self, step: RankMicroBatches, losses: BatchLosses, items: Any
    ) -> Columns | None:
        """Return the loss's gradients, each [tokens, ...] on the CPU, if they are known before, or
        None, on all ranks alike. items: the Trainer's count of targets."""
        if isinstance(self._head, Divergences):
            return self._head.weights(losses.batches, losses.calls)
        # DeepSpeed keeps gradients of its own, which nobody can drop
        kind = self._trainer.accelerator.distributed_type
        if self._sum is None or step.images is not None or kind == DistributedType.DEEPSPEED:
            return None
        return self._sum.weights(losses.calls, items)

    def _compute(self, losses: BatchLosses, figures: Columns, items: Any, run: RunStep) -> None:
        """Compute the losses of a step. Collective over the world for code of the user's, whose
        errors on one rank are raised on all."""
        if not self._head.is_own:
            losses.compute(figures, items, run, self.drawing.loader_state)
            return
        with ErrorCapture() as computing:
            losses.compute(figures, items, run, self.drawing.loader_state)
        if computing.error is not None:  # others may wait for this rank inside their losses
            rank = self._engine.communicator.rank
            logger.error("the loss fails on rank %d: %s", rank, computing.error)
        gather = self._engine.communicator.cpu_group.gather_values
        computing.raise_on_all_ranks(gather, "computing the loss")

    def _learn(self, gradients: Columns, losses: BatchLosses, items: Any) -> None:
        """Learn from a step of two passes whether later ones can take one. Collective over the
        world."""
        cpu_group = self._engine.communicator.cpu_group
        if self._sum is not None and self._sum.learn(gradients, losses, items, cpu_group):
            self._warn_of_ranks(self._sum)

    def _is_other(self, weights: Columns, gradients: Columns, losses: BatchLosses) -> bool:
        """Tell if the loss of any rank has other gradients than the weights that were known, and
        take two passes for all steps to come. Collective over the world. Raises RuntimeError where
        the step's gradients cannot be dropped."""
        found = difference_of(weights, gradients)
        if losses.has_term:
            found = "has a term of parameters"
        cpu_group = self._engine.communicator.cpu_group
        of_ranks = cpu_group.gather_values((found, losses.had_gradients))
        reasons = [reason for reason, _ in of_ranks if reason is not None]
        if not reasons:
            return False
        what = f"the loss of {type(self._trainer).__name__} {reasons[0]}"
        if self._sum is None or any(had for _, had in of_ranks):
            raise RuntimeError(
                f"{what}: it is not the sum over tokens that it was taken for, and gradients of "
                "the step cannot be taken back"
            )
        self._sum.refute()
        if self._trainer.is_world_process_zero():
            logger.info("%s, other than in earlier steps: steps take two passes now", what)
        return True

    def _warn_of_ranks(self, found: SumOverTokens) -> None:
        """Warn if a loss lacks the factor that makes up for the mean over ranks."""
        ranks = self._trainer.accelerator.num_processes
        if ranks == 1 or not found.is_plain or not self._trainer.is_world_process_zero():
            return
        logger.warning(
            "the loss of %s is next-token loss without a factor, so loss and gradients are "
            "divided by the %d ranks, as under the plain Trainer. Unless you mean it, return loss "
            "* self.accelerator.num_processes, as Trainer.compute_loss does",
            *(type(self._trainer).__name__, ranks),
        )

    def _compare(self, reference: Columns, figures: Columns) -> None:
        """Note whether policy and reference give the same bits. Collective over the world."""
        same = torch.equal(figures["log_probs"], reference["log_probs"])
        self._equals_reference = all(self._engine.communicator.cpu_group.gather_values(same))

    def _try_model(self, row: SourceRow, model: nn.Module) -> None:
        """Refuse code of the user's that mixes sequences, in the trained model, in a reference, or
        in a teacher, which runs with its student. Collective over the world. row: the sequences
        that this rank has drawn for a step."""
        head, trainer = self._head, self._trainer

        def squares(wrapped: nn.Module, inputs: Inputs) -> torch.Tensor:
            with trainer.compute_loss_context_manager():
                found = head.forward(wrapped, inputs)
            of_tokens = [value for name, value in found.items() if name not in head.totals]
            return torch.stack([value.double().square().sum() for value in of_tokens]).sum()

        def next_token_loss(wrapped: nn.Module, inputs: Inputs) -> torch.Tensor:
            with trainer.compute_loss_context_manager():
                return -head.forward(wrapped, inputs)["log_probs"].sum() / ITEMS

        def loss_of_fused_head(wrapped: nn.Module, inputs: Inputs) -> torch.Tensor:
            with trainer.compute_loss_context_manager():
                outputs = wrapped(**inputs, use_cache=False, fused_lm_head=True)
            return -outputs.log_probs.sum() / ITEMS

        losses = None
        if head.main == "log_probs":
            loss_by_model = loss_of_model(self._engine.whole_model)
            losses = (loss_by_model if head.is_own else loss_of_fused_head), next_token_loss
        if model is not self._other:
            self._trial.run(row, model, squares, pads=False, losses=losses)
        if model is self._other or isinstance(head, Divergences):
            self._trial_of_other.run(row, model, squares, pads=False)

    @contextmanager
    def _timed_since(self, began: float) -> Iterator[None]:
        """Surround a step: TRL's logged seconds then cover the whole step."""
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
        """Run the calls that the loss will make without gradients. Collective over the world."""
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

    # ---- evaluation

    def _evaluation_loader(self, dataloader: Any) -> Any:
        self.check_loader(dataloader)
        return dataloader

    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock: StockPrediction
    ) -> Prediction:
        """Return the Trainer's own result on planned figures. Collective over the world."""
        predicted = None
        if self.has_predictions:
            batch = {**self._trainer._prepare_inputs(batch)}  # a loss may take labels from it
        with ExitStack() as answered:
            if self._tokens is not None:
                # the figures that the loss will ask for come with the predictions
                answered.callback(self.answers.clear)
                predicted = self._predicted(self._tokens, model, batch)
                if not predicted.has_labels:
                    return None, predicted.predictions, predicted.labels
            answered.enter_context(self.answers.answering(model))
            if self.has_predictions:
                answered.enter_context(self.answers.on_batch(batch))
            found = stock(self._trainer.model, batch, loss_only or predicted is not None)
        if predicted is None:
            return found
        return found[0], predicted.predictions, predicted.labels

    def _predicted(self, tokens: TokenPredictions, model: nn.Module, batch: Any) -> PredictedBatch:
        """Return the predictions of a padded batch, and note its figures for the loss."""

        def forward(micro_batch: Inputs, step: RankMicroBatches) -> Columns:
            with self._trainer.compute_loss_context_manager():
                return self._head.forward(model, micro_batch)

        predicted, figures, step = tokens.predict(batch, forward)
        self._try_model(without_metrics(step.row), model)
        (own,) = self.answers.split(figures, [predicted.call])
        self.answers.note(POLICY, predicted.call, own)
        return predicted
