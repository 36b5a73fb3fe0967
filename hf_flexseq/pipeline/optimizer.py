"""The optimizer's state of a pipeline, from which a run on any number of stages can resume.

    flexseq_optimizer/   safetensors and JSON, keyed by parameter names, and the scheduler's state:
                         see `optimizer_files.py`

Every stage writes the state of its parameters under their global names, by one of its ranks. The
state of a tied tensor is written by the first stage, and both copies read it. A stage reads what
it has parameters for; a run without a pipeline reads everything. The other way round, the
Trainer's own `optimizer.pt` numbers parameters in an order of the whole model, which the caller
knows.

A checkpoint may come from anywhere, so no file is unpickled. `optimizer.pt` and `scheduler.pt` are
read as the Trainer reads them, by torch's restricted reader (`weights_only=True`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
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
from hf_flexseq.pipeline.checkpoint import StageMember
from hf_flexseq.pipeline.files import write_json, write_tensors
from hf_flexseq.pipeline.optimizer_files import (
    SCHEDULER,
    TENSORS,
    SavedState,
    check_plain,
    clear,
    is_plain,
    parameters_of,
    write_index,
)
from hf_flexseq.pipeline.sharding import divided_like, whole
from hf_flexseq.pipeline.stages import Stage

FOLDER = "flexseq_optimizer"
WHOLE = "optimizer.pt"
WHOLE_SCHEDULER = "scheduler.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# ---- writing


def save_optimizer(member: StageMember, optimizer: Any, scheduler: Any, folder: str) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world."""
    path = Path(folder) / FOLDER
    stage = member.stage
    communicator = member.communicator
    tensors, values = _owned_state(member, optimizer)

    # 1. the folder is there, and empty of what is old
    if communicator.rank == 0:
        clear(path)
    communicator.cpu_group.barrier()

    # 2. each stage's tensors, in a file of their own
    file = TENSORS.format(part=stage.index + 1, parts=stage.count)
    if tensors:
        write_tensors(path / file, tensors)
    files = dict.fromkeys(tensors, file)
    written = communicator.cpu_group.gather_values((files, values))

    # 3. the index, when all files are there
    if communicator.rank == 0:
        all_files: dict[str, str] = {}
        all_values: dict[str, Any] = {}
        for files_of_rank, values_of_rank in written:
            all_files.update(files_of_rank)
            all_values.update(values_of_rank)
        _save_scheduler(scheduler.state_dict(), Path(folder))
        write_index(path, all_files, all_values)
    communicator.cpu_group.barrier()


def _save_scheduler(state: dict[str, Any], folder: Path) -> None:
    """Write the scheduler's state: as the Trainer does where JSON cannot hold it."""
    if is_plain(state):
        write_json(folder / FOLDER / SCHEDULER, state)
    else:
        torch.save(state, folder / WHOLE_SCHEDULER)


def _owned_state(
    member: StageMember, optimizer: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the stage's tensors, each whole, and its other values, both by global key.

    All ranks of the stage but its first get two empty dicts. Collective over the ranks of a stage
    that share its parameters. Raises ValueError for a value that cannot be saved.
    """
    stage = member.stage
    names = _other_names(stage)
    copied = stage.tied_name if stage.is_last else None  # the first stage writes it
    state = get_optimizer_state_dict(stage.stack.model, optimizer, options=_FLAT)
    tensors = {}
    values = {}
    for own_key, value in state.items():
        key = _renamed(own_key, names)
        if copied is not None and key.startswith((f"state.{copied}.", f"param_groups.{copied}.")):
            continue
        if isinstance(value, torch.Tensor):
            tensor = whole(value.detach())  # [rows / ranks, ...] -> [rows, ...] where sharded
            if member.writes:
                # A gathered tensor leaves the device, which has no room for the stage twice.
                tensors[key] = tensor.cpu() if member.is_sharded else tensor
        else:
            check_plain(key, value)  # on every rank, since the others would wait for one alone
            if member.writes:
                values[key] = value
    return tensors, values


# ---- reading what a pipeline wrote


def is_of_pipeline(folder: str | None) -> bool:
    """Tell if `folder` holds an optimizer's state that `save_optimizer` wrote."""
    return folder is not None and (Path(folder) / FOLDER).is_dir()


def load_optimizer(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    folder: str,
    member: StageMember | None = None,
) -> None:
    """Read what `save_optimizer` wrote, for `member`'s stage, or for a whole model without it.

    The number of stages may differ from that of the run that wrote. Collective over the world of
    `member`. Raises ValueError, naming the parameters, when the state is of other parameters than
    this run trains.
    """
    saved = SavedState(Path(folder) / FOLDER)
    names = {} if member is None else _other_names(member.stage)
    state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    own_key_of = {_renamed(own_key, names): own_key for own_key in state}
    _check_same_parameters(saved, own_key_of, member, folder)

    # 1. tensors, into the memory of the optimizer's own
    is_tensor = {key: isinstance(state[own], torch.Tensor) for key, own in own_key_of.items()}
    wanted = [key for key in own_key_of if is_tensor[key]]
    with torch.no_grad():
        for key, tensor in saved.tensors(wanted):
            own = state[own_key_of[key]]
            if tensor.shape != own.shape:
                found = list(tensor.shape)
                expected = list(own.shape)
                raise ValueError(f"{folder} holds {key} as {found}, but this run has {expected}")
            own.copy_(divided_like(tensor, own))  # [rows, ...] -> [rows / ranks, ...]

    # 2. other values; JSON has no tuples
    for key, own_key in own_key_of.items():
        if not is_tensor[key]:
            value = saved.value(key)
            state[own_key] = tuple(value) if isinstance(state[own_key], tuple) else value
    set_optimizer_state_dict(model, optimizer, state, options=_FLAT)
    _load_scheduler(scheduler, folder)


def _check_same_parameters(
    saved: SavedState, keys: Collection[str], member: StageMember | None, folder: str
) -> None:
    """Raise ValueError unless the state is of the parameters that all stages train, and has
    `keys`. Collective over the world of `member`; every rank raises for the same parameters."""
    trained = parameters_of(keys)
    known = saved.keys()
    missing = {key for key in keys if key not in known}
    if member is not None:
        trained = set().union(*member.communicator.cpu_group.gather_values(sorted(trained)))
        missing = set().union(*member.communicator.cpu_group.gather_values(sorted(missing)))
    of_saved = parameters_of(known)
    lacking = trained - of_saved
    surplus = of_saved - trained
    if lacking:
        names = listed(sorted(lacking))
        raise ValueError(f"{folder} has no optimizer state of {names}, which this run trains")
    if surplus:
        names = listed(sorted(surplus))
        raise ValueError(f"{folder} has optimizer state of {names}, which this run does not train")
    if missing:
        raise ValueError(f"{folder} has no {listed(sorted(missing))}: it is of another optimizer")


# ---- reading what a Trainer without a pipeline wrote


def load_whole_optimizer(
    stage: Stage, optimizer: Any, scheduler: Any, folder: str, names: Sequence[str]
) -> None:
    """Read this stage's part of the state that a Trainer without a pipeline wrote.

    names: the whole model's trained parameters, in the order in which that Trainer numbers them.
    Raises ValueError when that run trained other parameters.
    """
    path = Path(folder) / WHOLE
    saved = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    groups = saved["param_groups"]
    numbers = []
    for group in groups:
        numbers += group["params"]
    if len(numbers) != len(names) or len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder}/{WHOLE} has the state of {len(numbers)} parameters in {len(groups)} "
            f"groups, but this run trains {len(names)} in {len(optimizer.param_groups)}"
        )
    states = {}
    for number, name in zip(numbers, names, strict=True):
        states[name] = saved["state"].get(number)  # None before its first gradient
    optimizer.load_state_dict(_state_of_stage(stage, optimizer, states, groups))
    _load_scheduler(scheduler, folder)


def trained_names(member: StageMember) -> set[str]:
    """Return the global names of all stages' trained parameters. Collective over the world."""
    own = [name for name, p in member.stage.global_parameters() if p.requires_grad]
    return set().union(*member.communicator.cpu_group.gather_values(own))


def _state_of_stage(
    stage: Stage, optimizer: Any, states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict for `optimizer`.

    states: of each parameter by its global name; None for one without a state.
    groups: as saved; their options are taken over.
    """
    name_of = {id(parameter): name for name, parameter in stage.global_parameters()}
    own = optimizer.state_dict()
    state = {}
    options = []
    for group, own_group, saved_group in zip(
        optimizer.param_groups, own["param_groups"], groups, strict=True
    ):
        options.append({**saved_group, "params": own_group["params"]})
        for parameter, number in zip(group["params"], own_group["params"], strict=True):
            values = states[name_of[id(parameter)]]
            if values is None:
                continue
            divided = {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    value = divided_like(value, parameter)  # [rows, ...] -> [rows / ranks, ...]
                divided[key] = value
            state[number] = divided
    return {"state": state, "param_groups": options}


def _load_scheduler(scheduler: Any, folder: str) -> None:
    """Read the scheduler's state, in either form."""
    own = Path(folder) / FOLDER / SCHEDULER
    if own.is_file():
        scheduler.load_state_dict(json.loads(own.read_text(encoding="utf-8")))
    else:
        state = torch.load(Path(folder) / WHOLE_SCHEDULER, weights_only=True)  # noqa: TID251
        scheduler.load_state_dict(state)


# ---- names


def _other_names(stage: Stage) -> dict[str, str]:
    """Return the global names of parameters renamed here: the head that copies the embedding."""
    tied = stage.tied_parameter()
    if tied is None or not stage.tied_name:
        return {}
    names = [name for name, p in stage.stack.model.named_parameters() if p is tied]
    return {name: stage.tied_name for name in names if name != stage.tied_name}


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """Return a key such as `state.<parameter>.exp_avg` with the parameter's other name."""
    for name, other in names.items():
        for prefix in ("state.", "param_groups."):
            if key.startswith(f"{prefix}{name}."):
                return prefix + other + key.removeprefix(prefix + name)
    return key
