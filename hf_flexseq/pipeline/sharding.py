"""FSDP2 over the ranks of one stage: between steps each of them holds a share of every parameter.

    unshard    all parameters of the stage are gathered, once, before the first action
    actions    as without FSDP2: gradients of whole parameters add up, on every rank for the chunks
               that it runs
    reduce     after the last backward and the last weight gradient each parameter's gradient is
               summed over the ranks, and every rank keeps its share

FSDP2's own hooks gather and reduce around every forward and backward. Replicas may run different
numbers of chunks, so that they would wait for each other for ever, and a weight gradient that is
put off would come after its reduction. The hooks are therefore told to leave everything as it is.
The optimizer's state and a copy of the parameters remain sharded; during a step parameters and
gradients of the stage are whole on each of its ranks.

Rejected: letting FSDP2 reduce in the last backward. Nothing public starts its reduction without a
backward, a replica without a chunk has none, and one that lacks a gradient would join in with
fewer bytes than the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from hf_flexseq.pipeline.stages import Stage


class ShardedStage:
    """The parameters of a stage, sharded over the ranks of a group. Make the optimizer
    afterwards."""

    __slots__ = ("_mesh", "_model", "_units")

    def __init__(self, stage: Stage, group: dist.ProcessGroup) -> None:
        """Shard in place; all ranks of the group must hold the same values.

        Units are the layers, the embedding, the norm and the head, so that the class of the model
        itself stays what it is.
        """
        stack = stage.stack
        self._model = stack.model
        device = next(self._model.parameters()).device
        self._mesh = DeviceMesh.from_group(group, device.type)
        self._units: list[FSDPModule] = []
        for module in (stack.embedding, *stage.own_layers.values(), stack.norm, stack.head):
            if next(module.parameters(), None) is not None:
                self._units.append(self._shard(module))

    def _shard(self, module: nn.Module) -> FSDPModule:
        """Shard the module's parameters, with hooks that neither gather nor reduce."""
        unit = fully_shard(module, mesh=self._mesh, reshard_after_forward=False)
        unit.set_requires_gradient_sync(False)
        unit.set_reshard_after_backward(False)
        return unit

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank all of the stage's parameters inside this block. Collective over the
        group when it begins."""
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Give every rank all of the stage's parameters inside this block, and afterwards its
        share of the gradients' sums over the group, added to the gradients that are there.
        Collective over the group when it begins and when it ends."""
        with self.whole():
            yield
            gradients = self._take_gradients()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                gradient = self._reduce(gradients.pop(name), parameter)
                if parameter.grad is not None:
                    gradient = parameter.grad + gradient
                parameter.grad = gradient

    def _take_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the whole parameters by name, and take them off the
        parameters."""
        gradients = {}
        for name, parameter in self._model.named_parameters():
            gradients[name] = parameter.grad
            parameter.grad = None
        return gradients

    def _reduce(self, gradient: torch.Tensor | None, parameter: nn.Parameter) -> DTensor:
        """Return this rank's share of the gradient's sum over the group. A rank that got no
        gradient takes part with zeros. Collective over the group."""
        assert isinstance(parameter, DTensor), "a parameter that no unit has sharded"
        if gradient is None:
            gradient = torch.zeros(
                parameter.shape, dtype=parameter.dtype, device=self._mesh.device_type
            )
        partial = DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False)
        # on each rank: the whole shape -> shape[0] / ranks of the group, and all other dimensions
        return partial.redistribute(placements=parameter.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank holds of a tensor, which may be sharded: [rows / ranks, ...],
    sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all rows of a tensor, which may be sharded: [rows, ...]. Collective over the ranks
    that share it, if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, of which every rank has all [rows, ...], sharded as `model` is. Moves
    nothing; a tensor of another shape than `model` stays whole."""
    if not isinstance(model, DTensor) or tensor.shape != model.shape:
        return tensor
    return distribute_tensor(
        tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None
    )
