"""The Trainer on a model in stages: its differences from `FlexSeqMixin`.

A rank has one stage, so whatever the Trainer does with "the model" is changed where it means all
of it:

* `training_step`, `prediction_step`: the engine runs the chunks of a step (`engine.py`).
* `_wrap_model`: a thin wrapper of ours, which accelerate then leaves alone; accelerate prepares
  the optimizer only.
* `_clip_grad_norm`, `_get_grad_norm`: over all stages.
* `save_model`, `_save`: see `hf_flexseq/pipeline/checkpoint.py`; `_load_from_checkpoint`,
  `_load_best_model`: see `loading.py`; `_save_optimizer_and_scheduler`,
  `_load_optimizer_and_scheduler`: see `hf_flexseq/pipeline/optimizer.py`.
* `floating_point_ops`: of this stage, for all tokens that pass through it.

No override of the user's is called for any of these (`REPLACED`), so one is refused.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_flexseq.base.versions import saves_on_writers
from hf_flexseq.checkpoints.optimizer import WHOLE, WHOLE_SCHEDULER, is_named
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.rehearsal import class_copy
from hf_flexseq.hf.trainer.checkpoint_forms import numbered_names
from hf_flexseq.hf.trainer.trainer import FlexSeqMixin
from hf_flexseq.hf.trainer.whole_checkpoints import warn_without_optimizer
from hf_flexseq.pipeline.checkpoint import save_stage
from hf_flexseq.pipeline.optimizer import (
    load_stage_optimizer,
    save_stage_optimizer,
    trained_names,
)
from hf_flexseq.pipeline.reduction import gradient_norm
from hf_flexseq.pipeline.trainer.checks import (
    check_divides,
    check_pipeline_trainer,
    check_replaced,
)
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from hf_flexseq.pipeline.trainer.fsdp import check_fsdp, take_over_fsdp
from hf_flexseq.pipeline.trainer.loading import load_stage_of, load_stage_weights
from hf_flexseq.pipeline.trainer.loss import LossOfStages

logger = logging.getLogger(__name__)


class StageModule(nn.Module):
    """Wrapper of a stage, since accelerate's DDP would average gradients of other layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("a pipeline stage cannot be called directly")


class PipelineMixin(FlexSeqMixin):
    """A `FlexSeqMixin` whose model is cut into `pipeline_parallel_size` stages. A trainer becomes
    one of this class when it is set up with more than one."""

    flexseq: PipelineEngine
    _flexseq_loss: LossOfStages

    @staticmethod
    def load_own_stage(name: str, training: Any, args: FlexSeqArguments) -> PreTrainedModel:
        """Load this rank's stage of the model `name`. Raises ValueError unless stages divide the
        ranks. training: arguments of the Trainer."""
        stages = args.pipeline_parallel_size
        check_divides(stages, training.world_size)
        index = training.process_index // (training.world_size // stages)
        return load_stage_of(name, index, stages, virtual=args.stages_per_rank)

    def _flexseq_checks(self, options: FlexSeqArguments) -> list[Callable[[], object]]:
        return [
            *super()._flexseq_checks(options),
            lambda: check_replaced(self, options),
            lambda: check_fsdp(self),
            lambda: check_pipeline_trainer(self, options),
        ]

    def _make_engine(self, options: FlexSeqArguments, **common: Any) -> PipelineEngine:
        fsdp = take_over_fsdp(self)
        return PipelineEngine(self.accelerator, options, model=self.model, fsdp=fsdp, **common)

    def _make_loss(self) -> LossOfStages:
        return LossOfStages(self, self.flexseq)

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run a whole step with the last of its items, and return its loss, a scalar."""
        self._flexseq_data.check_accumulation()
        run = super().training_step
        return self._flexseq_loss.run_step(model, inputs, num_items_in_batch, run)

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model in a wrapper that accelerate leaves alone."""
        return model if isinstance(model, StageModule) else StageModule(model)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of this rank in one step: 6 per parameter and token."""
        if inputs.step is None:
            return 0
        tokens = sum(inputs.step.own_plan.lengths)
        model = self.flexseq.stage.stack.model
        parameters = model.num_parameters(exclude_embeddings=True)
        return int(6 * tokens * parameters / self.flexseq.degree)

    # ---- gradients

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip gradients over all stages; return their norm. Collective over the world."""
        norm = self._get_grad_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of all stages' gradients, a scalar. Collective over the world."""
        if grad_norm is not None:
            return grad_norm
        # the gradients of one rank of a stage count, and all shares of sharded ones
        member = self.flexseq.member
        counts = member.index == 0 or member.is_sharded
        return gradient_norm(self.flexseq.stage, member.communicator, counts=counts)

    # ---- files

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save on all ranks, of which the Trainer may call `_save` on some alone."""
        super().save_model(output_dir, *args, **kwargs)
        if saves_on_writers() and not self.args.should_save:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights, the tokenizer and the training arguments, as the Trainer does.
        Collective over the world."""
        folder = self.args.output_dir if output_dir is None else output_dir
        model = self.flexseq.stage.stack.model
        save_stage(self.flexseq.member, folder, partial(revert_weight_conversion, model))
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, f"{folder}/training_args.bin")

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        load_stage_weights(self.flexseq.stage, resume_from_checkpoint, self.flexseq.communicator)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        load_stage_weights(self.flexseq.stage, best, self.flexseq.communicator)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the state of optimizer and scheduler. Collective over the world."""
        optimizer = self.optimizer.optimizer
        save_stage_optimizer(self.flexseq.member, optimizer, self.lr_scheduler, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read optimizer and scheduler of a pipeline or a plain Trainer, if both are there."""
        if checkpoint is None:
            return
        member = self.flexseq.member
        warn_without_optimizer(checkpoint, member.communicator)
        state = (member, self.optimizer.optimizer, self.lr_scheduler, checkpoint)
        if is_named(checkpoint):
            load_stage_optimizer(*state)
        elif all((Path(checkpoint) / name).is_file() for name in (WHOLE, WHOLE_SCHEDULER)):
            numbered = numbered_names(self, class_copy(self.model), trained_names(member))
            load_stage_optimizer(*state, numbered=numbered)
