"""The optimizer's state of a pipeline, which a run on any number of stages can go on from.

    flexseq_optimizer/   torch.distributed.checkpoint, keyed by parameter names
    scheduler.pt         as the Trainer's

Every stage writes the state of its parameters under their global names, both copies of a tied tensor under one. A
stage reads what it has parameters for; a run without a pipeline reads everything. The other way round, the Trainer's
own `optimizer.pt` numbers parameters in the order of the whole model, decayed ones first: an empty twin of the model
says which number is which.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.hf.pipeline_engine import PipelineEngine
from hf_flexseq.pipeline.sharding import divided_like
from hf_flexseq.pipeline.stages import Stage

FOLDER = "flexseq_optimizer"
WHOLE = "optimizer.pt"
SCHEDULER = "scheduler.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(engine: PipelineEngine, optimizer: Any, scheduler: Any, folder: str) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world."""
    names = _other_names(engine.stage)
    state = get_optimizer_state_dict(engine.stage.stack.model, optimizer, options=_FLAT)
    named = {_renamed(key, names): value for key, value in state.items()}
    dcp.save(named, checkpoint_id=f"{folder}/{FOLDER}", process_group=engine.communicator.control)
    if engine.communicator.rank == 0:
        torch.save(scheduler.state_dict(), f"{folder}/{SCHEDULER}")


def is_of_pipeline(folder: str | None) -> bool:
    """Whether `folder` holds an optimizer's state that `save_optimizer` wrote."""
    return folder is not None and (Path(folder) / FOLDER).is_dir()


def load_optimizer(model: nn.Module, optimizer: Any, scheduler: Any, folder: str, stage: Stage | None = None) -> None:
    """The inverse of `save_optimizer`, for one of any number of stages, or without `stage` for a whole model.

    Raises for a state that lacks one of the parameters.
    """
    names = _other_names(stage) if stage is not None else {}
    state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    named = {_renamed(key, names): value for key, value in state.items()}
    dcp.load(named, checkpoint_id=f"{folder}/{FOLDER}", no_dist=True)
    found = {key: named[_renamed(key, names)] for key in state}
    set_optimizer_state_dict(model, optimizer, found, options=_FLAT)
    _load_scheduler(scheduler, folder)


def load_whole_optimizer(engine: PipelineEngine, trainer: Any, folder: str) -> None:
    """This stage's part of the state that a Trainer without a pipeline wrote. Collective over the world.

    Raises ValueError when that run trained other parameters.
    """
    optimizer = trainer.optimizer.optimizer
    saved = torch.load(Path(folder) / WHOLE, map_location="cpu", weights_only=True)
    names = _names_in_order(engine, trainer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(names) or len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder}/{WHOLE} has the state of {len(numbers)} parameters in {len(saved['param_groups'])} groups, but "
            f"this run trains {len(names)} in {len(optimizer.param_groups)}"
        )
    states = {name: saved["state"].get(number) for number, name in zip(numbers, names, strict=True)}
    optimizer.load_state_dict(_state_of_stage(engine.stage, optimizer, states, saved["param_groups"]))
    _load_scheduler(trainer.lr_scheduler, folder)


def _names_in_order(engine: PipelineEngine, trainer: Any) -> list[str]:
    """The whole model's trained parameters as the Trainer numbers them: those with weight decay, then the others."""
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
    """A state dict for `optimizer` from the states by global name, and the options of the saved groups."""
    name_of = {id(p): name for name, p in stage.global_parameters()}
    own = optimizer.state_dict()
    state = {}
    for of_optimizer, of_state in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(of_optimizer["params"], of_state["params"], strict=True):
            found = states[name_of[id(parameter)]]
            if found is not None:
                state[number] = {
                    key: divided_like(value, parameter) if isinstance(value, torch.Tensor) else value
                    for key, value in found.items()
                }
    options = [
        {**saved, "params": of_state["params"]} for saved, of_state in zip(groups, own["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": options}


def _load_scheduler(scheduler: Any, folder: str) -> None:
    scheduler.load_state_dict(torch.load(Path(folder) / SCHEDULER, weights_only=True))


def _other_names(stage: Stage) -> dict[str, str]:
    """Parameters of this stage that have another name in the whole model: the head that is a copy of the embedding."""
    tied = stage.tied_parameter()
    names = [name for name, p in stage.stack.model.named_parameters() if p is tied]
    return {name: stage.tied_name for name in names if stage.tied_name and name != stage.tied_name}


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """`state.<parameter>.exp_avg` or `param_groups.<parameter>.lr` with the parameter's other name."""
    for name, other in names.items():
        for prefix in ("state.", "param_groups."):
            if key.startswith(f"{prefix}{name}."):
                return prefix + other + key.removeprefix(prefix + name)
    return key
