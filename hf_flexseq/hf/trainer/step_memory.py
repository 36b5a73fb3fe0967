"""What becomes of a run in which a rank runs out of memory.

What a rank holds in a micro-batch is bounded by `max_tokens_per_rank`, or by the memory model.
Where that was too much, the error gets a note with what the micro-batch held and what to set
(`out_of_memory.py`).

With `auto_find_batch_size=True` the cap is lowered as well, to `SHARE` of what the fullest rank
held in that micro-batch. It is written into `output_dir`, and every start of the run reads it:

    one process      training starts again at once, as under the plain Trainer: from the checkpoint
                     that was saved last, or from where it began if no step was done
    several ranks    the rank ends with its error, and the others as they do when a rank is lost;
                     whoever starts the run again goes on from a checkpoint

Rejected: to run the step again. On several ranks others are in the middle of exchanges with this
one, and torch can take none of them back. On one process gradients, random numbers, buffers and
what losses have counted would have to be put back.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.checkpoints.files import write_json
from hf_flexseq.checkpoints.manifest import read_object
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.out_of_memory import CAP, RanOut, add_note, is_out_of_memory
from hf_flexseq.steps.micro_batches import RankMicroBatches

logger = logging.getLogger(__name__)


RECORD = "flexseq_memory.json"
"""The file in `output_dir` with the lowered cap."""


class StepMemory:
    """Surrounds the training of a Trainer. With `auto_find_batch_size` it lowers the cap of plans
    where memory runs out."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer
        self._engine = engine
        self._lowers = False
        self._has_lowered = False  # since the last start
        self._restore_numbers: Callable[[], None]
        """Gives the trainer its numbers back as they were when training began; from `lowering`
        on."""
        self.saved: str | None = None
        """The checkpoint that this training has saved last, to be resumed from."""

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Surround training. The Trainer itself would answer by smaller batches."""
        args = self._trainer.args
        self._lowers = args.auto_find_batch_size
        self.saved = None
        self._restore_numbers = _restoring_numbers(self._trainer)
        with Patch(args, auto_find_batch_size=False):
            yield

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
        self._engine.lower_cap(min(caps))
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

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Surround a step. An error about memory gets a note, and the cap of later starts is
        lowered."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            step = self._engine.running
            ran_out = RanOut.of(self._engine.planning, step)
            if self._lowers and ran_out is not None and ran_out.lowered:
                error.add_note(self._left_to_next_start(ran_out))
            else:
                add_note(error, self._engine.planning, step)
            if isinstance(step, RankMicroBatches):
                step.forget()
            raise

    def _left_to_next_start(self, ran_out: RanOut) -> str:
        """Write a lowered cap; return what happened and what follows."""
        problem = self._written(ran_out.lowered)
        self._has_lowered = problem is None
        what = ran_out.what
        line = (
            f"{what}; the next start of this run lowers the cap from {ran_out.cap:,} to "
            f"{ran_out.lowered:,} tokens, as {self._record} says: go on from the newest checkpoint"
        )
        if problem is not None:
            line = f"{what}; set {CAP}={ran_out.lowered}, which could not be noted: {problem}"
        logger.error("%s", line)
        return line

    def can_start_again(self, resumed: str | None) -> bool:
        """Tell if training that an error has ended can start again at once, under a lower cap: on
        one process, whose model nothing has wrapped, from weights that are there. resumed: the
        checkpoint that it began with; None without."""
        has_lowered, self._has_lowered = self._has_lowered, False
        is_alone = self._trainer.accelerator.distributed_type == DistributedType.NO
        if not has_lowered or not is_alone or self._engine.communicator.world_size > 1:
            return False
        return bool(self.saved or resumed) or self._trainer.state.global_step == 0

    def start_again(self, resumed: str | None) -> str | None:
        """Return the checkpoint that training begins with again, None without, when nothing refers
        to its error any more. resumed: see `can_start_again`."""
        # Autograd keeps the graph of a backward that has failed until the next one.
        torch.zeros((), requires_grad=True).mul(1).backward()
        clear_device_cache(garbage_collection=True)  # errors and frames refer to each other
        self._restore_numbers()  # such as TRL's sums, which have a part of the failed step
        folder = self.saved or resumed
        logger.warning("training starts again, from %s", folder or "step 0")
        return folder

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


def _restoring_numbers(trainer: Any) -> Callable[[], None]:
    """Return what gives a trainer, which may be one of TRL's, its numbers and metrics back as they
    are now."""
    numbers = {n: one for n, one in vars(trainer).items() if isinstance(one, int | float)}
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))

    def restore() -> None:
        vars(trainer).update(numbers)
        if metrics is not None:
            trainer._metrics = copy.deepcopy(metrics)

    return restore
