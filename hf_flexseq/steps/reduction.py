"""Reduce the gradients of plain DDP once per step, in one place of the plan for all ranks.

DDP reduces in the backward of its last micro-batch. Where ranks run different micro-batches that
is another place of the plan on each: one rank is in an all-reduce while another one still waits
for its share in attention. On gloo both go on. A device that carries out one transfer after the
other would wait forever. So on an ordered transport

1. all micro-batches of a step run under `no_sync`, which leaves gradients local;
2. after the last micro-batch of the plan every rank comes to the same all-reduces, also a rank
   that had nothing to do in it. They average over the world as DDP does;
3. DDP is told that a step is over, so that it broadcasts buffers with the next forward, as after a
   reduction of its own. That is the first thing that any rank does in a step.

A parameter without a gradient takes part with zeros. Under `find_unused_parameters` one that no
rank has used keeps none, as with DDP: an optimizer would decay it otherwise. The ranks tell each
other over the host which parameters they have used.

Rejected: DDP's own reducer, told to reduce in a backward that all ranks run after the last
micro-batch. It needs one more forward of the model, and its overlap has nothing left to overlap
with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.reduction import sum_over


@contextmanager
def reduced_once(model: DistributedDataParallel, communicator: Communicator) -> Iterator[None]:
    """Surround all micro-batches of a step; afterwards gradients are averaged over the world.
    Collective over the world.

    Raises ValueError for a communication hook, which DDP alone can call.
    """
    if model._comm_hooks:
        raise ValueError(
            "a communication hook, registered on DDP after the engine was attached, needs ranks "
            "that run every micro-batch together: set sync='lockstep', or give it as "
            "DistributedDataParallelKwargs(comm_hook=...)"
        )
    with model.no_sync():
        yield
    average_gradients(model, communicator)
    model.require_forward_param_sync = True


def average_gradients(model: DistributedDataParallel, communicator: Communicator) -> None:
    """Replace every gradient by its mean over the world. Collective over the world."""
    parameters = _reduced_parameters(model)
    if model.find_unused_parameters:
        parameters = _used_anywhere(parameters, communicator)
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    everyone = communicator.open_world()
    assert everyone is not None, "a job with DDP has more than one rank"
    sum_over(everyone, gradients, factor=1 / communicator.world_size)


def _reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP would reduce, in an order that is the same on all
    ranks."""
    parameters = []
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            parameters.append(parameter)
    return parameters


def _used_anywhere(
    parameters: list[nn.Parameter], communicator: Communicator
) -> list[nn.Parameter]:
    """Return those parameters that have a gradient on some rank. Collective over the world."""
    has_gradient = [parameter.grad is not None for parameter in parameters]
    users = torch.tensor(has_gradient, dtype=torch.int64)  # [parameters], on the CPU
    communicator.host.all_reduce(users)
    used = []
    for parameter, count in zip(parameters, users.tolist(), strict=True):
        if count:
            used.append(parameter)
    return used
