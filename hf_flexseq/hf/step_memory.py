"""What becomes of a training step in which a rank runs out of memory.

What a rank holds in a micro-batch is bounded by `max_tokens_per_rank`, or by the memory model.
Where that was too much, the error gets a note with what the micro-batch held and what to set
(`out_of_memory.py`).

With `auto_find_batch_size=True` the cap is lowered as well, to `SHARE` of what the fullest rank
held in that micro-batch. The step keeps its sequences:

    one process      gradients, random numbers and counts of the attempt are put back; the step and
                     all that were drawn ahead are planned anew, and the step runs again
    several ranks    the cap is written into `output_dir`, and the rank ends with its error; the
                     others end as they do when a rank is lost. Every later start of the run reads
                     the cap, and goes on from a checkpoint

A loss on whole samples does so on one process, too: what its trainer has computed and counted
between the passes of a step cannot be put back.

Rejected: to go on with several ranks. Others are in the middle of exchanges with this one, those
of attention, DDP or FSDP2, and torch can take none of them back: NCCL can only abort a group, and
DDP and FSDP2 would be left between two states. Where all groups have one rank, under DDP, a rank
could tell the others before the last micro-batch. That would cost every step an exchange, and the
last micro-batch, in which DDP reduces, could still fail.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import Trainer

from hf_flexseq.checkpoints.files import write_json
from hf_flexseq.checkpoints.manifest import read_object
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.out_of_memory import CAP, RanOut, add_note, is_out_of_memory
from hf_flexseq.hf.trainer_numbers import TrainerNumbers
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.prefetch import Step
from hf_flexseq.steps.random_numbers import random_states, set_random_states
from hf_flexseq.steps.step_items import StepItem

logger = logging.getLogger(__name__)

RECORD = "flexseq_memory.json"
"""The file in `output_dir` with the lowered cap."""


class StepMemory:
    """Surrounds the steps of a Trainer. With `auto_find_batch_size` it lowers the cap of plans
    where memory runs out."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer
        self._engine = engine
        self._lowers = False

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Surround training. The Trainer itself would answer by smaller batches."""
        args = self._trainer.args
        self._lowers = args.auto_find_batch_size
        args.auto_find_batch_size = False
        try:
            yield
        finally:
            args.auto_find_batch_size = self._lowers

    def take_recorded(self) -> None:
        """Begin with the cap that earlier starts of the run have left. Collective over the world.
        Raises ValueError for a file that is not ours."""
        if not self._lowers:
            return
        cpu_group = self._engine.communicator.cpu_group
        own: int | None = None
        with ErrorCapture() as reading:
            own = _recorded(self._record)
        reading.raise_on_all_ranks(cpu_group.gather_values, f"reading {RECORD}")
        caps = [cap for cap in cpu_group.gather_values(own) if cap is not None]
        if not caps:
            return
        self._engine.whole_model.lower_cap(min(caps))
        if self._engine.communicator.rank == 0:
            logger.warning(
                "a rank gets at most %s tokens in a micro-batch, as %s says, since memory has run "
                "out before; remove the file to begin with a higher cap again",
                f"{min(caps):,}",
                self._record,
            )

    @property
    def _record(self) -> Path:
        return Path(self._trainer.args.output_dir) / RECORD

    def run(
        self, model: nn.Module, inputs: Any, run_step: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run a step, and once more as long as memory runs out in it and the step can run again;
        then `inputs` have the step with its new plan. Return its loss, a scalar.

        Raises PlanInfeasible if a sequence fits under no lower cap.
        """
        before = None
        if self._may_run_again(inputs):
            before = _Before(self._trainer, model)
        while True:
            try:
                return run_step()
            except RuntimeError as error:
                ran_out = self._judged(error, before)
                if ran_out is None:
                    raise
            # the error, which refers to what the step has computed, is gone
            assert before is not None, "the step can run again"
            inputs.step = self._planned_again(inputs.step, ran_out)
            before.restore()

    def _may_run_again(self, inputs: Any) -> bool:
        """Tell if a step can run again: in one process, whose model nothing has wrapped."""
        if not self._lowers or not isinstance(inputs, StepItem) or inputs.step is None:
            return False
        is_alone = self._trainer.accelerator.distributed_type == DistributedType.NO
        return is_alone and self._engine.communicator.world_size == 1

    def _judged(self, error: RuntimeError, before: "_Before | None") -> RanOut | None:
        """Return where memory ran out if the step is to run again; else add to the error what to
        do, and return None. before: None if the step cannot run again."""
        if not is_out_of_memory(error):
            return None
        ran_out = RanOut.of(self._engine.executor, self._engine.running)
        if not self._lowers or ran_out is None or not ran_out.lowered:
            add_note(error, self._engine.executor, self._engine.running)
            return None
        if before is None or not before.can_restore():
            error.add_note(self._left_to_next_start(ran_out))
            return None
        return ran_out

    def _left_to_next_start(self, ran_out: RanOut) -> str:
        """Write a lowered cap; return what happened and what follows."""
        problem = self._written(ran_out.lowered)
        line = (
            f"{ran_out}; the next start of this run lowers the cap from {ran_out.cap:,} to "
            f"{ran_out.lowered:,} tokens, as {self._record} says: go on from the newest checkpoint"
        )
        if problem is not None:
            line = f"{ran_out}; set {CAP}={ran_out.lowered}, which could not be noted: {problem}"
        logger.error("%s", line)
        return line

    def _planned_again(self, step: Step, ran_out: RanOut) -> Step:
        """Return a step that has failed, under a lower cap."""
        assert isinstance(step, RankMicroBatches), "pipelines are refused"
        step.forget()
        # Autograd keeps the graph of a backward that has failed until the next one.
        torch.zeros((), requires_grad=True).mul(1).backward()
        clear_device_cache(garbage_collection=True)  # errors and frames refer to each other
        self._engine.whole_model.lower_cap(ran_out.lowered)
        try:
            again = self._engine.plan_again(step)
        except PlanInfeasible as error:
            raise PlanInfeasible(
                f"{ran_out}; with a cap of {ran_out.lowered:,} instead of {ran_out.cap:,} tokens "
                f"a sequence fits nowhere: {error}"
            ) from error
        logger.warning(
            "%s; the step runs again, and the cap is lowered from %s to %s tokens",
            ran_out,
            f"{ran_out.cap:,}",
            f"{ran_out.lowered:,}",
        )
        problem = self._written(ran_out.lowered)
        if problem is not None:
            logger.warning("a later start of this run will not know the lower cap: %s", problem)
        return again

    def _written(self, cap: int) -> str | None:
        """Write the cap for later starts, unless a lower one is there. Return why it could not be;
        None if it is there."""
        problem = None
        for _ in range(2):  # another rank may have renamed the file that this one was writing
            try:
                former = _recorded(self._record)
                self._record.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._record, {CAP: cap if former is None else min(cap, former)})
            except (OSError, ValueError) as error:
                problem = str(error)
            else:
                return None
        return problem


def _recorded(path: Path) -> int | None:
    """Return the cap in a file; None without the file. Raises ValueError for other content."""
    if not path.exists():
        return None
    cap = read_object(path).get(CAP)
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
        raise ValueError(f"{path}: {CAP} is {cap!r}, not a number of tokens: remove the file")
    return cap


class _Before:
    """What a step changes before its optimizer, as it was before the step."""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        self._model = model
        self._has_gradients = any(p.grad is not None for p in model.parameters())
        self._buffers = _versions(model)
        self._numbers = TrainerNumbers(trainer)
        self._of_torch = random_states()
        self._of_python = random.getstate()
        self._of_numpy = np.random.get_state()

    def can_restore(self) -> bool:
        """Tell if all of it can be put back: gradients there were none of, and no buffer of the
        model has changed."""
        return not self._has_gradients and _versions(self._model) == self._buffers

    def restore(self) -> None:
        """Put it back, and drop the gradients of the step."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._numbers.restore()
        set_random_states(self._of_torch)
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return identity and version of each buffer, which change with it."""
    return [(id(buffer), buffer._version) for buffer in model.buffers()]
