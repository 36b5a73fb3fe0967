"""What the Trainer does with "the model" as a whole, on a rank that may have a part of it.

`PartOfModelMixin` is the part of `FlexSeqMixin` that does something else instead of the Trainer's
own methods:

* A rank with one pipeline stage: the executor's hooks (`pipeline/hooks.py`) wrap, clip, save and
  load.
* A model that `DistributedConfig` has sharded: weights are read by `weights.py`, and the state of
  the optimizer is written and read by names (`sharded_checkpoints.py`). Its weights are saved by
  the Trainer.
* A model whose weights transformers converts: they are read by `weights.py`.
"""

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_flexseq.base.versions import is_sharded_at_load, saves_on_writers
from hf_flexseq.checkpoints.optimizer import is_named, load_optimizer
from hf_flexseq.checkpoints.sharded_optimizer import save_sharded_optimizer
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.pipeline.hooks import PipelineHooks
from hf_flexseq.hf.resume import warn_without_optimizer
from hf_flexseq.hf.sharded_checkpoints import check_adapter, load_trainers_optimizer
from hf_flexseq.hf.weights import is_read_by_transformers, load_weights

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

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().save_model(output_dir, *args, **kwargs)
        if self._hooks is not None and saves_on_writers() and not self.args.should_save:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._hooks is None:
            super()._save(output_dir, state_dict=state_dict)
        else:
            self._hooks.save(self, self.args.output_dir if output_dir is None else output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        if self._hooks is not None:
            self._hooks.load(resume_from_checkpoint)
        elif is_read_by_transformers(self):
            load_weights(self.model, resume_from_checkpoint, self.flexseq.communicator)
        else:
            check_adapter(self, resume_from_checkpoint)
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._hooks is not None:
            logger.info("loading the best model from %s", best)
            self._hooks.load(best)
        elif is_read_by_transformers(self):
            load_weights(self.model, best, self.flexseq.communicator)
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._hooks is not None:
            self._hooks.save_optimizer(self, output_dir)
        elif is_sharded_at_load(self):
            save_sharded_optimizer(
                self.model,
                self.optimizer.optimizer,
                self.lr_scheduler,
                output_dir,
                self.flexseq.communicator,
            )
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read the state in either form: by names, or as the Trainer's."""
        communicator = self.flexseq.communicator
        if checkpoint is not None and not self.is_deepspeed_enabled:
            warn_without_optimizer(checkpoint, communicator)
        if self._hooks is not None:
            self._hooks.load_optimizer(self, checkpoint)
        elif checkpoint is not None and is_named(checkpoint):
            load_optimizer(
                self.model,
                self.optimizer.optimizer,
                self.lr_scheduler,
                checkpoint,
                gather=communicator.cpu_group.gather_values,
            )
        elif checkpoint is not None and is_sharded_at_load(self):
            load_trainers_optimizer(self, checkpoint, communicator)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
