"""The gradients of a step's micro-batches add up, and are reduced once where they can be.

DDP           with the last micro-batch; after it, in DDP's place, where ranks run different
              micro-batches and transfers are carried out in order
ZeRO, FSDP1   with every micro-batch: waiting would hold the whole model's gradients on every
              rank
FSDP2         as the step's memory allows (`sharding.py`)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.sharding import BeforeLast, SteppedFsdp, reduces_each_batch
from hf_flexseq.plan import Plan
from hf_flexseq.steps.reduction import reduced_once


class StepReduction:
    """Surrounds the steps of a model, and their micro-batches, by what reduces gradients."""

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        fsdp: SteppedFsdp,
        *,
        lockstep: bool,
    ) -> None:
        """lockstep: whether all ranks run every micro-batch together."""
        self._accelerator = accelerator
        self._communicator = communicator
        self._fsdp = fsdp
        self._lockstep = lockstep

    @contextmanager
    def of_step(
        self, plan: Plan, model: nn.Module
    ) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        """Surround a step; the block gets what surrounds each micro-batch but the last.

        model: as accelerate has wrapped it.
        """
        with self._in_place_of_ddp(model), self._fsdp.of_step(plan, model) as fsdp_before_last:
            yield partial(self._accumulating, model, fsdp_before_last)

    def _in_place_of_ddp(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Surround all micro-batches of a step by what reduces gradients in place of DDP, where
        ranks run different micro-batches and transfers are carried out in order."""
        if self._lockstep or not self._communicator.transport.capabilities.ordered:
            return nullcontext()
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return reduced_once(model, self._communicator)

    @contextmanager
    def _accumulating(self, model: nn.Module, fsdp_before_last: BeforeLast) -> Iterator[None]:
        """Surround a micro-batch that is not the step's last."""
        state = self._accelerator.gradient_state
        syncs = state.sync_gradients
        state._set_sync_gradients(False)  # DeepSpeed would step its optimizer otherwise
        try:
            with self._without_reduction(model), fsdp_before_last():
                yield
        finally:
            state._set_sync_gradients(syncs)

    def _without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which DDP keeps gradients local until its last micro-batch."""
        each = reduces_each_batch(self._accelerator)
        if each or not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[Any] = self._accelerator.no_sync(model)
        return context
