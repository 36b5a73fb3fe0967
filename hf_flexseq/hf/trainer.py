"""The Trainer on planned steps.

`FlexSeqMixin` goes in front of any Trainer. What it changes, method by method:

* `get_batch_samples`, where the Trainer draws the batches of an optimizer step: plans the step and
  brings the tokens to their ranks. It still returns as many items as it was asked for, because the
  Trainer counts them; all but the last are empty.
* `training_step`: runs the micro-batches of the plan, each through the Trainer's own
  `training_step`.
* `_prepare_inputs`, `_get_per_token_logps_and_entropies`: where a loss is computed at home
  (`objectives/`).
* `evaluation_loop`, `prediction_step`: the same for evaluation, with a loss over all target
  tokens; predictions of tokens come home (`predictions.py`).
* `get_eval_dataloader`, `get_test_dataloader`: padded batches, where predictions are wanted.
* `train`, `_inner_training_loop`: the run goes on from a whole checkpoint; the model has our
  attention and loss while it trains, and its own afterwards.
* `_save_checkpoint`: a checkpoint can be told from one whose writer was killed.
* `_reject_skip_prepare_without_labels`: a check of TRL's SFTTrainer sees the collator that ours is
  put around.
* `log`: adds the figures of the step.
* Everything that handles "the model" as a whole: on a rank that has one pipeline stage of it, the
  executor's hooks do it (`pipeline/hooks.py`).

Data order, gradient accumulation, clipping, schedules, and what is saved and resumed stay the
Trainer's own.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.hf.dataset_checks import (
    check_examples,
    check_first_step,
    check_labels,
    check_sides,
)
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.evaluation import EvaluationLoss, PlannedBatches, left_unprepared
from hf_flexseq.hf.executors import (
    EngineSetup,
    Executor,
    TrainerHooks,
    base_model,
)
from hf_flexseq.hf.loaders import EpochBatches, LongestLoader, batches_on_host
from hf_flexseq.hf.losses import has_planned_loss, reads_figures
from hf_flexseq.hf.model.checks import check_deterministic, check_model
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.model.router import RouterLoss
from hf_flexseq.hf.objectives.one_pass import refusing_calls_without_labels
from hf_flexseq.hf.objectives.planned import PlannedLoss
from hf_flexseq.hf.pipeline.executor import stage_executor_for
from hf_flexseq.hf.pipeline.hooks import load_own_stage
from hf_flexseq.hf.predictions import TokenPredictions, check_predictions, wants_predictions
from hf_flexseq.hf.resume import Resumed, choose_checkpoint, warn_without_optimizer
from hf_flexseq.hf.saving import checkpoint_folder, saved_whole
from hf_flexseq.hf.trainer_checks import check_router_loss, check_trainer
from hf_flexseq.hf.whole_model import WholeModelExecutor
from hf_flexseq.pipeline.optimizer import is_of_pipeline, load_optimizer
from hf_flexseq.steps.collator import DataCollatorForFlexSeq, PaddedCollator
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.screen import Predictions, beside_bars
from hf_flexseq.steps.step import StepItem, step_items
from hf_flexseq.steps.trace import Figures, mean_figures, plan_line
from hf_flexseq.steps.training_mode import in_training_mode

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # to a type checker the mixin is a Trainer
else:
    _Trainer = object  # at run time a Trainer comes after the mixin

logger = logging.getLogger(__name__)

# What FlexSeqMixin overrides; a test holds that the Trainer has it. Much of it is not public.
OVERRIDDEN = (
    "train",
    "_inner_training_loop",
    "set_initial_training_values",
    "get_batch_samples",
    "training_step",
    "_prepare_inputs",
    "log",
    "evaluation_loop",
    "prediction_step",
    "get_eval_dataloader",
    "get_test_dataloader",
    "_save_checkpoint",
    # for pipelines
    "_wrap_model",
    "floating_point_ops",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save",
    "_load_from_checkpoint",
    "_load_best_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


@dataclass
class FlexSeqConfig(FlexSeqArguments, TrainingArguments):
    """`TrainingArguments` with the options of hf_flexseq."""


class FlexSeqMixin(_Trainer):
    """Put in front of `Trainer` or a subclass of it, such as TRL's SFTTrainer or DPOTrainer:
    `class MyTrainer(FlexSeqMixin, SFTTrainer)`.

    Args:
        flexseq_args: The options. Taken from `args` when that is a `FlexSeqConfig`, or another
            class with the same fields.

    All other arguments, positional or not, go to the next class as they are.

    With `pipeline_parallel_size` of 2 and more, `model` may be a folder or the name of a model on
    the Hub: then every rank loads its own stage alone.
    """

    flexseq: FlexSeqEngine
    data_collator: Any

    def __init__(
        self, *given: Any, flexseq_args: FlexSeqArguments | None = None, **named: Any
    ) -> None:
        names = _positional_names(type(self), after=FlexSeqMixin)
        arguments = (
            dict(zip(names, given, strict=False)) | named
        )  # to read; given goes on as it is
        model = arguments.get("model")
        training = arguments.get("args")
        if isinstance(model, str):
            options = flexseq_args or arguments_on(training)
            if options.pipeline_parallel_size > 1:
                stage = load_own_stage(model, training, options)
                given, named = _replaced("model", stage, names, given, named)
        super().__init__(*given, **named)
        self._setup_flexseq(flexseq_args)

    def _setup_flexseq(self, flexseq_args: FlexSeqArguments | None) -> None:
        """Do all that must happen after the Trainer's own constructor. Collective over the
        world."""
        options = flexseq_args or arguments_on(self.args)
        check_trainer(self, options)
        base = base_model(self.model)
        check_model(base)
        check_router_loss(self, base)
        if options.deterministic:
            check_deterministic(base)
        is_planned = has_planned_loss(self)
        self._flexseq_reads = reads_figures(self)  # log-probabilities, in a loss of the user's own
        self._flexseq_has_predictions = self._flexseq_reads or not is_planned
        # TRL's trainers log metrics of their own; compute_metrics would be given logits.
        is_planned_text = is_planned and not is_classifier(base)
        if (self._flexseq_has_predictions or is_planned_text) and wants_predictions(
            self, predicts=False
        ):
            check_predictions(self, options.pipeline_parallel_size)
        self._flexseq_padded = self.data_collator  # makes batches as the plain Trainer has them
        if self._flexseq_has_predictions:
            collator = _flexseq_collator(self.data_collator)
            self._flexseq_padded = _padded_collator(self.data_collator, collator)
            check_labels(self, collator)
            self.data_collator = self._flexseq_padded if is_planned else collator
        self.flexseq = self._make_engine(options)
        # A loss that is no sum over tokens is computed at home, on the trainer's own batches.
        self._flexseq_loss = PlannedLoss(self, self.flexseq) if is_planned else None
        self._flexseq_figures: list[Figures] = []  # of the steps since the last log
        self._flexseq_predictions = Predictions(options.cost_model)
        self._flexseq_eval = EvaluationLoss()  # of the evaluation that runs
        self._flexseq_tokens: TokenPredictions | None = None  # of the same, where it predicts
        self._flexseq_adds_router = False  # whether a loss is given its share of router losses
        self._flexseq_notes_router = False  # whether router losses are among the trainer's metrics
        self._flexseq_loaders = ExitStack()  # what the end of training undoes on its dataloader
        # Ranks may run different numbers of micro-batches, unless a subclass computes its loss
        # with collectives between their forwards and backwards.
        own_loss = type(self).compute_loss is not Trainer.compute_loss
        self._flexseq_lockstep = own_loss and not is_planned
        self._flexseq_resumed: Resumed | None = None  # the checkpoint that this run goes on from

    def _make_engine(self, options: FlexSeqArguments) -> FlexSeqEngine:
        """Return the engine, with the executor that the options ask for.

        A timeout that the user has chosen is handed on: on a CPU the Trainer does not give it to
        the job's group.
        """
        executor: Callable[[EngineSetup], Executor] = WholeModelExecutor
        if options.pipeline_parallel_size > 1:
            executor = stage_executor_for(self, options)
        timeout = None
        if self.args.ddp_timeout != TrainingArguments.ddp_timeout:
            timeout = timedelta(seconds=self.args.ddp_timeout)
        engine = FlexSeqEngine(
            self.accelerator,
            options,
            timeout=timeout,
            executor=executor,
            on_figures=self._note_figures,
        )
        engine.keep_loader_settings()
        return engine

    def _flexseq_step_size(self) -> int:
        """Return how many sequences an optimizer step draws."""
        size: int = self.get_total_train_batch_size(self.args)
        return size

    # ---- training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from a whole checkpoint where one is asked for: True takes the newest. Raises
        ValueError for one that is not whole."""
        resumed = choose_checkpoint(
            resume_from_checkpoint, self.args.output_dir, self.flexseq.communicator
        )
        self._flexseq_resumed = resumed
        folder = None if resumed is None else resumed.folder
        return super().train(folder, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        resumed = self._flexseq_resumed
        with Attempt() as checking:
            if self._flexseq_loss is None:
                check_examples(self, self.flexseq.args, resumes=resumed is not None)
            else:
                check_sides(self, self.flexseq.args)
        host = self.flexseq.communicator.host
        checking.raise_together(host.gather_values, "looking at the datasets")
        if resumed is None:
            self.flexseq.bring_cost(None, None)
        else:
            resumed.check_step_size(self._flexseq_step_size())
            self.flexseq.bring_cost(resumed.folder, resumed.marker.get("cost_model"))
        with host.naming_lost(), self._attached(), ExitStack() as self._flexseq_loaders:
            output = super()._inner_training_loop(*args, **kwargs)
            self.flexseq.check_finite()
            return output

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Surround training or an evaluation: the models run on planned steps inside."""
        with ExitStack() as attached:
            attached.enter_context(
                self.flexseq.attached(self.model, lockstep=self._flexseq_lockstep)
            )
            if self._flexseq_loss is not None:
                attached.enter_context(self._flexseq_loss.attached())
            elif self.flexseq.executor.router is not None:
                attached.enter_context(self._adding_router_loss(self.flexseq.executor.router))
            yield

    def _on_parts(self) -> AbstractContextManager[None]:
        """Surround a `compute_loss` on a micro-batch, which has parts of samples."""
        is_own = type(self).compute_loss is not Trainer.compute_loss
        return refusing_calls_without_labels(self) if is_own else nullcontext()

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Keep batches on the host until training ends.

        Without `even_batches` ranks draw different numbers of them; all go on until the last one
        is done.
        """
        self._flexseq_loaders.enter_context(batches_on_host(dataloader))
        longest = LongestLoader.over(dataloader, self.flexseq.communicator)
        self._flexseq_epochs = EpochBatches(longest)
        return super().set_initial_training_values(args, longest)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return `num_batches` items, of which the last one is the planned step, and the step's
        target tokens; no item when no rank has data left. A loss that is computed at home gets the
        batches themselves."""
        epochs = self._flexseq_epochs.of(epoch_iterator)
        if self._flexseq_loss is not None:
            batches = self._flexseq_loss.next_batches(
                epochs, num_batches, first_number=self.state.global_step
            )
            return batches, self._get_num_items_in_batch(batches, device)
        step = self.flexseq.next_step(epochs, num_batches, first_number=self.state.global_step)
        if self.state.global_step == 0:
            check_first_step(step)
        if step is None:
            return [], None
        # Filled on the device: a tensor made of the number would be copied there, and waited for.
        targets = torch.full((), max(step.targets, 1), device=device)
        return step_items(step, num_batches), targets

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run all micro-batches of a step, and return the sum of their losses, a scalar."""
        if self._flexseq_loss is not None:
            return self._train_at_home(self._flexseq_loss, model, inputs, num_items_in_batch)
        if not isinstance(inputs, StepItem):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        if inputs.step is None:
            return torch.zeros((), device=self.args.device)

        def forward_backward(micro_batch: Inputs) -> torch.Tensor:
            with self._on_parts():
                loss: torch.Tensor = super(FlexSeqMixin, self).training_step(
                    model, micro_batch, num_items_in_batch
                )
            return loss

        training: AbstractContextManager[None] = nullcontext()
        if self._hooks is not None:
            self._hooks.set_training_mode(model, self.optimizer)
        else:
            training = in_training_mode(model)
        is_last = self.state.global_step + 1 >= self.state.max_steps
        with training:
            loss = self.flexseq.train(inputs.step, forward_backward, model, is_last=is_last)
        self._note_router_loss("train")
        self.flexseq.finish(inputs.step)
        return loss

    @contextmanager
    def _adding_router_loss(self, router: RouterLoss) -> Iterator[None]:
        """Add to each micro-batch's loss its share of the step's router loss inside the block,
        whatever computes the rest; nothing happens inside another such block.

        SFTTrainer, which would add that of the micro-batch itself, is told that there is none.
        """
        if self._flexseq_adds_router:
            yield
            return
        own = self.__dict__  # where the user may have set a function of theirs, too
        former = own.get("compute_loss")
        own_loss = self.compute_loss
        # SFTTrainer's coefficient is not always the model's.
        adds_its_own = getattr(self, "aux_loss_enabled", False)
        router.coefficient = getattr(self, "router_aux_loss_coef", router.coefficient)
        # The mean over ranks is the loss, and a share belongs to one rank.
        factor = router.coefficient * self.accelerator.num_processes

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = own_loss(model, inputs, *args, **kwargs)
            if isinstance(found, tuple):  # loss, outputs
                return (found[0] + factor * router.share(), *found[1:])
            return found + factor * router.share()

        own["compute_loss"] = compute_loss
        self._flexseq_adds_router = True
        self._flexseq_notes_router = adds_its_own
        if adds_its_own:
            self.aux_loss_enabled = False
        try:
            yield
        finally:
            del own["compute_loss"]
            if former is not None:
                own["compute_loss"] = former
            if adds_its_own:
                self.aux_loss_enabled = True
            self._flexseq_adds_router = False
            self._flexseq_notes_router = False

    def _note_router_loss(self, mode: str) -> None:
        """Leave the router loss of a step where SFTTrainer keeps its metrics.

        mode: "train" or "eval".
        """
        router = self.flexseq.executor.router
        if self._flexseq_notes_router and router is not None and router.value is not None:
            self._metrics[mode]["aux_loss"].append(float(router.value))

    def _train_at_home(
        self, planned: PlannedLoss, model: nn.Module, batch: Any, num_items_in_batch: Any
    ) -> torch.Tensor:
        """Take the next batch of a step, and run the whole step with its last one; return this
        rank's loss, a scalar."""
        if not planned.is_complete(batch):
            return torch.zeros((), device=self.args.device)

        def stock_step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = super(FlexSeqMixin, self).training_step(
                model, batch, num_items_in_batch
            )
            return loss

        is_last = self.state.global_step + 1 >= self.state.max_steps
        return planned.train(model, stock_step, is_last=is_last)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Leave a batch alone that is prepared already; let samples be made with the model's own
        attention."""
        planned = self._flexseq_loss
        if planned is None:
            return super()._prepare_inputs(inputs)
        if inputs is planned.prepared:
            return inputs
        with planned.preparing():
            return super()._prepare_inputs(inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Plan the log-probabilities of a whole batch of samples together, in place of
        `batch_size` of them at a time. Only TRL's GRPO and RLOO call this."""
        assert self._flexseq_loss is not None, "GRPO and RLOO compute their loss at home"
        with self._flexseq_loss.answering(self.model_wrapped):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, None, **options
            )

    def _note_figures(self, number: int, figures: Figures) -> None:
        """Record the figures of a step for the next log line."""
        self._flexseq_figures.append(figures)
        self._flexseq_predictions.add(figures)
        if self.is_world_process_zero() and logger.isEnabledFor(logging.INFO):
            with beside_bars():
                logger.info("step %d: %s", number, plan_line(figures))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the mean figures of the steps since the last loss, beside it.

        Collective over the world where the Trainer logs a loss, which it has gathered just before;
        a loss that somebody else logs in the middle of a step may be that of one rank alone.
        """
        if "loss" in logs:
            if self.control.should_log:
                self.flexseq.gather_figures()
            logs = logs | mean_figures(self._flexseq_figures)
            self._flexseq_figures.clear()
        super().log(logs, *args, **kwargs)
        if "loss" in logs:
            line = self._flexseq_predictions.verdict()
            if line is not None and self.is_world_process_zero():
                with beside_bars():
                    logger.warning("%s", line)

    # ---- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint between its marker and its manifest, and none that NaN has gone into.
        Collective over the world."""
        self.flexseq.check_finite()
        marker = {
            "sequences_per_step": self._flexseq_step_size(),
            "cost_model": self.flexseq.cost_record(),
        }
        folder = checkpoint_folder(self, trial)
        with saved_whole(self, folder, marker, self.flexseq.communicator):
            super()._save_checkpoint(model, trial)

    # ---- the datasets

    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Let SFTTrainer refuse datasets with masks but no labels: it asks for the type of its own
        collator, which makes labels of all tokens, and would not know it inside ours. Only TRL
        calls this."""
        if isinstance(data_collator, DataCollatorForFlexSeq):
            data_collator = data_collator.example_collator
        super()._reject_skip_prepare_without_labels(datasets, data_collator)

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the Trainer's loop over planned batches, or over padded ones that are planned one by
        one where predictions are wanted.

        A loss that is a sum over tokens is summed over all target tokens of the set, so that it
        does not depend on batch size or world size; samples repeated to fill the last batch do not
        count, except those of a stream when predictions are wanted, where nothing marks them. A
        loss that is computed at home is the Trainer's mean over batches.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        with self._predicting(not prediction_loss_only, dataloader) as loader:
            self._flexseq_eval = EvaluationLoss()
            with self._attached(), left_unprepared(self):
                output = super().evaluation_loop(
                    loader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        name = f"{metric_key_prefix}_loss"
        has_loss = prediction_loss_only or name in output.metrics  # predict() may have no labels
        if self._flexseq_loss is not None or not has_loss:
            return output
        loss = self._flexseq_eval.mean(self.flexseq.communicator)
        return output._replace(metrics=output.metrics | {name: loss})

    @contextmanager
    def _predicting(self, predicts: bool, dataloader: Any) -> Iterator[Any]:
        """Surround an evaluation; the block gets the loader that it iterates over.

        predicts: whether more than the loss is wanted.
        """
        if not predicts or not self._flexseq_has_predictions:
            is_planned = self._flexseq_loss is not None
            yield dataloader if is_planned else PlannedBatches(self.flexseq, dataloader)
            return
        check_predictions(self, self.flexseq.args.pipeline_parallel_size)
        self._flexseq_tokens = TokenPredictions(self, self.flexseq)
        try:
            with self._flexseq_tokens.in_loop(), batches_on_host(dataloader):
                yield dataloader
        finally:
            self._flexseq_tokens = None

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader, of padded batches where predictions are wanted."""
        with self._padding(wants_predictions(self, predicts=False)):
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader, of padded batches where predictions are wanted."""
        with self._padding(wants_predictions(self, predicts=True)):
            return super().get_test_dataloader(*args, **kwargs)

    @contextmanager
    def _padding(self, pads: bool) -> Iterator[None]:
        """Give loaders that are made inside the block the collator of padded batches, if
        `pads`."""
        former = self.data_collator
        if pads:
            self.data_collator = self._flexseq_padded
        try:
            yield
        finally:
            self.data_collator = former

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Run the forwards of a step, and return its loss, a scalar, without logits or labels."""
        if self._flexseq_loss is not None:
            predicts = self._flexseq_tokens is not None
            with ExitStack() as answered:
                answered.enter_context(self._flexseq_loss.answering(model))
                if self._flexseq_reads:
                    inputs = self._prepare_inputs(inputs)
                    answered.enter_context(self._flexseq_loss.on_batch(inputs))
                found = super().prediction_step(
                    self.model, inputs, prediction_loss_only or predicts, ignore_keys=ignore_keys
                )
            if not predicts:
                return found
            _, predictions, labels = self._predicted(model, inputs)
            return found[0], predictions, labels
        if self._flexseq_tokens is not None:
            return self._predicted(model, inputs)
        if not isinstance(inputs, StepItem):
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        assert inputs.step is not None, "an evaluation batch without its step"
        targets = torch.full((), max(inputs.step.targets, 1), device=self.args.device)

        def forward(micro_batch: Inputs) -> torch.Tensor:
            with torch.no_grad(), self._on_parts(), self.compute_loss_context_manager():
                loss: torch.Tensor = self.compute_loss(
                    model, self._prepare_inputs(micro_batch), num_items_in_batch=targets
                )
            return loss

        loss = self.flexseq.evaluate(inputs.step, forward, model)
        self._note_router_loss("eval")
        self._flexseq_eval.add(loss, inputs.step.targets)
        return loss, None, None

    def _predicted(self, model: nn.Module, batch: Any) -> tuple[Any, Any, Any]:
        """Return the loss of a padded batch, a scalar, what was predicted of its tokens, and its
        labels. Collective over the world."""

        def forward(micro_batch: Inputs, targets: torch.Tensor) -> torch.Tensor:
            with self._on_parts(), self.compute_loss_context_manager():
                if self._flexseq_loss is not None:  # the loss was computed at home
                    return model(**micro_batch, use_cache=False).loss
                loss: torch.Tensor = self.compute_loss(
                    model, self._prepare_inputs(micro_batch), num_items_in_batch=targets
                )
                return loss

        assert self._flexseq_tokens is not None, "an evaluation predicts"
        found, loss, targets = self._flexseq_tokens.predict(batch, forward)
        if not found.has_labels:
            return None, found.predictions, None
        if self._flexseq_loss is None:
            self._flexseq_eval.add(loss, targets)
        return loss if found.loss is None else found.loss, found.predictions, found.labels

    # ---- where a rank may have but a part of the model

    @property
    def _hooks(self) -> TrainerHooks | None:
        """The executor's hooks, in place of the Trainer's own methods; None for a whole model."""
        return self.flexseq.executor.trainer_hooks

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if self._hooks is None:
            wrapped: nn.Module = super()._wrap_model(model, *args, **kwargs)
            return wrapped
        return self._hooks.wrap_model(model)

    def floating_point_ops(self, inputs: Any) -> int:
        if self._hooks is None:
            operations: int = super().floating_point_ops(inputs)
            return operations
        return self._hooks.floating_point_ops(inputs.step)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._hooks is None:
            return super()._clip_grad_norm(model)
        return self._hooks.clip_grad_norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._hooks is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._hooks.grad_norm() if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._hooks is None:
            super()._save(output_dir, state_dict=state_dict)
        else:
            self._hooks.save(self, self.args.output_dir if output_dir is None else output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        if self._hooks is None:
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        else:
            self._hooks.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._hooks is None:
            super()._load_best_model()
        else:
            logger.info("loading the best model from %s", self.state.best_model_checkpoint)
            self._hooks.load(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._hooks is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            self._hooks.save_optimizer(self, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read also, for a whole model, the state that a pipeline has written."""
        if checkpoint is not None and not self.is_deepspeed_enabled:
            warn_without_optimizer(checkpoint, self.flexseq.communicator)
        if self._hooks is not None:
            self._hooks.load_optimizer(self, checkpoint)
        elif checkpoint is not None and is_of_pipeline(checkpoint):
            load_optimizer(self.model, self.optimizer.optimizer, self.lr_scheduler, checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)


class FlexSeqTrainer(FlexSeqMixin, Trainer):
    """`Trainer` with flexible sequence parallelism; takes the same arguments, and a
    `FlexSeqConfig` as `args`."""


# ---- options and arguments


def arguments_on(args: Any) -> FlexSeqArguments:
    """Return the options found on training arguments. Raises ValueError when they carry none."""
    names = [field.name for field in fields(FlexSeqArguments)]
    if not all(hasattr(args, name) for name in names):
        raise ValueError(
            f"{type(args).__name__} has no hf_flexseq options: "
            "pass a FlexSeqConfig, or flexseq_args=FlexSeqArguments(...)"
        )
    return FlexSeqArguments(**{name: getattr(args, name) for name in names})


def _positional_names(cls: type, *, after: type) -> list[str]:
    """Return the names of the positional parameters of the constructor that comes `after` a class
    in the MRO of `cls`.

    Positions differ from trainer to trainer: `args` is the second of Trainer and the third of
    TRL's DPOTrainer. A constructor with `*args` hands them on, so that the names of the next one
    follow its own.
    """
    names: list[str] = []
    for base in cls.__mro__[cls.__mro__.index(after) + 1 :]:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # without self
        for parameter in parameters:
            is_positional = parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            )
            if is_positional and parameter.name not in names:
                names.append(parameter.name)
        if not any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
            break
    return names


def _replaced(
    name: str,
    value: Any,
    names: list[str],
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments with another value for one of them, where it stood.

    names: of the positional parameters, in order.
    """
    if name in named:
        return given, {**named, name: value}
    index = names.index(name)
    return (*given[:index], value, *given[index + 1 :]), named


def _padded_collator(given: Any, collator: DataCollatorForFlexSeq) -> Any:
    """Return what makes padded batches: the user's own collator as it is, and one of ours where
    the Trainer's defaults only pad, or ours was given.

    collator: ours, that was made of the given one.
    """
    is_own = collator is not given and collator.example_collator is given
    return given if is_own else PaddedCollator(collator)


def _flexseq_collator(collator: Any) -> DataCollatorForFlexSeq:
    """Return our own collator as it is, one of ours in place of the Trainer's defaults, which only
    pad, and one of ours around any other."""
    if isinstance(collator, DataCollatorForFlexSeq):
        return collator
    if collator is default_data_collator or type(collator) is DataCollatorWithPadding:
        ours = DataCollatorForFlexSeq()
        if hasattr(collator, "tokenizer"):
            ours.tokenizer = collator.tokenizer  # the Trainer saves it with the model
        return ours
    return DataCollatorForFlexSeq(collator)
