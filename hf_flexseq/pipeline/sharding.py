"""FSDP2 over the ranks of one stage: between steps each of them holds a share of every parameter.

    unshard    all parameters of the stage are gathered, once, before the first action
    actions    as without FSDP2: gradients of whole parameters add up, on every rank for the chunks
               that it runs
    reduce     after the last backward and the last weight gradient gradients are summed over the
               ranks, bucket by bucket, and every rank keeps its share

FSDP2's own hooks gather and reduce around every forward and backward. Replicas may run different
numbers of chunks, and would wait for each other forever; a postponed weight gradient would come
after its reduction. So the hooks are disabled. The optimizer's state and a copy of the parameters
remain sharded; during a step parameters and gradients of the stage are whole on each of its ranks.

With mixed precision parameters are gathered in 16 bits, and hidden states have 16 bits. The shares
of the optimizer, and all gradients, keep the parameters' dtype. A chunk's gradients of embedding,
norms and head are rounded to 16 bits before they are added; gradients of the layers' Linears are
not (`weights.py`).

Rejected: FSDP2's own sum in a wider dtype, in hooks that a postponed weight gradient misses;
reducing parameter by parameter, a message for each; and FSDP2's reduction in the last backward,
which a replica without a chunk does not have.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_flexseq.distributed.reduction import buckets, local
from hf_flexseq.pipeline.stages import Stage


class ShardedStage:
    """Parameters of a stage, sharded over the ranks of a group. Make the optimizer afterwards."""

    def __init__(
        self, stage: Stage, group: dist.ProcessGroup, *, param_dtype: torch.dtype | None = None
    ) -> None:
        """Shard in place; all ranks of the group must hold the same values.

        param_dtype: of the parameters while they are whole; None for their own

        Units are the layers, the embedding, the norm and the head, so the class of the model
        itself does not change.
        """
        stack = stage.stack
        self._model = stack.model
        self._group = group
        device = next(self._model.parameters()).device
        mesh = DeviceMesh.from_group(group, device.type)
        # No other dtype is needed: FSDP2 reduces nothing, and inputs have the parameters' dtype.
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
        self._units: list[FSDPModule] = []
        for module in (stack.embedding, *stage.own_layers.values(), stack.norm, stack.head):
            if next(module.parameters(), None) is not None:
                self._units.append(_shard(module, mesh, policy))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all of the stage's parameters inside the block. Collective over the group."""
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Gather all of the stage's parameters inside this block; afterwards add this rank's share
        of the gradients' sums. Collective over the group when it begins and when it ends."""
        shares = dict(self._model.named_parameters())
        with self.whole():
            for name, parameter in self._model.named_parameters():
                parameter.grad_dtype = shares[name].dtype
            yield
            gradients = self._take_gradients()
        names = {parameter: name for name, parameter in shares.items()}
        trained = [parameter for parameter in names if parameter.requires_grad]
        for bucket in buckets(trained):
            # popped, so that a bucket's whole gradients go with it
            self._reduce(bucket, [gradients.pop(names[parameter]) for parameter in bucket])

    def _take_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the whole parameters by name, and remove them."""
        gradients = {}
        for name, parameter in self._model.named_parameters():
            gradients[name] = parameter.grad
            parameter.grad = None
        return gradients

    def _reduce(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Add this rank's shares of the sums of whole gradients, None for zeros, to the
        parameters' own. Collective over the group."""
        # 1. one row for every rank: its shares of all gradients, padded to equal lengths
        ranks = self._group.size()
        sizes = [_largest_share(parameter, ranks) for parameter in parameters]
        flat = torch.zeros(
            ranks, sum(sizes), dtype=parameters[0].dtype, device=local(parameters[0]).device
        )
        columns = flat.split(sizes, dim=1)  # [ranks, elements of the largest share] each
        for column, gradient in zip(columns, gradients, strict=True):
            if gradient is not None:
                # [rows, ...] -> [rows / ranks, ...], of which the last ones may lack rows
                for row, share in zip(column, gradient.chunk(ranks), strict=False):
                    row[: share.numel()] = share.reshape(-1)

        # 2. [ranks, elements] -> [elements]
        own = torch.empty_like(flat[0])
        dist.reduce_scatter_tensor(own, flat.view(-1), group=self._group)

        # 3. [elements of the largest share] -> this rank's [rows / ranks, ...]
        for parameter, elements in zip(parameters, own.split(sizes), strict=True):
            share = local(parameter)
            _add_share(parameter, elements[: share.numel()].view(share.shape))


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    """Shard the module's parameters, with hooks that neither gather nor reduce."""
    unit = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    unit.set_requires_gradient_sync(False)
    unit.set_reshard_after_backward(False)
    return unit


def _largest_share(parameter: nn.Parameter, ranks: int) -> int:
    """Return the elements of the largest share that one of `ranks` ranks has of a parameter."""
    assert isinstance(parameter, DTensor), "a parameter that no unit has sharded"
    assert parameter.placements == (Shard(0),), f"a parameter sharded as {parameter.placements}"
    rows = -(-parameter.shape[0] // ranks)
    return rows * (parameter.numel() // parameter.shape[0])


def _add_share(parameter: nn.Parameter, share: torch.Tensor) -> None:
    """Add this rank's share [rows / ranks, ...] of a gradient to a sharded parameter's `grad`."""
    assert isinstance(parameter, DTensor), "a parameter that no unit has sharded"
    gradient = DTensor.from_local(
        share,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    if parameter.grad is not None:
        gradient = parameter.grad + gradient
    parameter.grad = gradient
