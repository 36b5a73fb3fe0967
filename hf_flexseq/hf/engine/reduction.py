"""The gradients of a step's micro-batches add up, and are reduced once where they can be.

DDP           with the last micro-batch; after it, instead of DDP, where ranks run different
              micro-batches and transfers are carried out in order (`instead_of_ddp`)
ZeRO, FSDP1   with every micro-batch: waiting would hold the whole model's gradients on every
              rank
FSDP2         as the step's memory allows (`sharding.py`)
adapters      on a model that transformers has sharded: on experts that are spread over ranks,
              after the last micro-batch (`model/expert_adapters.py`), and so in a loop of the
              user's on other layers, which every rank has whole; the Trainer reduces these itself

DDP reduces in the backward of its last micro-batch. If ranks run different micro-batches, one rank
is in an all-reduce while another still waits for its share in attention. On gloo both continue. A
device that carries out one transfer after the other would wait forever. So on an ordered transport

1. all micro-batches of a step run under `no_sync`, which leaves gradients local;
2. after the last micro-batch of the plan every rank, even one without work in it, comes to the
   same all-reduces. They average over the world as DDP does;
3. DDP broadcasts buffers with the next forward, as after a reduction of its own. That is the first
   exchange of any rank in a step.

A parameter without a gradient takes part with zeros. Under `find_unused_parameters` one that no
rank has used keeps none, as with DDP: an optimizer would decay it otherwise. The ranks tell each
other over the host which parameters they have used.

A step without images leaves the tower of a vision-language model unused on all ranks, for which
DDP would wait. Without `find_unused_parameters` such a step is reduced in the same way, on any
transport, and the tower keeps no gradients.

DDP reduces the parameters that were trained when it was made. Once others are, because some were
frozen or unfrozen since, steps are reduced in the same way. FSDP2 looks at the flags itself.

Rejected: DDP's own reducer, in a backward that all ranks run after the last micro-batch. It needs
one more forward of the model, and has nothing left to overlap with.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.reduction import averaged_gradients, sum_gradients
from hf_flexseq.hf.engine.model_planning import ModelPlanning
from hf_flexseq.hf.model.sharding import reduces_each_batch
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches

if TYPE_CHECKING:
    from hf_flexseq.hf.model.expert_adapters import ExpertAdapters  # which needs PEFT

OF_TRAINER = "_replicated_grad_hook_registered"  # on a parameter whose gradient it averages


class GradientReduction:
    """Surrounds a model's steps and their micro-batches with contexts that reduce gradients."""

    def __init__(self, planning: ModelPlanning, adapters: "ExpertAdapters | None") -> None:
        """planning: of the model. adapters: on experts that are spread over ranks."""
        self._planning = planning
        self._accelerator = planning.setup.accelerator
        self._communicator = planning.setup.communicator
        self._adapters = adapters

    @contextmanager
    def of_step(
        self, step: RankMicroBatches, model: nn.Module, *, leaves_tower_out: bool
    ) -> Iterator[BeforeLast]:
        """Surround a step; the block gets the surroundings of each micro-batch but the last.
        leaves_tower_out: True for a step without images of a model that has a tower."""
        cost = self._planning.cost_of(step.number)
        held_tokens = step.drawn.facts.held_tokens
        with (
            self._adapters_averaged(),
            self._whole_parameters_averaged(model),
            self._all_micro_batches(model, leaves_tower_out=leaves_tower_out),
            self._planning.fsdp.of_step(step.plan, model, cost, held_tokens) as fsdp_before_last,
        ):
            yield partial(self._accumulating, model, fsdp_before_last)

    def _adapters_averaged(self) -> AbstractContextManager[None]:
        """Return a context for a step, after which gradients of adapters on spread experts are
        reduced, for the optimizers that accelerate has prepared."""
        if self._adapters is None:
            return nullcontext()
        for optimizer in self._accelerator._optimizers:
            self._adapters.put_into(optimizer)
        return self._adapters.averaged()

    def _whole_parameters_averaged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for a step, after which gradients of `whole_parameters` are reduced."""
        parameters = []
        for parameter in whole_parameters(model):
            if not hasattr(parameter, OF_TRAINER):
                parameters.append(parameter)
        if not parameters:
            return nullcontext()
        everyone = self._communicator.open_world()
        return averaged_gradients(parameters, everyone, self._communicator.world_size)

    def _all_micro_batches(
        self, model: nn.Module, *, leaves_tower_out: bool
    ) -> AbstractContextManager[Any]:
        """Return a context for all micro-batches of a step. Raises NotImplementedError for
        parameters frozen or unfrozen under a wrapper that has to reduce them itself."""
        is_ddp = isinstance(model, DistributedDataParallel)
        kind = self._accelerator.distributed_type
        is_fsdp1 = kind == DistributedType.FSDP and not self._accelerator.is_fsdp2
        is_fixed = model._comm_hooks if is_ddp else is_fsdp1 or kind == DistributedType.DEEPSPEED
        if not is_ddp and not is_fixed:
            return nullcontext()
        has_changed = _trains_others(model)
        if has_changed and is_fixed:
            raise NotImplementedError(
                "parameters were frozen or unfrozen after the model was prepared, as DeepSpeed, "
                "FSDP1 and a hook of DDP do not allow: leave requires_grad as it was, or use FSDP2"
            )
        if not is_ddp:
            return nullcontext()
        is_ordered = self._communicator.transport.capabilities.ordered
        takes_all = not model.find_unused_parameters and not model._comm_hooks
        is_partial = has_changed or (leaves_tower_out and takes_all)
        if is_partial or (is_ordered and not self._planning.lockstep):
            return instead_of_ddp(model, self._communicator, used_alone=is_partial)
        return nullcontext()

    @contextmanager
    def _accumulating(self, model: nn.Module, fsdp_before_last: BeforeLast) -> Iterator[None]:
        """Surround a micro-batch that is not the step's last."""
        # DeepSpeed would step its optimizer otherwise
        accumulates = Patch(self._accelerator.gradient_state, sync_gradients=False)
        with accumulates, self._without_reduction(model), fsdp_before_last():
            yield

    def _without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which DDP keeps gradients local until its last micro-batch."""
        each = reduces_each_batch(self._accelerator)
        if each or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[Any] = self._accelerator.no_sync(model)
        return context


def note_trained(model: nn.Module) -> None:
    """Note which parameters of a model are trained, before it is wrapped."""
    _flags_before[model] = _flags_of(model)


def _trains_others(model: nn.Module) -> bool:
    """Return True if other parameters may be trained than a wrapper reduces: than in its first
    step, and for DDP than when it was made. Of that torch tells their number and bytes alone."""
    flags = _flags_of(model)
    if model not in _first_flags:
        _first_flags[model] = flags
        if isinstance(model, DistributedDataParallel):
            known = model._get_ddp_logging_data()
            trained = [one.nbytes for one in model.parameters() if one.requires_grad]
            sizes = (known["num_parameter_tensors"], known["total_parameter_size_bytes"])
            is_same = flags == _flags_before.get(model.module, flags)
            if sizes != (len(trained), sum(trained)) or not is_same:
                _first_flags[model] = []  # no step is as DDP was made
    return flags != _first_flags[model]


def _flags_of(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


_Flags = WeakKeyDictionary[nn.Module, list[bool]]
_flags_before: _Flags = WeakKeyDictionary()  # of models, when they were attached
_first_flags: _Flags = WeakKeyDictionary()  # of wrapped models, in their first step


def whole_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that every rank has whole, of a model that transformers has
    sharded: the parameters of adapters."""
    if not is_sharded_at_load(model):
        return []
    found = []
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter.data, DTensor):
            found.append(parameter)
    return found


@contextmanager
def instead_of_ddp(
    model: DistributedDataParallel, communicator: Communicator, *, used_alone: bool = False
) -> Iterator[None]:
    """Surround a step; afterwards gradients are averaged over the world. Collective over the
    world. used_alone: see `average_gradients`. Raises ValueError for a communication hook, which
    DDP alone can call."""
    if model._comm_hooks:
        raise ValueError(
            "a communication hook, registered on DDP after the engine was attached, needs ranks "
            "that run every micro-batch together: set sync='lockstep', or give it as "
            "DistributedDataParallelKwargs(comm_hook=...)"
        )
    with model.no_sync():
        yield
    average_gradients(model, communicator, used_alone=used_alone)
    model.require_forward_param_sync = True


def average_gradients(
    model: DistributedDataParallel, communicator: Communicator, *, used_alone: bool = False
) -> None:
    """Replace every gradient by its mean over the world. Collective over the world. used_alone:
    True if parameters that no rank has used are left without one, as under
    `find_unused_parameters`."""
    parameters = _reduced_parameters(model)
    if used_alone or model.find_unused_parameters:
        parameters = _used_anywhere(parameters, communicator)
    everyone = communicator.open_world()
    assert everyone is not None, "a job with DDP has more than one rank"
    sum_gradients(parameters, everyone, divisor=communicator.world_size)


def _reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP would reduce, in the same order on all ranks."""
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
    communicator.cpu_group.all_reduce(users)
    used = []
    for parameter, count in zip(parameters, users.tolist(), strict=True):
        if count:
            used.append(parameter)
    return used
