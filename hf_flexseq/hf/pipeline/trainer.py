"""The Trainer on a pipeline: what `FlexSeqMixin` puts in front of itself when
`pipeline_parallel_size` exceeds 1.

What a rank has is one stage, so whatever the Trainer does with "the model" is changed where it
means all of it:

* `_wrap_model`: a thin wrapper of ours, which accelerate then leaves alone; it prepares the
  optimizer only.
* `training_step`, `prediction_step`: actions of the plan. The last stage returns its loss times
  the number of ranks, the others 0, so that the mean over ranks, which is what the Trainer logs,
  is the mean over target tokens.
* `_clip_grad_norm`, `_get_grad_norm`: over all stages.
* `_save`, `_load_from_checkpoint`, `_load_best_model`: see `pipeline_checkpoint.py`; the
  optimizer's: `pipeline_optimizer.py`.
* `floating_point_ops`: of this stage, for all tokens that pass through it.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.pipeline.checkpoint import load_stage, save_stage
from hf_flexseq.hf.pipeline.checks import check_divides, check_pipeline_trainer
from hf_flexseq.hf.pipeline.engine import PipelineEngine
from hf_flexseq.hf.pipeline.fsdp import take_over_fsdp
from hf_flexseq.hf.pipeline.loading import load_stage_of
from hf_flexseq.hf.pipeline.optimizer import (
    WHOLE,
    is_of_pipeline,
    load_optimizer,
    load_whole_optimizer,
    save_optimizer,
)
from hf_flexseq.pipeline.reduction import gradient_norm
from hf_flexseq.steps.pipeline_step import PipelineStep
from hf_flexseq.steps.step import StepItem

logger = logging.getLogger(__name__)

# What is overridden here and is not public in transformers; a test holds that it is there.
OVERRIDDEN = (
    "_wrap_model",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
    "training_step",
    "prediction_step",
    "floating_point_ops",
)


class StageModule(nn.Module):
    """The wrapper of a stage: accelerate would wrap the model itself in DDP, and average gradients
    of other layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a pipeline stage runs the chunks of a plan; it is no model that can be called"
        )


class PipelineMixin:
    """In front of `FlexSeqMixin` and the user's trainer."""

    flexseq: PipelineEngine

    def _make_engine(self, options: FlexSeqArguments) -> PipelineEngine:
        fsdp = take_over_fsdp(self)
        check_pipeline_trainer(self, options)
        return PipelineEngine(self.accelerator, options, self.model, fsdp=fsdp)

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return model if isinstance(model, StageModule) else StageModule(model)

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        assert isinstance(inputs, StepItem), "a batch that was not planned"
        if inputs.step is None:
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers have two modes
        loss = self.flexseq.train(inputs.step)
        self._note_figures(inputs.step)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        assert isinstance(inputs, StepItem), "a batch that was not planned"
        loss = self.flexseq.evaluate(inputs.step)
        self._flexseq_eval.add(loss, inputs.step.targets)
        return loss, None, None

    def floating_point_ops(self, inputs: Any) -> int:
        step: PipelineStep | None = inputs.step
        tokens = sum(step.own_plan.lengths) if step is not None else 0
        return int(
            6 * tokens * self.model.num_parameters(exclude_embeddings=True) / self.flexseq.degree
        )

    # ---- gradients

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = self._get_grad_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        engine = self.flexseq
        return gradient_norm(
            engine.stage,
            engine.communicator.parent,
            counts=engine.place == 0 or engine.sharded is not None,
        )

    # ---- files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir
        save_stage(self.flexseq, folder)
        if self.args.should_save:
            self._save_beside_the_model(folder)

    def _save_beside_the_model(self, folder: str) -> None:
        """What the Trainer saves beside the weights."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, f"{folder}/training_args.bin")

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        load_stage(self.flexseq, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        logger.info("loading the best model from %s", self.state.best_model_checkpoint)
        load_stage(self.flexseq, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.flexseq, self.optimizer.optimizer, self.lr_scheduler, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if is_of_pipeline(checkpoint):
            load_optimizer(
                self.model, self.optimizer.optimizer, self.lr_scheduler, checkpoint, self.flexseq
            )
        elif checkpoint is not None and (Path(checkpoint) / WHOLE).is_file():
            load_whole_optimizer(self.flexseq, self, checkpoint)


def load_own_stage(name: str, training: Any, args: FlexSeqArguments) -> PreTrainedModel:
    """This rank's stage of the model `name`. Raises ValueError when the stages do not divide the
    ranks."""
    stages, world = args.pipeline_parallel_size, training.world_size
    check_divides(stages, world)
    return load_stage_of(
        name,
        training.process_index // (world // stages),
        stages,
        virtual=args.pipeline_virtual_stages,
    )
