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

_BUCKET_BYTES = 64 * 2**20


def sum_gradients(stage: Stage, neighbours: Neighbours) -> None:
    """Make every gradient of this stage that of the whole step. Collective over the world."""
    parameters = [
        p for p in stage.stack.model.parameters() if p.requires_grad and not isinstance(p, DTensor)
    ]
    if neighbours.replicas is not None:
        for bucket in _buckets(parameters):
            _all_reduce(bucket, neighbours.replicas)
    tied = stage.tied_parameter()
    if tied is not None and tied.requires_grad:
        _all_reduce([tied], neighbours.ends)


def _all_reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local(p.grad) for p in parameters]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbouring parameters of one dtype, up to a bucket's bytes."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        parameter_bytes = parameter.numel() * parameter.element_size()
        if bucket and (
            bucket[0].dtype != parameter.dtype or size + parameter_bytes > _BUCKET_BYTES
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter_bytes
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
    """The norm of all stages' gradients together, a tied tensor's once. Collective over the world.

    counts: whether this rank's gradients count: those of one replica do, and all shares of sharded
    ones.
    """
    other = stage.tied_parameter() if stage.is_last else None
    gradients = [
        local(p.grad)
        for p in stage.stack.model.parameters()
        if p.grad is not None and p is not other
    ]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients and counts else torch.zeros(())
    square = norm.to(next(stage.stack.model.parameters()).device, torch.float64).square()
    dist.all_reduce(square, group=parent)
    return square.sqrt()
