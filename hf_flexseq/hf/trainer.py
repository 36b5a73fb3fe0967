"""The Trainer on planned steps.

`FlexSeqMixin` goes in front of any Trainer. What it changes, method by method:

* `get_batch_samples`, where the Trainer draws the batches of an optimizer step: plans the step and
  brings the tokens to their ranks. It still returns as many items as it was asked for, because the
  Trainer counts them; all but the last are empty.
* `training_step`: runs the micro-batches of the plan, each through the Trainer's own
  `training_step`.
* `evaluation_loop`, `prediction_step`: the same for evaluation, with a loss over all target
  tokens.
* `_inner_training_loop`: the model has our attention and loss while it trains, and its own
  afterwards.
* `_reject_skip_prepare_without_labels`: a check of TRL's SFTTrainer sees the collator that ours is
  put around.
* `log`: adds the figures of the step.

Data order, gradient accumulation, clipping, schedules, saving and resuming stay the Trainer's own.
"""

import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.engine import FlexSeqEngine, base_model
from hf_flexseq.hf.evaluation import EvaluationLoss, PlannedBatches, left_unprepared
from hf_flexseq.hf.loaders import LongestLoader
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.pipeline.optimizer import is_of_pipeline, load_optimizer
from hf_flexseq.hf.pipeline.trainer import PipelineMixin, load_own_stage
from hf_flexseq.hf.resume import StepSizeCallback, check_step_size
from hf_flexseq.hf.trainer_checks import check_trainer
from hf_flexseq.steps.collator import DataCollatorForFlexSeq
from hf_flexseq.steps.step import Inputs, StepItem, step_items
from hf_flexseq.steps.trace import mean_figures

logger = logging.getLogger(__name__)


@dataclass
class FlexSeqConfig(FlexSeqArguments, TrainingArguments):
    """`TrainingArguments` with the options of hf_flexseq."""


class FlexSeqMixin:
    """Put in front of `Trainer` or a subclass of it: `class MyTrainer(FlexSeqMixin, SFTTrainer)`.

    Args: flexseq_args (`FlexSeqArguments`, *optional*): The options. Taken from `args` when that
    is a `FlexSeqConfig`, or another class with the same fields.

    All other arguments, positional or not, go to the next class as they are.

    With `pipeline_parallel_size` of 2 and more, `model` may be a folder or the name of a model on
    the Hub: then every rank loads its own stage alone.
    """

    flexseq: FlexSeqEngine

    def __init__(
        self, *given: Any, flexseq_args: FlexSeqArguments | None = None, **named: Any
    ) -> None:
        order = _positional_names(type(self), after=FlexSeqMixin)
        # to read; the next class gets what was given
        arguments = dict(zip(order, given, strict=False)) | named
        model, training = arguments.get("model"), arguments.get("args")
        if isinstance(model, str):
            options = flexseq_args or arguments_on(training)
            if options.pipeline_parallel_size > 1:
                stage = load_own_stage(model, training, options)
                if "model" in named:
                    named["model"] = stage
                else:
                    place = order.index("model")
                    given = (*given[:place], stage, *given[place + 1 :])
        super().__init__(*given, **named)
        self._setup_flexseq(flexseq_args)

    def _setup_flexseq(self, flexseq_args: FlexSeqArguments | None) -> None:
        """All that must happen after the Trainer's own constructor."""
        options = flexseq_args or arguments_on(self.args)
        check_trainer(self, options)
        check_model(base_model(self.model))
        if options.pipeline_parallel_size > 1 and not isinstance(self, PipelineMixin):
            former = type(self)
            self.__class__ = type(f"Pipeline{former.__name__}", (PipelineMixin, former), {})
        self.flexseq = self._make_engine(options)
        self.data_collator = _flexseq_collator(self.data_collator)
        self._flexseq_figures: list[dict[str, float]] = []  # of the steps since the last log
        self._flexseq_eval: EvaluationLoss | None = None
        # Ranks may run different numbers of micro-batches, unless a subclass computes its loss
        # with collectives.
        self._flexseq_lockstep = type(self).compute_loss is not Trainer.compute_loss
        self.add_callback(StepSizeCallback(self._flexseq_step_size()))

    def _make_engine(self, options: FlexSeqArguments) -> FlexSeqEngine:
        return FlexSeqEngine(self.accelerator, options)

    def _flexseq_step_size(self) -> int:
        return self.get_total_train_batch_size(self.args)

    # ---- training

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        check_step_size(kwargs.get("resume_from_checkpoint"), self._flexseq_step_size())
        with self.flexseq.attached(self.model, lockstep=self._flexseq_lockstep):
            return super()._inner_training_loop(*args, **kwargs)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Without `even_batches` ranks draw different numbers of batches; all go on until the last
        one is done."""
        return super().set_initial_training_values(
            args, LongestLoader.over(dataloader, self.flexseq.communicator)
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        step = self.flexseq.next_step(epoch_iterator, num_batches)
        if step is None:
            return [], None
        return step_items(step, num_batches), torch.tensor(max(step.targets, 1), device=device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not isinstance(inputs, StepItem):
            return super().training_step(model, inputs, num_items_in_batch)
        if inputs.step is None:
            return torch.zeros((), device=self.args.device)

        def forward_backward(micro_batch: Inputs) -> torch.Tensor:
            return super(FlexSeqMixin, self).training_step(model, micro_batch, num_items_in_batch)

        loss = self.flexseq.run(inputs.step, model, forward_backward)
        self._note_figures(inputs.step)
        return loss

    def _note_figures(self, step: Any) -> None:
        """Of a step that has run, for the log. Collective."""
        figures = self.flexseq.finish(step)
        self._flexseq_figures.append(figures)
        if self.is_world_process_zero():
            logger.info("step %d: %s", step.number, self.flexseq.describe(figures))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also the state that a pipeline has written."""
        if is_of_pipeline(checkpoint):
            load_optimizer(self.model, self.optimizer.optimizer, self.lr_scheduler, checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = logs | mean_figures(self._flexseq_figures)
            self._flexseq_figures.clear()
        super().log(logs, *args, **kwargs)

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
        """The Trainer's loop over planned batches. The loss is summed over all target tokens of
        the set, so that it does not depend on batch size or world size; samples repeated to fill
        the last batch do not count."""
        if prediction_loss_only is False or (
            prediction_loss_only is None and not self.args.prediction_loss_only
        ):
            raise NotImplementedError(
                "predict() would return logits of tokens that are spread over ranks; evaluate() "
                "gives the loss, and "
                "for logits call the model after model.set_attn_implementation('sdpa')"
            )
        self._flexseq_eval = EvaluationLoss()
        with (
            self.flexseq.attached(self.model, lockstep=self._flexseq_lockstep),
            left_unprepared(self),
        ):
            output = super().evaluation_loop(
                PlannedBatches(self.flexseq, dataloader),
                description,
                True,
                ignore_keys,
                metric_key_prefix,
            )
        loss = self._flexseq_eval.mean(self.flexseq.communicator)
        return output._replace(metrics=output.metrics | {f"{metric_key_prefix}_loss": loss})

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not isinstance(inputs, StepItem):
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        assert inputs.step is not None, "an evaluation batch without its step"
        count = torch.tensor(max(inputs.step.targets, 1), device=self.args.device)

        def forward(micro_batch: Inputs) -> torch.Tensor:
            with torch.no_grad(), self.compute_loss_context_manager():
                return self.compute_loss(
                    model, self._prepare_inputs(micro_batch), num_items_in_batch=count
                )

        loss = inputs.step.run(forward).detach()
        self._flexseq_eval.add(loss, inputs.step.targets)
        return loss, None, None


class FlexSeqTrainer(FlexSeqMixin, Trainer):
    """`Trainer` with flexible sequence parallelism; takes the same arguments, and a
    `FlexSeqConfig` as `args`."""


def arguments_on(args: Any) -> FlexSeqArguments:
    """The options found on training arguments. Raises ValueError when they carry none."""
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
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # without self
        positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names += [name for name in positional if name not in names]
        if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            break
    return names


def _flexseq_collator(collator: Any) -> DataCollatorForFlexSeq:
    """Ours as it is; the Trainer's defaults, which only pad, replaced; any other one wrapped."""
    if isinstance(collator, DataCollatorForFlexSeq):
        return collator
    if collator is default_data_collator or type(collator) is DataCollatorWithPadding:
        return DataCollatorForFlexSeq()
    return DataCollatorForFlexSeq(collator)
