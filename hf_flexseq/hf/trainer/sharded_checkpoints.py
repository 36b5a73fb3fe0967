"""Checkpoints of a model that transformers' `DistributedConfig` has sharded: FSDP2, HSDP, experts.

The plain Trainer writes such a model's weights, gathered, and refuses to write more. Here the
optimizer's state is written too (`checkpoints/sharded_optimizer.py`), so such a run resumes, on
the same ranks or on others. Weights that transformers converts, of sharded models as of whole
ones, are read by `weights.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.checkpoints.optimizer import (
    FOLDER,
    WHOLE,
    WHOLE_SCHEDULER,
    is_named,
    load_optimizer,
)
from hf_flexseq.checkpoints.sharded_optimizer import save_sharded_optimizer
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.trainer.resume import warn_without_optimizer
from hf_flexseq.hf.trainer.weights import is_read_by_transformers, load_weights

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # to a type checker the mixin is a Trainer
else:
    _Trainer = object  # at run time a Trainer comes after the mixin

# What other programs write an optimizer's state to: accelerate's FSDP, DeepSpeed.
_OF_OTHERS = ("optimizer.bin", "optimizer_[0-9]*", "global_step*")
_ADAPTERS = ("adapter_model.*", "*/adapter_model.*")


# ---- the Trainer's constructor


@contextmanager
def accepted_by_trainer(trainer: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let the Trainer's constructor accept a sharded model whose optimizer is to be saved.

    It refuses one unless `save_only_model` is set, which therefore is inside the block. TRL makes
    training arguments of its own from those that it is given; both get the user's value back.

    arguments: the constructor's, by name.
    """
    args = arguments.get("args")
    if args is None or not _is_sharded(arguments.get("model"), args):
        yield
        return
    wanted = args.save_only_model
    args.save_only_model = True
    try:
        yield
    finally:
        for holder in (args, getattr(trainer, "args", args)):
            holder.save_only_model = wanted


def _is_sharded(model: Any, args: Any) -> bool:
    """Tell if a model is sharded by transformers, or will be when TRL loads it by its name."""
    if isinstance(model, str):
        settings = getattr(args, "model_init_kwargs", None) or {}
        return isinstance(settings, Mapping) and bool(settings.get("distributed_config"))
    return is_sharded_at_load(model)


# ---- checkpoints


class ShardedCheckpoints(_Trainer):
    """The part of `FlexSeqMixin` that reads weights, and writes and reads optimizers, in other
    forms than the Trainer's own."""

    flexseq: FlexSeqEngine

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        if is_read_by_transformers(self):
            load_weights(self.model, resume_from_checkpoint, self.flexseq.communicator)
        else:
            check_adapter(self, resume_from_checkpoint)
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        if is_read_by_transformers(self):
            best = self.state.best_model_checkpoint
            load_weights(self.model, best, self.flexseq.communicator)
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if is_sharded_at_load(self):
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
        if checkpoint is not None and is_named(checkpoint):
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


# ---- reading what other runs have saved


def check_adapter(trainer: Any, folder: str) -> None:
    """Raise ValueError if an adapter on a sharded model is to go on from a checkpoint without any,
    which the Trainer passes over with a warning."""
    if not is_sharded_at_load(trainer):
        return
    if not any(any(Path(folder).glob(pattern)) for pattern in _ADAPTERS):
        raise ValueError(f"{folder} holds no adapter, but this run trains one")


def load_trainers_optimizer(trainer: Any, folder: str, communicator: Communicator) -> None:
    """Read the optimizer and the scheduler that a Trainer has saved of a model that was not
    sharded, if the checkpoint has any.

    Raises ValueError for a state of which a part is missing, or that another program has saved.
    Collective over the world.
    """
    path = Path(folder)
    there = [name for name in (WHOLE, WHOLE_SCHEDULER) if (path / name).is_file()]
    for pattern in _OF_OTHERS:
        there += [file.name for file in path.glob(pattern)]
    if not there:
        return
    if there != [WHOLE, WHOLE_SCHEDULER]:
        found = ", ".join(sorted(there))
        raise ValueError(
            f"{folder} has the optimizer's state in {found}, which a model that DistributedConfig "
            f"has sharded does not read: it needs {WHOLE} and {WHOLE_SCHEDULER} of a Trainer, or "
            f"{FOLDER}/"
        )
    load_optimizer(
        trainer.model,
        trainer.optimizer.optimizer,
        trainer.lr_scheduler,
        folder,
        numbered=_numbered_names(trainer),
        gather=communicator.cpu_group.gather_values,
    )


def _numbered_names(trainer: Any) -> list[list[str]]:
    """Return the trained parameters as a Trainer groups and numbers them on one process, those
    with weight decay first."""
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    return [
        [name for name in names if name in decayed],
        [name for name in names if name not in decayed],
    ]
