"""The optimizer's state of a pipeline, which a run on any number of stages can go on from.

    flexseq_optimizer/   safetensors and JSON, keyed by parameter names: see `optimizer_files.py`
    scheduler.pt         as the Trainer's

Every stage writes the state of its parameters under their global names, by one of its ranks. The
state of a tied tensor is written by the first stage, and both copies read it. A stage reads what
it has parameters for; a run without a pipeline reads everything. The other way round, the
Trainer's own `optimizer.pt` numbers parameters in the order of the whole model, decayed ones
first: an empty twin of the model says which number is which.

No file is unpickled: a checkpoint may come from anywhere.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.hf.pipeline.engine import PipelineEngine
from hf_flexseq.pipeline.optimizer_files import (
    TENSORS,
    SavedState,
    check_plain,
    clear,
    parameters_of,
    write_index,
    write_tensors,
)
from hf_flexseq.pipeline.sharding import divided_like, whole
from hf_flexseq.pipeline.stages import Stage

FOLDER = "flexseq_optimizer"
WHOLE = "optimizer.pt"
SCHEDULER = "scheduler.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(engine: PipelineEngine, optimizer: Any, scheduler: Any, folder: str) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world."""
    path = Path(folder) / FOLDER
    stage = engine.stage
    rank = engine.communicator.rank
    tensors, values = _owned_state(engine, optimizer)

    # 1. the folder is there, and empty of what is old
    if rank == 0:
        clear(path)
    dist.barrier(group=engine.communicator.control)

    # 2. each stage's tensors, in a file of their own
    file = TENSORS.format(part=stage.index + 1, parts=stage.count)
    if tensors:
        write_tensors(path, file, tensors)
    files = dict.fromkeys(tensors, file)
    written = gather_objects(engine.communicator, (files, values))

    # 3. the index, when all files are there
    if rank == 0:
        all_files: dict[str, str] = {}
        all_values: dict[str, Any] = {}
        for files_of_rank, values_of_rank in written:
            all_files.update(files_of_rank)
            all_values.update(values_of_rank)
        write_index(path, all_files, all_values)
        torch.save(scheduler.state_dict(), f"{folder}/{SCHEDULER}")
    dist.barrier(group=engine.communicator.control)


def _owned_state(
    engine: PipelineEngine, optimizer: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the stage's tensors, each whole, and its other values, both by global key.

    All ranks of the stage but its first get two empty dicts. Collective over the ranks of a stage
    that share its parameters. Raises ValueError for a value that cannot be saved.
    """
    stage = engine.stage
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
            if engine.place == 0:
                # A gathered tensor leaves the device, which has no room for the stage twice.
                tensors[key] = tensor if engine.sharded is None else tensor.cpu()
        else:
            check_plain(key, value)  # on every rank, since the others would wait for one alone
            if engine.place == 0:
                values[key] = value
    return tensors, values


def is_of_pipeline(folder: str | None) -> bool:
    """Whether `folder` holds an optimizer's state that `save_optimizer` wrote."""
    return folder is not None and (Path(folder) / FOLDER).is_dir()


def load_optimizer(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    folder: str,
    engine: PipelineEngine | None = None,
) -> None:
    """Read what `save_optimizer` wrote, for `engine`'s stage, or for a whole model without it.

    The number of stages may differ from that of the run that wrote. Collective over the world of
    `engine`. Raises ValueError, naming the parameters, when the state is of other parameters than
    this run trains.
    """
    saved = SavedState(Path(folder) / FOLDER)
    names = _other_names(engine.stage) if engine is not None else {}
    state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    own_key_of = {_renamed(own_key, names): own_key for own_key in state}
    _check_same_parameters(saved, own_key_of, engine, folder)

    # 1. tensors, into the memory of the optimizer's own
    is_tensor = {key: isinstance(state[own], torch.Tensor) for key, own in own_key_of.items()}
    wanted = [key for key in own_key_of if is_tensor[key]]
    with torch.no_grad():
        for key, tensor in saved.tensors(wanted):
            own = state[own_key_of[key]]
            if tensor.shape != own.shape:
                found, expected = list(tensor.shape), list(own.shape)
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
    saved: SavedState, keys: Collection[str], engine: PipelineEngine | None, folder: str
) -> None:
    """Raise ValueError unless the state is of the parameters that this run trains, and has `keys`.

    All stages together count as this run. Collective over the world of `engine`; every rank raises
    for the same parameters.
    """
    trained = parameters_of(keys)
    if engine is not None:
        trained = set().union(*gather_objects(engine.communicator, trained))
    known = saved.keys()
    of_saved = parameters_of(known)
    lacking = trained - of_saved
    surplus = of_saved - trained
    if lacking:
        names = _listed(lacking)
        raise ValueError(f"{folder} has no optimizer state of {names}, which this run trains")
    if surplus:
        names = _listed(surplus)
        raise ValueError(f"{folder} has optimizer state of {names}, which this run does not train")
    missing = {key for key in keys if key not in known}
    if missing:
        raise ValueError(f"{folder} has no {_listed(missing)}: it is of another optimizer")


def _listed(names: Collection[str], most: int = 3) -> str:
    """Return the first names, and how many others there are, on one line."""
    first = ", ".join(sorted(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} others"


def load_whole_optimizer(engine: PipelineEngine, trainer: Any, folder: str) -> None:
    """This stage's part of the state that a Trainer without a pipeline wrote. Collective over the
    world.

    Raises ValueError when that run trained other parameters.
    """
    optimizer = trainer.optimizer.optimizer
    saved = torch.load(Path(folder) / WHOLE, map_location="cpu", weights_only=True)
    names = _names_in_order(engine, trainer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(names) or len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder}/{WHOLE} has the state of {len(numbers)} parameters in "
            f"{len(saved['param_groups'])} groups, but "
            f"this run trains {len(names)} in {len(optimizer.param_groups)}"
        )
    states = {
        name: saved["state"].get(number) for number, name in zip(numbers, names, strict=True)
    }
    optimizer.load_state_dict(
        _state_of_stage(engine.stage, optimizer, states, saved["param_groups"])
    )
    _load_scheduler(trainer.lr_scheduler, folder)


def _names_in_order(engine: PipelineEngine, trainer: Any) -> list[str]:
    """The whole model's trained parameters as the Trainer numbers them: those with weight decay,
    then the others."""
    own = [name for name, p in engine.stage.global_parameters() if p.requires_grad]
    trained = {name for names in gather_objects(engine.communicator, own) for name in names}
    with torch.device("meta"):
        twin = type(trainer.model)(trainer.model.config)
    names = [name for name, _ in twin.named_parameters() if name in trained]
    decayed = set(trainer.get_decay_parameter_names(twin))
    return sorted(names, key=lambda name: name not in decayed)  # stable


def _state_of_stage(
    stage: Stage, optimizer: Any, states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state dict for `optimizer` from the states by global name, and the options of the saved
    groups."""
    name_of = {id(p): name for name, p in stage.global_parameters()}
    own = optimizer.state_dict()
    state = {}
    for of_optimizer, of_state in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(of_optimizer["params"], of_state["params"], strict=True):
            found = states[name_of[id(parameter)]]
            if found is not None:
                state[number] = {
                    key: divided_like(value, parameter)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in found.items()
                }
    options = [
        {**saved, "params": of_state["params"]}
        for saved, of_state in zip(groups, own["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": options}


def _load_scheduler(scheduler: Any, folder: str) -> None:
    scheduler.load_state_dict(torch.load(Path(folder) / SCHEDULER, weights_only=True))


def _other_names(stage: Stage) -> dict[str, str]:
    """Parameters of this stage that have another name in the whole model: the head that is a copy
    of the embedding."""
    tied = stage.tied_parameter()
    names = [name for name, p in stage.stack.model.named_parameters() if p is tied]
    return {name: stage.tied_name for name in names if stage.tied_name and name != stage.tied_name}


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """`state.<parameter>.exp_avg` or `param_groups.<parameter>.lr` with the parameter's other
    name."""
    for name, other in names.items():
        for prefix in ("state.", "param_groups."):
            if key.startswith(f"{prefix}{name}."):
                return prefix + other + key.removeprefix(prefix + name)
    return key
