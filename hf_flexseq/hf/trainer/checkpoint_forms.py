"""Checkpoints in other forms than the Trainer's own, where that one fails:

* transformers converts the model's weights: a mixture of experts has a tensor per expert in the
  file, and one tensor for all in the model. The Trainer finds no tensor of that name, warns, and
  goes on with the experts that the model had.
* transformers' `DistributedConfig` has sharded the model (FSDP2, HSDP, experts). The Trainer
  writes such a model's weights, gathered, and refuses to write more. Here the optimizer's state is
  written too (`checkpoints/sharded_optimizer.py`), so such a run resumes, on the same ranks or on
  others.

Weights are read by `from_pretrained` into a second model, sharded as the first one: a rank reads
only its own rows. They are copied, and the second model is freed. It needs as much memory as the
model's weights, before the optimizer has any when a run resumes. For the few families whose rows
transformers would mix up (`model/sharding.py`) the second model is whole, on each rank's host.

Rejected: transformers' own function that loads into a model, which replaces the parameters that
FSDP2 and the optimizer refer to.
"""

import copy
import functools
import gc
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.conversion_mapping import get_model_conversion_mapping

from hf_flexseq.base.values import listed
from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.checkpoints.files import stored_tensors
from hf_flexseq.checkpoints.optimizer import (
    FOLDER,
    WHOLE,
    WHOLE_SCHEDULER,
    is_named,
    load_optimizer,
)
from hf_flexseq.checkpoints.sharded_optimizer import save_sharded_optimizer
from hf_flexseq.checkpoints.shards import read_own
from hf_flexseq.checkpoints.weight_files import files_by_tensor
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.model.facts import expert_counts
from hf_flexseq.hf.model.sharding import misplaced_parts, unsharded_class
from hf_flexseq.hf.trainer.whole_checkpoints import warn_without_optimizer
from hf_flexseq.steps.users_code import users_method_behind

logger = logging.getLogger(__name__)


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
                communicator,
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
    model = trainer.model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    load_optimizer(
        model,
        trainer.optimizer.optimizer,
        trainer.lr_scheduler,
        folder,
        communicator,
        numbered=numbered_names(trainer, model, trained),
    )


def numbered_names(trainer: Any, model: nn.Module, trained: Collection[str]) -> list[list[str]]:
    """Return the trained parameters of a whole model as a Trainer groups and numbers them on one
    process, those with weight decay first. trained: their names."""
    decayed = set(trainer.get_decay_parameter_names(model))
    names = [name for name, _ in model.named_parameters() if name in trained]
    return [
        [name for name in names if name in decayed],
        [name for name in names if name not in decayed],
    ]


# ---- weights, as transformers reads them


_READING = ("_load_from_checkpoint", "_load_best_model")


def is_read_by_transformers(trainer: Trainer) -> bool:
    """Tell if the weights of a trainer's checkpoints must be read as `from_pretrained` reads them.

    False where the Trainer reads them otherwise: adapters, accelerate's FSDP, DeepSpeed.
    """
    model = trainer.model
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return False
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        return False
    if is_sharded_at_load(trainer):
        return True
    if any(users_method_behind(trainer, name) for name in _READING):
        return False  # the user's own way is called
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def load_weights(
    model: PreTrainedModel,
    folder: str,
    communicator: Communicator,
    *,
    loader: type[PreTrainedModel] | None = None,
    **options: Any,
) -> None:
    """Read the weights of a checkpoint into the model. Collective over the world.

    loader: class of the second model, if it is another one than the model's.
    options: of its `from_pretrained`.
    Raises ValueError, on all ranks, when they are not the weights of this model.
    """
    gather = communicator.cpu_group.gather_values
    path = Path(folder)
    logger.info("loading the weights of %s", folder)
    with ErrorCapture() as looking:
        _check_kind(model, path)
        _check_shapes(model, path)
    looking.raise_on_all_ranks(gather, f"looking at the weights in {folder}")
    with ErrorCapture() as loading:
        _copy(_read(model, path, loader or unsharded_class(model), options), model, path)
    gc.collect()  # FSDP2's hooks refer to their modules, which would keep the second model
    loading.raise_on_all_ranks(gather, f"loading the weights in {folder}")


def _check_kind(model: PreTrainedModel, path: Path) -> None:
    """Raise ValueError for a checkpoint of adapters, or with another number of experts."""
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path} holds an adapter, but this run trains the whole model")
    if not (path / "config.json").is_file():
        return
    config = type(model.config).from_json_file(path / "config.json")
    found, _ = expert_counts(config.get_text_config())
    expected, _ = expert_counts(model.config.get_text_config())
    if found != expected:
        raise ValueError(f"{path} holds {found} experts in a layer, but this run has {expected}")


def _check_shapes(model: PreTrainedModel, path: Path) -> None:
    """Raise ValueError for a tensor of another shape than the model's of the same name."""
    own = model.state_dict()
    for name, stored in _stored(path, own):
        found = stored.get_shape()
        expected = list(own[name].shape)
        if found != expected:
            raise ValueError(f"{path} holds {name} as {found}, but this run has {expected}")


def _stored(path: Path, names: Any) -> Iterator[tuple[str, Any]]:
    """Return (name, slice of a safetensors file) of each tensor with one of some names."""
    files = {name: file for name, file in files_by_tensor(path).items() if name in names}
    return stored_tensors(path, files)


def _read(
    model: PreTrainedModel, path: Path, kind: type[PreTrainedModel], options: Mapping[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a second model with the weights of a checkpoint, and transformers' loading report. It
    is sharded as `model` is, unless transformers would mix up rows of it."""
    is_sharded = is_sharded_at_load(model)
    second, found = _second_model(model, path, kind, options, is_sharded=is_sharded)
    if is_sharded and misplaced_parts(second) is not None:
        del second
        second, found = _second_model(model, path, kind, options, is_sharded=False)
    return second, found


def _second_model(
    model: PreTrainedModel,
    path: Path,
    kind: type[PreTrainedModel],
    options: Mapping[str, Any],
    *,
    is_sharded: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a second model, and transformers' loading report. A sharded one uses the meshes of
    `model`: no process group is made."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # it computes nothing
    if is_sharded:
        options = {**options, "distributed_config": config.distributed_config}
        members = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "prepare_distribute_model": classmethod(_same_meshes(model)),
        }
        kind = type(kind.__name__, (kind,), members)
    try:
        return kind.from_pretrained(
            path,
            config=config,
            dtype=_dtype(model),
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **options,
        )
    except RuntimeError as error:
        # by the conversion of weights, in several lines
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} does not hold the weights of this model: {first}") from error


def _same_meshes(model: PreTrainedModel) -> Any:
    """Return a method that gives the meshes of `model` to another model."""

    def prepare_distribute_model(
        cls: type, distributed_config: Any, device_map: Any = None
    ) -> tuple[Any, torch.device, Any]:
        meshes = model._mesh_manager
        kind = meshes.get_mesh("fsdp").device_type
        device = torch.device(kind)
        if kind != "cpu":
            device = torch.device(kind, torch.accelerator.current_device_index())
        return distributed_config, device, meshes

    return prepare_distribute_model


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """Return a dtype that holds the values of all parameters of the model."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes)


def _copy(
    source: tuple[PreTrainedModel, dict[str, Any]], model: PreTrainedModel, path: Path
) -> None:
    """Copy a second model's weights into `model`, and from the checkpoint the tensors that the
    user has added to it. source: as `_read` returns it. Raises ValueError if some do not fit."""
    second, found = source
    own = model.state_dict()
    read = second.state_dict()
    added = own.keys() - read.keys()
    in_files = set(files_by_tensor(path)) if added else set()
    missing = set(found["missing_keys"]) | (added - in_files)
    if missing:
        raise ValueError(f"{path} has no {listed(sorted(missing))}, which this model has")
    unexpected = set(found["unexpected_keys"]) - added
    if unexpected:
        names = listed(sorted(unexpected))
        raise ValueError(f"{path} has {names}, which this model does not have")
    if found["mismatched_keys"]:
        names = listed(sorted(key[0] for key in found["mismatched_keys"]))
        raise ValueError(f"{path} holds {names} in other shapes than this model has")
    with torch.no_grad():
        for name in own.keys() & read.keys():
            if isinstance(read[name], DTensor):
                own[name].to_local().copy_(read[name].to_local())  # in the same places
            else:
                read_own(read[name], own[name])
        for name, stored in _stored(path, added):
            read_own(stored, own[name])
