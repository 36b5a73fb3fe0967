"""The Trainer on planned steps.

`FlexSeqMixin` goes in front of any Trainer. Its changes, method by method:

* `get_batch_samples`: plans an optimizer step and dispatches its tokens, ahead unless the data may
  follow training (`lookahead.py`). It returns as many items as asked for, because the Trainer
  counts them; all but the last are empty.
* `training_step`: runs the micro-batches of the plan, each through the Trainer's own
  `training_step`.
* `evaluation_loop`, `prediction_step`: the same for evaluation, with a loss over all target
  tokens; predictions of tokens are gathered (`predictions.py`).
* `_prepare_inputs`, `_get_per_token_logps_and_entropies`: for a loss on the source rank.
* `get_train_dataloader`, `get_eval_dataloader`, `get_test_dataloader`: padded batches outside of
  training and of an evaluation, or if predictions are wanted.
* `train`, `_inner_training_loop`: the run resumes from a whole checkpoint; the model has our
  attention and loss while it trains.
* `_hp_search_setup`: a trial of `hyperparameter_search` has an accelerator and options of its own.
* `set_initial_training_values`: batches stay on the host until their tokens are dispatched.
* `_save_checkpoint`: a checkpoint differs from one whose writer was killed.
* `_reject_skip_prepare_without_labels`: a check of SFTTrainer sees the wrapped collator.
* `log`, `_maybe_log_save_evaluate`, `_finalize_training`: figures of the steps, and the loss of
  all ranks.
* `_load_from_checkpoint` and others: checkpoints of models that are sharded when they are loaded
  (`checkpoint_forms.py`).

With `pipeline_parallel_size` above 1 the trainer's class becomes a subclass, which the registry
names (`base/registry.py`); it becomes a `_StepInside` if a user's `training_step` before the mixin
does not call the mixin's.

The loss of a step (`step_loss.py`) is computed on the micro-batches (`next_token.py`), or by the
trainer's own code, on its own batches (`hf/losses/on_samples.py`). Data order, gradient
accumulation, clipping, schedules and saving stay the Trainer's own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_flexseq.base.constructor import arguments_by_name, with_argument
from hf_flexseq.base.patches import Patch
from hf_flexseq.base.refusals import together
from hf_flexseq.base.registry import PIPELINE_MIXIN, object_of
from hf_flexseq.config import FlexSeqArguments, arguments_on
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.accelerator_checks import check_accelerator
from hf_flexseq.hf.engine.dataset_checks import check_examples, check_labels, check_rows
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.evaluation import left_unprepared
from hf_flexseq.hf.losses.next_token import NextTokenLoss
from hf_flexseq.hf.losses.on_samples import LossOnSamples
from hf_flexseq.hf.losses.outputs import PlannedSmoother
from hf_flexseq.hf.losses.prediction_checks import check_predictions, wants_predictions
from hf_flexseq.hf.losses.step_loss import StepLoss
from hf_flexseq.hf.losses.watch import StepInFront, replaces_step
from hf_flexseq.hf.model.attachments import ModelSettings
from hf_flexseq.hf.model.checks import check_kind, check_model
from hf_flexseq.hf.model.compiled_regions import leave_others_uncompiled
from hf_flexseq.hf.model.facts import base_model, is_classifier
from hf_flexseq.hf.model.loss_kinds import has_own_loss, is_objective, is_on_samples
from hf_flexseq.hf.model.sharding import gather_experts_at_once, gathering_experts_at_once
from hf_flexseq.hf.trainer.checkpoint_forms import ShardedCheckpoints, accepted_by_trainer
from hf_flexseq.hf.trainer.checks import check_loss_of_model, check_trainer
from hf_flexseq.hf.trainer.overrides import check_overrides
from hf_flexseq.hf.trainer.step_memory import StepMemory
from hf_flexseq.hf.trainer.trainer_log import TrainerLog
from hf_flexseq.hf.trainer.training_data import (
    EvaluationCollator,
    TrainingData,
    flexseq_collator,
    is_around,
    padded_collator,
)
from hf_flexseq.hf.trainer.whole_checkpoints import (
    Factors,
    Resumed,
    check_factors,
    checkpoint_folder,
    choose_checkpoint,
    saved_whole,
)
from hf_flexseq.steps.collator import DataCollatorForFlexSeq
from hf_flexseq.steps.users_code import package


@dataclass
class FlexSeqConfig(FlexSeqArguments, TrainingArguments):
    """`TrainingArguments` with the options of hf_flexseq."""


class FlexSeqMixin(ShardedCheckpoints):
    """Put in front of `Trainer` or a subclass of it, such as TRL's SFTTrainer or DPOTrainer:
    `class MyTrainer(FlexSeqMixin, SFTTrainer)`.

    Args:
        flexseq_args: The options. Taken from `args` when that is a `FlexSeqConfig`, or another
            class with the same fields.

    All other arguments, positional or not, go to the next class as they are.

    With `pipeline_parallel_size` of 2 and more, `model` may be a folder or the name of a model on
    the Hub: then every rank loads its own stage alone.
    """

    data_collator: Any
    neftune_noise_alpha: Any
    _flexseq_loss: StepLoss

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(FlexSeqMixin)]
        if Trainer in before:
            raise TypeError(
                f"class {cls.__name__} has Trainer before FlexSeqMixin, which would do nothing: "
                "name FlexSeqMixin first, as in class MyTrainer(FlexSeqMixin, Trainer)"
            )

    def __init__(
        self, *given: Any, flexseq_args: FlexSeqArguments | None = None, **named: Any
    ) -> None:
        arguments = arguments_by_name(type(self), FlexSeqMixin, given, named)
        if isinstance(arguments.get("model"), str):
            training = arguments.get("args")
            options = flexseq_args or arguments_on(training)
            if options.pipeline_parallel_size > 1:
                pipeline = object_of(PIPELINE_MIXIN)
                stage = pipeline.load_own_stage(arguments["model"], training, options)
                arguments["model"] = stage
                given, named = with_argument(
                    type(self), FlexSeqMixin, given, named, "model", stage
                )
        of_references = gathering_experts_at_once(arguments.get("args"))
        with accepted_by_trainer(self, arguments), of_references:
            super().__init__(*given, **named)
        self._setup_flexseq(flexseq_args)

    def _setup_flexseq(self, flexseq_args: FlexSeqArguments | None) -> None:
        """Set up after the Trainer's own constructor. Collective over the world."""
        self._flexseq_given = flexseq_args
        options = flexseq_args or arguments_on(self.args)
        in_front = None
        if options.pipeline_parallel_size > 1:
            in_front = object_of(PIPELINE_MIXIN)
        elif replaces_step(type(self), FlexSeqMixin):
            in_front = _StepInside
        if in_front is not None:
            former = type(self)
            self.__class__ = type(former.__name__, (in_front, former), {})
        together(*self._flexseq_checks(options))
        leave_others_uncompiled(self)
        base = base_model(self.model)
        # Of models whose class says otherwise, a head that divides by the step's items was found.
        if not is_classifier(base):
            self.model_accepts_loss_kwargs = True
        gather_experts_at_once(self.model, self.accelerator)
        self._flexseq_collator: Any = None
        self._flexseq_evaluation = EvaluationCollator()
        self._choose_collators()
        self._flexseq_log = TrainerLog(self, options.cost_model)
        self._flexseq_log.say_remarks()
        self.flexseq = self._make_engine(
            options,
            timeout=self._flexseq_timeout(),
            on_figures=self._flexseq_log.note,
            uses_trl=any(package(cls) == "trl" for cls in type(self).__mro__),
        )
        self.flexseq.keep_loader_settings()
        self.flexseq.settings = self._settings_of_model()
        self._flexseq_loss = self._make_loss()
        self._flexseq_in_front = StepInFront(self, FlexSeqMixin)
        self._flexseq_memory = StepMemory(self, self.flexseq)
        self._flexseq_loaders = ExitStack()  # what the end of training undoes on its dataloader
        self._flexseq_resumed: Resumed | None = None  # the checkpoint that this run resumes from

    def _flexseq_checks(self, options: FlexSeqArguments) -> list[Callable[[], object]]:
        """Return functions that raise what hf_flexseq refuses of this trainer and its model."""
        stages = options.pipeline_parallel_size

        def check_base() -> None:
            base = base_model(self.model)
            check_kind(base)
            of_base = [lambda: check_model(base), lambda: check_loss_of_model(self, base)]
            if wants_predictions(self, predicts=False):
                of_base.append(lambda: check_predictions(self, stages))
            together(*of_base)

        checks: list[Callable[[], object]] = [
            lambda: check_trainer(self, options),
            lambda: check_accelerator(self.accelerator, options, self.args),
            check_base,
        ]
        if not is_objective(self):  # which has data of its own
            checks.append(lambda: check_labels(self, flexseq_collator(self.data_collator)))
        return checks

    def _choose_collators(self) -> None:
        """Wrap the user's collator to plan batches; keep one that makes the plain Trainer's."""
        given, ours = self.data_collator, self._flexseq_collator
        if given is ours or is_around(given, ours):  # else it is new, or was set since
            return
        self._flexseq_padded = given
        if not is_objective(self):  # TRL's own collators, of pairs and prompts
            collator = flexseq_collator(given)
            self._flexseq_padded = padded_collator(given, collator)
            self.data_collator = self._flexseq_padded if has_own_loss(self) else collator
        self._flexseq_collator = self.data_collator
        self._flexseq_evaluation.padded = self._flexseq_padded
        self._flexseq_evaluation.planned = self.data_collator

    def _make_engine(self, options: FlexSeqArguments, **common: Any) -> FlexSeqEngine:
        """Return the engine. common: its other arguments, see `FlexSeqEngine`."""
        return FlexSeqEngine(self.accelerator, options, **common)

    def _make_loss(self) -> StepLoss:
        """Return the object that computes the loss of steps."""
        kind = LossOnSamples if is_on_samples(self) else NextTokenLoss
        return kind(self, self.flexseq)

    def _flexseq_timeout(self) -> timedelta | None:
        """Return the user's timeout, which on a CPU the Trainer does not give to the job's group;
        None for the default."""
        if self.args.ddp_timeout == TrainingArguments.ddp_timeout:
            return None
        return timedelta(seconds=self.args.ddp_timeout)

    def _settings_of_model(self) -> ModelSettings:
        """Return the settings for the model, and keep the Trainer from applying the same."""
        alpha = self.args.neftune_noise_alpha
        self.neftune_noise_alpha = None  # its own noise would depend on the plan
        smoothing = self.args.label_smoothing_factor
        if smoothing and not is_objective(self):  # it would make the logits of all tokens
            self.label_smoother = PlannedSmoother(smoothing) if has_own_loss(self) else None
        if is_on_samples(self):
            smoothing = 0.0  # in the model
        offloads = getattr(self.args, "activation_offloading", False)
        return ModelSettings(
            label_smoothing=smoothing,
            liger=(self.args.liger_kernel_config or {}) if self.args.use_liger_kernel else None,
            noise=None if alpha is None else (alpha, self.args.seed),
            reason_as_set="activation_offloading=True offloads them" if offloads else None,
        )

    # ---- training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from a whole checkpoint if asked: True takes the newest. Raises ValueError."""
        asked, memory = resume_from_checkpoint, self._flexseq_memory
        with Patch(self.args, use_liger_kernel=False), memory.lowering():  # the engine puts it in
            while True:
                resumed = choose_checkpoint(asked, self.args.output_dir, self.flexseq.communicator)
                self._flexseq_resumed = resumed
                folder = None if resumed is None else resumed.folder
                try:
                    return super().train(folder, *args, **kwargs)
                except RuntimeError:
                    if not memory.can_start_again(folder):
                        raise
                asked = memory.start_again(folder)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        resumed = self._flexseq_resumed
        self._choose_collators()
        with ErrorCapture() as checking:
            check_examples(self, self.flexseq.args, resumes=resumed is not None)
        cpu_group = self.flexseq.communicator.cpu_group
        checking.raise_on_all_ranks(cpu_group.gather_values, "looking at the datasets")
        if resumed is None:
            self.flexseq.bring_cost(None, None)
        else:
            is_first = self.is_world_process_zero()
            check_factors(resumed.folder, resumed.marker, Factors.of(self), says=is_first)
            self.flexseq.bring_cost(resumed.folder, resumed.marker.get("cost_model"))
        self._flexseq_memory.take_recorded()
        with cpu_group.naming_lost(), self._attached(), ExitStack() as self._flexseq_loaders:
            output = super()._inner_training_loop(*args, **kwargs)
            self.flexseq.check_finite()
            return output

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Surround training or an evaluation: the models run on planned steps inside."""
        lockstep = self._flexseq_loss.lockstep
        with self.flexseq.attached(self.model, lockstep=lockstep), self._flexseq_loss.attached():
            if self.optimizer is not None:
                self.flexseq.put_adapters_into(self.optimizer)  # given by the user
            yield

    def _hp_search_setup(self, trial: Any) -> None:
        former = self.accelerator
        super()._hp_search_setup(trial)
        if self.accelerator is not former:
            options = self._flexseq_given or arguments_on(self.args)
            together(*self._flexseq_checks(options))
            self.flexseq.use(self.accelerator, options)
            self.flexseq.keep_loader_settings()
            self._flexseq_log.judge_by(options.cost_model)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Keep batches on the host until training ends; an epoch is as long as the longest rank's
        loader."""
        # functions, hooks and callbacks may have come since construction
        check_overrides(self)
        self._flexseq_log.say_remarks()
        self._flexseq_loss.check_loader(dataloader)
        self._flexseq_data = self._flexseq_loaders.enter_context(
            TrainingData.of(self, self.flexseq, dataloader)
        )
        return super().set_initial_training_values(args, self._flexseq_data.loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return `num_batches` items, the last one with the planned step, and the step's targets,
        a scalar; no item without data. A loss on whole samples gets the batches themselves. Raises
        ValueError if accumulation has changed since training began."""
        epoch = self._flexseq_data.batches(epoch_iterator)
        batches, items = self._flexseq_loss.next_batches(epoch, num_batches, device)
        self._flexseq_in_front.expect(len(batches))
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run a whole step with the last of its batches, and return its loss, a scalar."""
        return self._run_step(super().training_step, model, inputs, num_items_in_batch)

    def _run_step(
        self, run: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, items: Any
    ) -> torch.Tensor:
        """Run a step as `training_step`. run: the `training_step` of the class behind."""
        if not self.is_in_train:
            raise RuntimeError(
                "training_step runs the steps that trainer.train() has planned: call "
                "compute_loss(model, batch) for a batch of your own"
            )
        self._flexseq_data.check_accumulation()
        self._flexseq_in_front.count(model)
        with self._flexseq_memory.noted():
            loss = self._flexseq_loss.run_step(model, inputs, items, run)
        self._flexseq_in_front.note(model, self.args.gradient_accumulation_steps)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._flexseq_in_front.check(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._flexseq_in_front.check(model)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare a batch once; a loss on whole samples generates with the model's attention."""
        return self._flexseq_loss.prepare(inputs, super()._prepare_inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Plan a whole batch's log-probabilities together. Only TRL's GRPO and RLOO call this."""
        assert isinstance(self._flexseq_loss, LossOnSamples), "GRPO and RLOO are known as such"
        with self._flexseq_loss.answers.answering(self.model_wrapped):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, None, **options
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the mean figures of the steps since the last loss with it. Collective over the
        world when the Trainer logs a loss: one logged in the middle of a step may be of one
        rank alone."""
        if "loss" in logs:
            if self.control.should_log:
                self.flexseq.gather_figures()
            logs = logs | self._flexseq_log.take_figures()
        super().log(logs, *args, **kwargs)
        if "loss" in logs:
            self._flexseq_log.judge_predictions()

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Log the loss of whole steps, if NaN was filtered out of shares. Collective."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._flexseq_loss.settle(tr_loss)
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Make `train_loss` the mean over ranks, not rank 0's share. Collective over the world."""
        self._flexseq_loss.settle(self._tr_loss)
        communicator = self.flexseq.communicator
        total = self._tr_loss.double().cpu()
        communicator.cpu_group.all_reduce(total)  # [] -> []
        self._tr_loss.fill_(float(total) / communicator.world_size)
        return super()._finalize_training(*args, **kwargs)

    # ---- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save between marker and manifest, after a check for NaN. Collective over the world."""
        self.flexseq.check_finite()
        factors = Factors.of(self)
        marker = {
            "sequences_per_step": factors.samples,
            "factors": factors.to_record(),
            "cost_model": self.flexseq.cost_record(),
        }
        folder = checkpoint_folder(self, trial)
        with saved_whole(self, folder, marker, self.flexseq.communicator):
            super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._flexseq_memory.saved = str(folder)

    # ---- the datasets

    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Show SFTTrainer its own collator inside ours, to refuse masks without labels. TRL calls
        this."""
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
        count. A loss on whole samples is the Trainer's mean over batches.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        predicts = not prediction_loss_only
        plans = not predicts or not self._flexseq_loss.has_predictions
        dataset = getattr(dataloader, "dataset", None)
        with ErrorCapture() as checking:
            check_rows(f"{metric_key_prefix}_dataset", dataset, self, self.flexseq.args)
        gather = self.flexseq.communicator.cpu_group.gather_values
        checking.raise_on_all_ranks(gather, "looking at the dataset")
        with (
            self._flexseq_loss.evaluating(dataloader, predicts=predicts) as loader,
            self._flexseq_evaluation.planning(plans),
            self._attached(),
            Patch(self.args, use_liger_kernel=False),
            left_unprepared(self),
        ):
            output = super().evaluation_loop(
                loader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self.callback_handler.eval_dataloader = dataloader  # for on_evaluate, without plans
        name = f"{metric_key_prefix}_loss"
        if predicts and name not in output.metrics:  # predict() may have no labels
            return output
        return self._flexseq_loss.evaluated(output, name)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, of padded batches for who looks at them outside of
        training."""
        self._choose_collators()
        collator = self.data_collator if self.is_in_train else self._flexseq_padded
        with Patch(self, data_collator=collator):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader; its batches are padded, but for `evaluation_loop`."""
        with self._collating_for_evaluation():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader; its batches are padded, but for `evaluation_loop`."""
        with self._collating_for_evaluation():
            return super().get_test_dataloader(*args, **kwargs)

    def _collating_for_evaluation(self) -> Patch:
        """Give loaders made inside a block the collator of evaluations, where batches are not
        padded anyway."""
        self._choose_collators()
        pads = self.data_collator is self._flexseq_padded
        return Patch(self, data_collator=self.data_collator if pads else self._flexseq_evaluation)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Return the loss of a step, a scalar, with predictions and labels if wanted."""
        stock = partial(super().prediction_step, ignore_keys=ignore_keys)
        if not self.flexseq.is_attached:  # called by the user, outside of an evaluation
            return stock(model, inputs, prediction_loss_only)
        return self._flexseq_loss.predict(model, inputs, prediction_loss_only, stock)


class _StepInside(FlexSeqMixin):
    """Comes in front of a class whose `training_step` does not call the mixin's, and runs that one
    inside of a step, as behind the mixin."""

    _flexseq_is_inside = False

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """See `FlexSeqMixin.training_step`."""
        return self._run_step(super().training_step, model, inputs, num_items_in_batch)

    def _run_step(self, run: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        if self._flexseq_is_inside:  # the user's method has called the mixin's by its class
            return run(*given)
        with Patch(self, _flexseq_is_inside=True):
            return super()._run_step(run, *given)


class FlexSeqTrainer(FlexSeqMixin, Trainer):
    """`Trainer` with flexible sequence parallelism. `args` is a `FlexSeqConfig`."""
