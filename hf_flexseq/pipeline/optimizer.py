"""The optimizer's state of a pipeline, from which a run on any number of stages can resume.

Every stage writes the state of its parameters under their global names, by one of its ranks, in
the format of `checkpoints/optimizer.py`. The state of a tied tensor is written by the first stage,
and both copies read it. A stage reads the state of its own parameters; a run without a pipeline
reads everything. The other way round, the Trainer's own `optimizer.pt` numbers parameters in an
order of the whole model, which the caller knows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hf_flexseq.checkpoints.optimizer import (
    load_optimizer,
    renamed_key,
    state_of,
    write_optimizer,
)
from hf_flexseq.checkpoints.optimizer_files import TENSORS
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.pipeline.checkpoint import StageMember


def save_stage_optimizer(member: StageMember, optimizer: Any, scheduler: Any, folder: str) -> None:
    """Write the optimizer's and the scheduler's state. Collective over the world."""
    stage = member.stage
    tensors, values = _owned_state(member, optimizer)
    parts = []
    if member.writes:
        parts.append((TENSORS.format(part=stage.index + 1, parts=stage.count), tensors))
    write_optimizer(folder, parts, values, scheduler, member.communicator)


def _owned_state(
    member: StageMember, optimizer: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the stage's tensors, each whole, and its other values, both by global key.

    All ranks of the stage but its first get two empty dicts. Collective over the ranks of a stage
    that share its parameters. Raises ValueError for a value that cannot be saved.
    """
    stage = member.stage
    names = stage.renamed()
    copied = None if stage.second_copy is None else stage.tied_name  # the first stage writes it
    own_tensors, own_values = state_of(stage.stack.model, optimizer)
    tensors = {}
    values = {}
    for own_key, tensor in own_tensors.items():
        gathered = whole(tensor)  # [rows / ranks, ...] -> [rows, ...] where sharded
        key = renamed_key(own_key, names)
        if member.writes and not _is_of(copied, key):
            # A gathered tensor leaves the device, which has no room for the stage twice.
            tensors[key] = gathered.cpu() if member.is_sharded else gathered
    for own_key, value in own_values.items():
        key = renamed_key(own_key, names)
        if member.writes and not _is_of(copied, key):
            values[key] = value
    return tensors, values


def _is_of(parameter: str | None, key: str) -> bool:
    """Tell if a key is of a parameter."""
    if parameter is None:
        return False
    return f"{key}.".startswith((f"state.{parameter}.", f"param_groups.{parameter}."))


def load_stage_optimizer(
    member: StageMember,
    optimizer: Any,
    scheduler: Any,
    folder: str,
    numbered: Sequence[Sequence[str]] | None = None,
) -> None:
    """Read the state of the stage's parameters. Collective over the world.

    numbered: for a file in which a Trainer numbered its parameters: see `load_optimizer`.
    """
    load_optimizer(
        member.stage.stack.model,
        optimizer,
        scheduler,
        folder,
        member.communicator,
        numbered=numbered,
        renamed=member.stage.renamed(),
    )


def trained_names(member: StageMember) -> set[str]:
    """Return the global names of all stages' trained parameters. Collective over the world."""
    own = [name for name, p in member.stage.global_parameters() if p.requires_grad]
    return set().union(*member.communicator.cpu_group.gather_values(own))
