"""An optimizer's state by the names of parameters, for runs on any number of ranks.

    flexseq_optimizer/   safetensors and JSON, and the scheduler's state: see `optimizer_files.py`

Ranks write different files of it (`write_optimizer`). A run reads the parameters that its rank
has, of each its own rows (`load_optimizer`). The `optimizer.pt` of a Trainer numbers parameters in
an order of the whole model, which the caller gives.

A state resumes completely or not at all. These are refused by name: a state of other parameters,
of another optimizer, of other shapes. A parameter that had no gradient yet has no state, which is
written down (`state.<parameter>` is null), so that nothing else is taken for it.

A checkpoint may come from anywhere, so no file is unpickled. `optimizer.pt` and `scheduler.pt` are
read as the Trainer reads them, by torch's restricted reader (`weights_only=True`).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_flexseq.base.values import listed
from hf_flexseq.checkpoints.files import clear, write_json, write_tensors
from hf_flexseq.checkpoints.optimizer_files import (
    SCHEDULER,
    WRITTEN,
    SavedState,
    check_plain,
    is_plain,
    named_state,
    numbered_state,
    parameters_of,
    write_index,
)
from hf_flexseq.checkpoints.shards import read_own
from hf_flexseq.distributed.agreement import ErrorCapture, Gather
from hf_flexseq.distributed.communicator import Communicator

FOLDER = "flexseq_optimizer"
WHOLE = "optimizer.pt"
WHOLE_SCHEDULER = "scheduler.pt"
# A scheduler's values by group of parameters, and the options of the group that have them.
_RATES = {"_last_lr": "lr", "base_lrs": "initial_lr"}
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# ---- the state of a run


def state_of(model: nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer's own tensors, and its other values, both by key.

    Raises ValueError for a value that cannot be saved.
    """
    tensors = {}
    values: dict[str, Any] = {}
    for key, value in _flat_state(model, optimizer).items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value.detach()
        else:
            check_plain(key, value)
            values[key] = value
    keys = [*tensors, *values]
    for name in parameters_of(keys) - _with_state(keys):
        values[f"state.{name}"] = None
    return tensors, values


def _flat_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the flat state. An optimizer without any gets the state after a step without
    gradients."""
    with _without_empty_groups(optimizer):
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return state


@contextmanager
def _without_empty_groups(optimizer: Any) -> Iterator[None]:
    """Hide groups without parameters from torch, which reads the first parameter of each. The
    Trainer makes one for parameters without weight decay, of which LoRA has none."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        others = iter(optimizer.param_groups)  # loading a state replaces them
        optimizer.param_groups = [next(others) if group["params"] else group for group in groups]


def _with_state(keys: Iterable[str]) -> set[str]:
    """Return the names of the parameters that have a state among some keys, or a part of one."""
    keys = list(keys)
    names = parameters_of(keys)
    found = set()
    for key in keys:
        if key.startswith("state."):
            found.add(_parameter_of(key, names))
    return found


def _parameter_of(key: str, names: Collection[str]) -> str:
    """Return the parameter that a key such as `state.<parameter>.exp_avg` is of; "" for none of
    `names`. A state may have levels of its own."""
    name = key.removeprefix("state.").rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


# ---- writing


def write_optimizer(
    folder: str,
    parts: Iterable[tuple[str, Mapping[str, torch.Tensor]]],
    values: Mapping[str, Any],
    scheduler: Any,
    communicator: Communicator,
) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world.

    parts: the files that this rank writes, with their tensors by key, each whole. Taking the next
        one may be collective, so it goes on when a rank could not write.
    values: all other values that this rank adds, by key.
    """
    path = Path(folder) / FOLDER
    gather = communicator.cpu_group.gather_values

    # 1. the folder is there, and empty of what is old
    with ErrorCapture() as clearing:
        if communicator.rank == 0:
            clear(path, WRITTEN)
    clearing.raise_on_all_ranks(gather, f"clearing {path}")

    # 2. tensors, in files of different ranks
    files: dict[str, str] = {}
    writing = ErrorCapture()
    for file, tensors in parts:
        with writing:
            if writing.error is None:
                _write_part(path / file, tensors)
                files.update(dict.fromkeys(tensors, file))
    writing.raise_on_all_ranks(gather, f"writing {path}")
    written = gather((files, dict(values)))

    # 3. the index, when all files are there
    with ErrorCapture() as indexing:
        if communicator.rank == 0:
            all_files: dict[str, str] = {}
            all_values: dict[str, Any] = {}
            for files_of_rank, values_of_rank in written:
                all_files.update(files_of_rank)
                all_values.update(values_of_rank)
            _save_scheduler(scheduler.state_dict(), Path(folder))
            write_index(path, all_files, all_values)
    indexing.raise_on_all_ranks(gather, f"writing the index of {path}")


def _write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file of the state. Raises ValueError without the folder that rank 0 has made."""
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent}: all ranks must write to one folder")
    write_tensors(path, tensors)


def _save_scheduler(state: dict[str, Any], folder: Path) -> None:
    """Write the scheduler's state: as the Trainer does where JSON cannot hold it."""
    if is_plain(state):
        write_json(folder / FOLDER / SCHEDULER, state)
    else:
        torch.save(state, folder / WHOLE_SCHEDULER)


# ---- reading


def is_named(folder: str | None) -> bool:
    """Tell if a checkpoint holds an optimizer's state by names."""
    return folder is not None and (Path(folder) / FOLDER).is_dir()


def load_optimizer(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    folder: str,
    communicator: Communicator,
    *,
    numbered: Sequence[Sequence[str]] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Read the state of the parameters that this rank trains, and the scheduler's. Collective over
    the world.

    Args:
        model: With the rank's own part of each parameter.
        optimizer: Of these parameters. A state that it has already is overwritten.
        scheduler: Of the learning rate.
        folder: A checkpoint that `write_optimizer` has written to.
        communicator: Of the ranks that train the parameters together.
        numbered: For a checkpoint of a Trainer, which numbers parameters in `optimizer.pt`: names
            of all its parameters, by group, in the order of their numbers.
        renamed: The names in the whole model of parameters that have another one here.

    Raises ValueError, on all ranks, when the state is not of the parameters that all ranks train
    together, or of another optimizer.
    """
    renamed = renamed or {}
    gather = communicator.cpu_group.gather_values
    with ErrorCapture() as opening:
        if numbered is None:
            saved = named_state(Path(folder) / FOLDER)
        else:
            saved = numbered_state(Path(folder) / WHOLE, numbered)
        optimizer.zero_grad(set_to_none=True)  # torch makes a state only without gradients
        state = _flat_state(model, optimizer)
    opening.raise_on_all_ranks(gather, f"opening the optimizer's state in {folder}")

    own_key_of = {renamed_key(own_key, renamed): own_key for own_key in state}
    _check_fits(saved.keys(), own_key_of, gather, folder)
    with ErrorCapture() as reading:
        _read(saved, state, own_key_of, folder)
        with _without_empty_groups(optimizer):
            set_optimizer_state_dict(model, optimizer, state, options=_FLAT)
        _forget(model, optimizer, saved.keys(), renamed)
        _load_scheduler(scheduler, optimizer, folder)
    reading.raise_on_all_ranks(gather, f"reading the optimizer's state in {folder}")


def renamed_key(key: str, names: Mapping[str, str]) -> str:
    """Return a key such as `state.<parameter>.exp_avg` with the parameter's other name."""
    for name, other in names.items():
        for prefix in ("state.", "param_groups."):
            if key == prefix + name or key.startswith(f"{prefix}{name}."):
                return prefix + other + key.removeprefix(prefix + name)
    return key


def _check_fits(
    known: Collection[str], keys: Collection[str], gather: Gather, folder: str
) -> None:
    """Raise ValueError unless a state with the keys `known` is of the parameters that all ranks
    train, and has exactly this rank's `keys` of them. Every rank raises for the same names."""
    own = parameters_of(keys)
    stateless = {name for name in own if f"state.{name}" in known}
    missing = {
        key for key in keys if key not in known and _parameter_of(key, own) not in stateless
    }
    surplus = set()
    for key in known:
        if key.startswith("state.") and key not in keys and _parameter_of(key, own):
            surplus.add(key)
    trained = set().union(*gather(sorted(own)))
    missing = set().union(*gather(sorted(missing)))
    surplus = set().union(*gather(sorted(surplus)))
    of_saved = parameters_of(known)
    lacking = trained - of_saved
    others = of_saved - trained
    if lacking:
        names = listed(sorted(lacking))
        raise ValueError(f"{folder} has no optimizer state of {names}, which this run trains")
    if others:
        names = listed(sorted(others))
        raise ValueError(f"{folder} has optimizer state of {names}, which this run does not train")
    if missing:
        raise ValueError(f"{folder} has no {listed(sorted(missing))}: it is of another optimizer")
    if surplus:
        raise ValueError(f"{folder} has {listed(sorted(surplus))}: it is of another optimizer")


def _read(
    saved: SavedState,
    state: dict[str, Any],
    own_key_of: Mapping[str, str],
    folder: str,
) -> None:
    """Fill the optimizer's own `state` with the saved one. own_key_of: saved key -> key of
    `state`. Raises ValueError for a value of another kind or shape."""
    known = saved.keys()
    tensors = []
    for key, own_key in own_key_of.items():
        if key not in known:
            continue  # of a parameter without a state
        if isinstance(state[own_key], torch.Tensor):
            tensors.append(key)
        else:
            value = saved.value(key)  # JSON has no tuples
            state[own_key] = tuple(value) if isinstance(state[own_key], tuple) else value
    with torch.no_grad():
        for key, stored in saved.tensors(tensors):
            own = state[own_key_of[key]]
            found = _shape_of(stored)
            if found != list(own.shape):
                expected = list(own.shape)
                raise ValueError(f"{folder} holds {key} as {found}, but this run has {expected}")
            read_own(stored, own)  # into the memory of the optimizer's own


def _forget(
    model: nn.Module, optimizer: Any, known: Collection[str], renamed: Mapping[str, str]
) -> None:
    """Leave parameters without a state that had none when a state with the keys `known` was
    saved, since they had no gradient yet."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if f"state.{renamed.get(name, name)}" in known:
            optimizer.state.pop(parameter, None)


def _shape_of(stored: Any) -> list[int]:
    """Return the shape of a tensor, or of a safetensors slice."""
    return list(stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape())


def _load_scheduler(scheduler: Any, optimizer: Any, folder: str) -> None:
    """Read the scheduler's state, in either form, when the optimizer has its own. Raises
    ValueError without any."""
    own = Path(folder) / FOLDER / SCHEDULER
    other = Path(folder) / WHOLE_SCHEDULER
    if own.is_file():
        state = json.loads(own.read_text(encoding="utf-8"))
    elif other.is_file():
        state = torch.load(other, weights_only=True)  # noqa: TID251
    else:
        raise ValueError(f"{folder} has the optimizer's state, but none of the scheduler's")
    scheduler.load_state_dict(_for_groups(state, optimizer.param_groups, folder))


def _for_groups(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], folder: str
) -> dict[str, Any]:
    """Return a scheduler's state for as many groups as the optimizer has: the Trainer makes a
    group for every mesh. Raises ValueError for a value that differs by group and is not a
    learning rate."""
    saved = len(state.get("_last_lr", groups))
    if saved == len(groups):
        return dict(state)
    fitting = {}
    for key, value in state.items():
        if key in _RATES:
            value = [group[_RATES[key]] for group in groups]
        elif isinstance(value, list) and len(value) == saved:
            if any(part != value[0] for part in value):
                raise ValueError(
                    f"{folder} has a scheduler for {saved} groups of parameters, which differ in "
                    f"{key}, but this run has {len(groups)}"
                )
            value = value[:1] * len(groups)
        fitting[key] = value
    return fitting
