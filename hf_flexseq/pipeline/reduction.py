"""Gradients of a step, summed once after its last backward.

    over replicas    ranks with the same stage and different sequences: one all-reduce per bucket
                     of them (`distributed/reduction.py`)
    over copies      a tied tensor's two copies, on the first and the last stage

Once and at the end, because replicas may run different numbers of chunks, which the hooks of DDP
do not allow. A parameter that got no gradient counts as zero, so all ranks walk through the same
buckets. Sharded parameters have been summed over replicas before (`sharding.py`); their copies are
divided alike, so shares add up.
"""

import torch
from torch.distributed.tensor import DTensor

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.distributed.reduction import local, sum_gradients
from hf_flexseq.pipeline.stages import Stage


def reduce_gradients(stage: Stage, neighbours: Neighbours) -> None:
    """Make every gradient of this stage cover the whole step. Collective over the world."""
    # 1. over replicas
    whole_parameters = []
    for parameter in stage.stack.model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            whole_parameters.append(parameter)
    if neighbours.replicas is not None:
        sum_gradients(whole_parameters, neighbours.replicas)
    # 2. over the two copies of a tied tensor
    tied = stage.tied_parameter()
    if tied is not None and tied.requires_grad:
        assert neighbours.ends is not None, "copies of a tensor are on the ends of a pipeline"
        sum_gradients([tied], neighbours.ends)


def equalise(stage: Stage, neighbours: Neighbours) -> None:
    """Give all replicas of a stage, and both copies of a tied tensor, the values of the first rank
    that has them. Collective over the world."""
    if neighbours.replicas is not None:
        for tensor in (*stage.stack.model.parameters(), *stage.stack.model.buffers()):
            neighbours.replicas.broadcast(tensor.detach())
    tied = stage.tied_parameter()
    if tied is not None:
        assert neighbours.ends is not None, "copies of a tensor are on the ends of a pipeline"
        neighbours.ends.broadcast(tied.detach())


def gradient_norm(stage: Stage, communicator: Communicator, *, counts: bool) -> torch.Tensor:
    """Return the norm, a scalar in float64, of all stages' gradients, a tied tensor's once.
    Collective over the world. counts: True if this rank's gradients count: of one replica, or a
    share."""
    second_copy = stage.second_copy  # the first stage counts it
    gradients = []
    for parameter in stage.stack.model.parameters():
        if parameter.grad is not None and parameter is not second_copy:
            gradients.append(local(parameter.grad))
    norm = torch.zeros(())
    if gradients and counts:
        norm = torch.nn.utils.get_total_norm(gradients)
    device = next(stage.stack.model.parameters()).device
    square = norm.to(device, torch.float64).square()
    communicator.all_reduce(square)
    return square.sqrt()
