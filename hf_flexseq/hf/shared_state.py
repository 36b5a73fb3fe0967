"""Find out whether the data of a run may depend on how far its training has come.

With `lookahead` above 0 samples are drawn some steps before they are trained on. A dataset, a
collator or a sampler that reads the training state would read an older state than under the plain
Trainer. `shared_with_training` looks for two ways to such a state:

* The data refer to the trainer, its state, its control, a callback, or the model that is trained.
* A callback of the user's, or an attribute of the user's trainer, refers to an object that the
  data refer to as well, and may change it while the data are drawn. A callback that asks for
  `train_dataloader`, or for a trainer's `train_dataset`, can do the same.

Random numbers of torch are such a state, too: dropout, the loader of an evaluation and random data
draw from one generator.

Objects are followed through attributes, containers, closures, bound methods and partials, up to a
number of objects, without running the user's code (`reachable.py`). State in globals of a module,
attributes of a class, files or the clock is not found.
"""

import functools
import logging
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.dataset_checks import draws_random_numbers
from hf_flexseq.hf.loaders import LoaderProxy
from hf_flexseq.hf.reachable import Reached, reachable
from hf_flexseq.steps.screen import beside_bars
from hf_flexseq.steps.users_code import is_known, package

logger = logging.getLogger(__name__)

_TRAINING = (Trainer, TrainerState, TrainerControl, TrainerCallback)

# Objects that lead to others and cannot be changed themselves.
_PASSAGES = (
    tuple,
    frozenset,
    functools.partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    weakref.ReferenceType,
)

# Methods of a callback that run before the first sample is drawn, or after the last one.
_NOT_WHILE_TRAINING = ("__init__", "on_init_end", "on_train_begin", "on_train_end")

# How a callback's code can get at the data without keeping a reference to them.
_NAMES_OF_DATA = ("train_dataloader", "train_dataset", "data_collator")


def draws_in_place(trainer: Trainer, dataloader: Any, communicator: Communicator) -> bool:
    """Decide if steps must be drawn when they run, because the data of some rank may depend on
    training; log why. Collective over the world."""
    found = shared_with_training(trainer, dataloader)
    random = draws_random_numbers(trainer, dataloader)
    if found is None and random is not None:
        found = f"{random} draws from torch's random numbers, as dropout and evaluations do"
    findings = communicator.cpu_group.gather_values(found)
    for rank, finding in enumerate(findings):
        if finding is None:
            continue
        if communicator.rank == 0:
            with beside_bars():
                logger.warning(
                    "the data may depend on how far training has come (rank %d: %s): steps are "
                    "drawn when they run, as with lookahead=0, and planning is no longer hidden "
                    "behind training",
                    rank,
                    finding,
                )
        return True
    return False


def shared_with_training(trainer: Trainer, dataloader: Any) -> str | None:
    """Return in words how the data that a trainer draws may depend on its training, or None."""
    model_parts = _parts_of_model(trainer)

    def is_of_training(value: Any) -> bool:
        return _kind_of_training(value, model_parts) is not None

    def ends(value: Any) -> bool:
        return is_of_training(value) and not issubclass(type(value), TrainerCallback)

    # 1. the data refer to the training
    of_data: dict[int, Reached] = {}
    for name, root in _data_roots(dataloader):
        for reached in reachable(root, name, ends=is_of_training):
            kind = _kind_of_training(reached.value, model_parts)
            if kind is not None:
                return f"{reached.path} is {kind}"
            of_data.setdefault(id(reached.value), reached)

    # 2. the user's code refers to both
    without = _evaluation_sets(trainer)
    for name, root in _training_roots(trainer):
        asked = _asked_for(root) if issubclass(type(root), TrainerCallback) else None
        if asked is not None:
            return f"{name}.{asked}"
        for reached in reachable(root, name, ends=ends, without=without):
            known = of_data.get(id(reached.value))
            if known is not None and _can_change(reached.value):
                return f"{reached.path} is {known.path}"
    return None


def _data_roots(dataloader: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a dataloader makes its batches of, with names for messages."""
    while isinstance(dataloader, LoaderProxy):
        dataloader = dataloader.dataloader
    if not isinstance(dataloader, DataLoader):
        yield "train_dataloader", dataloader
        return
    yield "train_dataset", dataloader.dataset
    yield "data_collator", dataloader.collate_fn
    yield "sampler", dataloader.sampler
    yield "batch_sampler", dataloader.batch_sampler
    yield "worker_init_fn", dataloader.worker_init_fn


def _training_roots(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the user's own objects that run while a trainer trains, with names for messages."""
    for callback in trainer.callback_handler.callbacks:
        if not is_known(type(callback)):
            yield type(callback).__name__, callback
    known: set[str] = set()
    for cls in type(trainer).__mro__:
        if is_known(cls):
            known |= _names_in_class(cls)
    for name, value in vars(trainer).items():
        if name not in known:
            yield f"{type(trainer).__name__}.{name}", value


def _evaluation_sets(trainer: Trainer) -> set[int]:
    """Return the ids of evaluation datasets, which may be cut from the training data's source."""
    given = trainer.eval_dataset
    datasets = given.values() if isinstance(given, dict) else [given]
    return {id(dataset) for dataset in datasets if dataset is not trainer.train_dataset}


def _parts_of_model(trainer: Trainer) -> set[int]:
    """Return the ids of all modules and parameters that a trainer trains."""
    parts: set[int] = set()
    for model in (trainer.model, trainer.model_wrapped):
        if isinstance(model, nn.Module):
            parts.update(map(id, model.modules()))
            parts.update(map(id, model.parameters()))
    return parts


def _kind_of_training(value: Any, model_parts: set[int]) -> str | None:
    """Return what an object of the training state is; None for any other object."""
    if id(value) in model_parts:
        return "a part of the model that is trained"
    if issubclass(type(value), _TRAINING):
        return f"a {type(value).__name__}"
    return None


def _can_change(value: Any) -> bool:
    """Tell if an object can be changed in place; the inside of the datasets library cannot."""
    if issubclass(type(value), types.FunctionType):
        return bool(value.__dict__)  # attributes of a function
    if issubclass(type(value), _PASSAGES):
        return False
    return not _is_inside_datasets(type(value))


def _is_inside_datasets(cls: type) -> bool:
    is_dataset = cls.__name__ in ("Dataset", "IterableDataset")
    return package(cls) == "datasets" and not is_dataset


# ---- code


def _asked_for(callback: TrainerCallback) -> str | None:
    """Return how a callback asks for the data while training runs; None if it does not."""
    for cls in type(callback).__mro__:
        if is_known(cls):
            continue
        for name, member in vars(cls).items():
            if name in _NOT_WHILE_TRAINING or not isinstance(member, types.FunctionType):
                continue
            asked = _names_in_code(member.__code__) & set(_NAMES_OF_DATA)
            if asked:
                return f"{name} asks for {min(asked)}"
    return None


def _names_in_class(cls: type) -> set[str]:
    """Return the names of attributes in the code of a class."""
    names: set[str] = set()
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, types.FunctionType):
            names |= _names_in_code(function.__code__)
    return names


def _names_in_code(code: types.CodeType) -> set[str]:
    """Return the names, arguments and short texts in code, and in the functions inside it."""
    names = {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in_code(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names
