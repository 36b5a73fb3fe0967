"""What the Trainer does with "the model" as a whole, on a rank that may have one stage of it.

`PartOfModelMixin` is the part of `FlexSeqMixin` for pipelines: the executor's hooks do it
(`hooks.py`), where it has any, instead of the Trainer's own methods.
"""

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_flexseq.checkpoints.optimizer import is_named, load_optimizer
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.pipeline.hooks import PipelineHooks
from hf_flexseq.hf.resume import warn_without_optimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # to a type checker the mixin is a Trainer
else:
    _Trainer = object  # at run time a Trainer comes after the mixin

logger = logging.getLogger(__name__)


class PartOfModelMixin(_Trainer):
    """Wraps, clips, saves and loads what a rank has of the model."""

    flexseq: FlexSeqEngine

    @property
    def _hooks(self) -> PipelineHooks | None:
        """The executor's hooks, instead of the Trainer's own methods; None for a whole model."""
        hooks: PipelineHooks | None = self.flexseq.executor.trainer_hooks
        return hooks

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
        elif checkpoint is not None and is_named(checkpoint):
            load_optimizer(self.model, self.optimizer.optimizer, self.lr_scheduler, checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
