"""The Trainer on a pipeline: what `FlexSeqMixin` does instead of the Trainer's own methods.

A rank has one stage, so whatever the Trainer does with "the model" is changed where it means all
of it:

* `wrap_model`: a thin wrapper of ours, which accelerate then leaves alone; accelerate prepares the
  optimizer only.
* `clip_grad_norm`, `grad_norm`: over all stages.
* `save`, `load`: see `hf_flexseq/pipeline/checkpoint.py`; `save_optimizer`, `load_optimizer`: see
  `hf_flexseq/pipeline/optimizer.py`.
* `floating_point_ops`: of this stage, for all tokens that pass through it.

A step itself is run by the engine's executor.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.checkpoints.optimizer import WHOLE, WHOLE_SCHEDULER, is_named
from hf_flexseq.hf.model.rehearsal import class_copy
from hf_flexseq.pipeline.checkpoint import StageMember, load_stage, save_stage
from hf_flexseq.pipeline.optimizer import (
    load_stage_optimizer,
    save_stage_optimizer,
    trained_names,
)
from hf_flexseq.pipeline.reduction import gradient_norm
from hf_flexseq.steps.rank_step import RankChunks


class StageModule(nn.Module):
    """Wrapper of a stage, since accelerate's DDP would average gradients of other layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("a pipeline stage cannot be called directly")


class PipelineHooks:
    """Trainer hooks for a rank that holds one stage of the model."""

    def __init__(self, member: StageMember, degree: int) -> None:
        """degree: so many ranks of the stage share each chunk."""
        self.member = member
        self.degree = degree
        self.stage = member.stage

    # ---- steps

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model in a wrapper that accelerate leaves alone."""
        return model if isinstance(model, StageModule) else StageModule(model)

    def set_training_mode(self, model: nn.Module, optimizer: Any) -> None:
        """Do what the Trainer does to model and optimizer before a step."""
        model.train()
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # schedule-free optimizers have two modes

    def floating_point_ops(self, step: RankChunks | None) -> int:
        """Return the operations of this rank in one step: 6 per parameter and token."""
        if step is None:
            return 0
        tokens = sum(step.own_plan.lengths)
        parameters = self.stage.stack.model.num_parameters(exclude_embeddings=True)
        return int(6 * tokens * parameters / self.degree)

    # ---- gradients

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients to `max_norm` over all stages; return the norm. Collective."""
        norm = self.grad_norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of all stages' gradients, a scalar. Collective over the world."""
        # the gradients of one rank of a stage count, and all shares of sharded ones
        counts = self.member.index == 0 or self.member.is_sharded
        return gradient_norm(self.stage, self.member.communicator, counts=counts)

    # ---- files

    def save(self, trainer: Trainer, folder: str) -> None:
        """Write the weights, and what the Trainer saves with them. Collective over the world."""
        save_stage(self.member, folder)
        if not trainer.args.should_save:
            return
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(trainer.args, f"{folder}/training_args.bin")

    def load(self, folder: str) -> None:
        """Read the stage's weights. Raises ValueError for tensors that are missing."""
        load_stage(self.stage, folder)

    def save_optimizer(self, trainer: Trainer, folder: str) -> None:
        """Write the state of optimizer and scheduler. Collective over the world."""
        optimizer = trainer.optimizer.optimizer
        save_stage_optimizer(self.member, optimizer, trainer.lr_scheduler, folder)

    def load_optimizer(self, trainer: Trainer, folder: str | None) -> None:
        """Read optimizer and scheduler of a pipeline or a plain Trainer, if both are there."""
        if folder is None:
            return
        state = (self.member, trainer.optimizer.optimizer, trainer.lr_scheduler, folder)
        if is_named(folder):
            load_stage_optimizer(*state)
        elif all((Path(folder) / name).is_file() for name in (WHOLE, WHOLE_SCHEDULER)):
            load_stage_optimizer(*state, numbered=self._numbered_names(trainer))

    def _numbered_names(self, trainer: Trainer) -> list[list[str]]:
        """Return all trained parameters as a Trainer groups and numbers them, those with weight
        decay first. Collective over the world."""
        trained = trained_names(self.member)
        whole = class_copy(trainer.model)
        names = [name for name, _ in whole.named_parameters() if name in trained]
        decayed = set(trainer.get_decay_parameter_names(whole))
        return [
            [name for name in names if name in decayed],
            [name for name in names if name not in decayed],
        ]
