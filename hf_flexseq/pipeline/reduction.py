"""Gradients of a step, summed once after its last backward.

    over replicas    ranks with the same stage and different sequences: one all-reduce per bucket
                     of parameters
    over copies      a tied tensor's two copies, on the first and the last stage

Once and at the end, because replicas may run different numbers of chunks, which the hooks of DDP
do not allow. A parameter that got no gradient counts as zero, so that all ranks walk through the
same buckets. Sharded parameters have been summed over replicas before (`sharding.py`); their
copies are divided alike, so that shares add up.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.pipeline.sharding import local
from hf_flexseq.pipeline.stages import Stage

BUCKET_BYTES = 64 * 2**20  # gradients per all-reduce: large messages, and little memory for a copy


def sum_gradients(stage: Stage, neighbours: Neighbours) -> None:
    """Make every gradient of this stage that of the whole step. Collective over the world."""
    # 1. over replicas
    whole_parameters = []
    for parameter in stage.stack.model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            whole_parameters.append(parameter)
    if neighbours.replicas is not None:
        for bucket in _buckets(whole_parameters):
            _all_reduce(bucket, neighbours.replicas)
    # 2. over the two copies of a tied tensor
    tied = stage.tied_parameter()
    if tied is not None and tied.requires_grad:
        _all_reduce([tied], neighbours.ends)


def _all_reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the parameters' gradients over the group, in place. Collective over the group."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    # gradients of any shapes -> [elements of all]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(summed.view_as(gradient))  # [elements] -> the gradient's shape


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield neighbouring parameters of one dtype, up to `BUCKET_BYTES` together."""
    bucket: list[nn.Parameter] = []
    bucket_bytes = 0
    for parameter in parameters:
        parameter_bytes = parameter.numel() * parameter.element_size()
        is_full = bucket_bytes + parameter_bytes > BUCKET_BYTES
        if bucket and (is_full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(parameter)
        bucket_bytes += parameter_bytes
    if bucket:
        yield bucket


def equalise(stage: Stage, neighbours: Neighbours) -> None:
    """Give replicas of a stage, and the two copies of a tied tensor, the same values: those of the
    first rank that has them. Collective over the world."""
    if neighbours.replicas is not None:
        for tensor in (*stage.stack.model.parameters(), *stage.stack.model.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=neighbours.replicas)
    tied = stage.tied_parameter()
    if tied is not None:
        dist.broadcast(tied.detach(), group_src=0, group=neighbours.ends)


def gradient_norm(stage: Stage, parent: dist.ProcessGroup, *, counts: bool) -> torch.Tensor:
    """Return the norm, a scalar in float64, of all stages' gradients together, a tied tensor's
    counted once. Collective over the world.

    counts: whether this rank's gradients count: those of one replica do, and all shares of sharded
        ones
    """
    # The first stage counts the tied tensor.
    second_copy = stage.tied_parameter() if stage.is_last else None
    gradients = []
    for parameter in stage.stack.model.parameters():
        if parameter.grad is not None and parameter is not second_copy:
            gradients.append(local(parameter.grad))
    norm = torch.zeros(())
    if gradients and counts:
        norm = torch.nn.utils.get_total_norm(gradients)
    device = next(stage.stack.model.parameters()).device
    square = norm.to(device, torch.float64).square()
    dist.all_reduce(square, group=parent)
    return square.sqrt()
