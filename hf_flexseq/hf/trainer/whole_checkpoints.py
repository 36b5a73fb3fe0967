"""Write the Trainer's checkpoints so that a whole one differs from a torn one.

A checkpoint is written in this order (`checkpoints/manifest.py` describes marker and manifest):

1. rank 0: the marker, after removing leftovers of an earlier save
2. all ranks: weights, optimizer, random numbers, by the Trainer
3. all ranks: they meet, when each has written its files and these are on disk
4. rank 0: `trainer_state.json`, the Trainer's last file
5. rank 0: the manifest, when this file is on disk
6. rank 0: the push to the Hub and the removal of old checkpoints, by the Trainer

Steps 2, 4 and 6 are in one method of the Trainer. Step 5 has to come between them: the Hub would
get a torn checkpoint otherwise, and a kill would find the old checkpoint gone and the new one
torn. So it follows the writing of `trainer_state.json`.

Step 3 follows the last file that all ranks write, at the same place of the method on every rank.
Ranks that met anywhere else could wait for ever: the Trainer lets all ranks meet in its method if
a metric has found a best step, and a subclass may let them meet after it.

A run resumes from a whole checkpoint alone. `resume_from_checkpoint=True` takes the newest one and
passes over torn ones with a warning; a checkpoint that is named must be whole. Rank 0 looks, and
all ranks do as it says.

A step draws per_device_train_batch_size x gradient_accumulation_steps x processes samples. Another
product would move every step, and is refused. With the same product and other factors the default
sampler draws the same samples up to the end of an epoch: accelerate fills or drops the last round
of batch x processes samples. Samplers that sort within a batch or have no seed, streams and
loaders of the user's may draw in another order. The log says so.

Rejected: rules about which factors keep which order, for runs that are rare.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.records import Constants, Whole
from hf_flexseq.checkpoints.manifest import (
    MANIFEST,
    MARKER,
    Inspection,
    begin,
    finish,
    flush_files,
    inspect,
    is_torn,
)
from hf_flexseq.checkpoints.optimizer import WHOLE_SCHEDULER, is_named
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator

logger = logging.getLogger(__name__)


def checkpoint_folder(trainer: Trainer, trial: Any) -> Path:
    """Return the folder of the checkpoint that the trainer would save now."""
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    return Path(trainer._get_output_dir(trial=trial)) / name


@contextmanager
def saved_whole(
    trainer: Trainer, folder: Path, marker: Mapping[str, Any], communicator: Communicator
) -> Iterator[None]:
    """Surround the Trainer's saving of the checkpoint `folder`. Collective over the world."""
    cpu_group = communicator.cpu_group
    cpu_group.phase = f"saving {folder.name}"
    writes = communicator.rank == 0
    flushes = communicator.rank % communicator.topology.ranks_per_node == 0  # for its machine
    with ErrorCapture() as beginning:
        if writes:
            begin(folder, marker)
    # No rank writes before the marker is there.
    beginning.raise_on_all_ranks(cpu_group.gather_values, f"beginning {folder.name}")
    have_met = is_finished = False

    def meet() -> None:
        """Wait, once, until every rank's files are on disk. Collective over the world."""
        nonlocal have_met
        if have_met:
            return
        have_met = True
        cpu_group.barrier()
        with ErrorCapture() as flushing:
            if flushes:
                flush_files(folder)
        flushing.raise_on_all_ranks(cpu_group.gather_values, f"flushing {folder.name}")

    def finish_once() -> None:
        """Write the manifest after all ranks have met."""
        nonlocal is_finished
        if is_finished or not have_met or not writes:
            return
        is_finished = True
        flush_files(folder)
        finish(folder, marker)
        if (trainer.args.save_total_limit or 0) > 0:
            _remove_torn(folder)

    of_all_ranks = "save_model" if trainer.args.save_only_model else "_save_rng_state"
    with (
        _followed(trainer, of_all_ranks, folder, meet),
        _followed(trainer.state, "save_to_json", folder / TRAINER_STATE_NAME, finish_once),
    ):
        yield
    # where a subclass saves without the Trainer's method
    meet()
    finish_once()


def _followed(owner: Any, name: str, path: Path, then: Callable[[], None]) -> Patch:
    """Call `then` whenever a method of an object has been given `path`, inside a block.

    name: of the method.
    """
    save = getattr(owner, name)  # the user may have put one on this object

    def save_and_then(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, str | Path)]
        if path in map(Path, given):
            then()

    return Patch(owner, **{name: save_and_then})


def _remove_torn(folder: Path) -> None:
    """Remove torn checkpoints next to `folder`: they would count as checkpoints to be kept."""
    for other in folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if other != folder and is_torn(other):
            logger.warning("%s is removed: saving was interrupted", other)
            shutil.rmtree(other, ignore_errors=True)


_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
# What the Trainer and accelerate's FSDP write an optimizer's state to.
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_[0-9]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: str

    marker: Mapping[str, Any]
    """Metadata of hf_flexseq; empty for a checkpoint of another program."""


def choose_checkpoint(
    asked: str | os.PathLike[str] | bool | None, output_dir: str | None, communicator: Communicator
) -> Resumed | None:
    """Return the checkpoint to resume from, the same on all ranks, or None. Collective over the
    world. Raises ValueError, on all ranks, for an unusable one. asked: as for `Trainer.train`."""
    found: dict[str, Any] | None = None
    with ErrorCapture() as looking:
        if communicator.rank == 0:
            found = _chosen(asked, output_dir)
    looking.raise_on_all_ranks(communicator.cpu_group.gather_values, "looking for a checkpoint")
    found = communicator.cpu_group.broadcast_value(found)
    if found is None:
        return None
    if "error" in found:
        raise ValueError(found["error"])
    folder = found["folder"]
    sees = communicator.cpu_group.gather_values(Path(folder).is_dir())
    if not all(sees):
        raise ValueError(
            f"rank {sees.index(False)} does not see {folder}: all ranks must read one folder"
        )
    return Resumed(folder=folder, marker=found["marker"])


def _chosen(
    asked: str | os.PathLike[str] | bool | None, output_dir: str | None
) -> dict[str, Any] | None:
    """Return folder and marker of the chosen checkpoint, or an error; None to start anew."""
    if asked is None or asked is False:
        return None
    if asked is True:
        if not output_dir or not Path(output_dir).is_dir():
            return {"error": f"resume_from_checkpoint=True: no folder {output_dir}"}
        return _newest_whole(Path(output_dir))
    folder = Path(asked)
    if not folder.is_dir():
        return {"error": f"resume_from_checkpoint={str(folder)!r}: no such folder"}
    found = inspect(folder)
    if found.problem is not None:
        return {"error": f"{folder}: {found.problem}; {_advice(folder, found.problem)}"}
    return _accepted(folder, found)


def _newest_whole(output_dir: Path) -> dict[str, Any]:
    """Return the newest whole checkpoint in a folder, with a warning for each newer one."""
    passed_over: list[str] = []
    for folder in _newest_first(output_dir):
        found = inspect(folder)
        if found.problem is None:
            for problem in passed_over:
                logger.warning("going on from %s, not from %s", folder.name, problem)
            return _accepted(folder, found)
        passed_over.append(f"{folder.name}: {found.problem}")
    if not passed_over:
        return {"error": f"resume_from_checkpoint=True: no checkpoint in {output_dir}"}
    return {
        "error": f"resume_from_checkpoint=True: no whole checkpoint in {output_dir} "
        f"({passed_over[0]}); start anew without it"
    }


def _newest_first(output_dir: Path) -> list[Path]:
    """Return the checkpoints in a folder, the last step's first."""
    folders = [path for path in output_dir.iterdir() if path.is_dir() and _step(path) >= 0]
    return sorted(folders, key=_step, reverse=True)


def _step(folder: Path) -> int:
    """Return the step in the name of a checkpoint; -1 for another name."""
    match = _NAME.fullmatch(folder.name)
    return -1 if match is None else int(match[1])


def _advice(folder: Path, problem: str) -> str:
    """Return advice to the user about a checkpoint that cannot be resumed."""
    others = [other for other in _newest_first(folder.parent) if other != folder]
    for other in others:
        if inspect(other).problem is None:
            return f"name {other.name} instead"
    if problem.startswith("torn"):
        return "no other checkpoint is whole: start anew"
    return f"restore it, or remove {MARKER} and {MANIFEST} to have it taken as it is"


def _accepted(folder: Path, found: Inspection) -> dict[str, Any]:
    """Return folder and marker; warn if it is unknown whether the checkpoint is whole."""
    if found.caveat is not None:
        logger.warning("%s: %s, so it is unknown if it is whole", folder, found.caveat)
    return {"folder": str(folder), "marker": dict(found.marker or {})}


def warn_without_optimizer(folder: str, communicator: Communicator) -> None:
    """Warn on rank 0 that optimizer or scheduler start anew, which the Trainer does silently."""
    if communicator.rank != 0:
        return
    path = Path(folder)
    if is_named(folder):
        return
    missing = []
    if not any(any(path.glob(pattern)) for pattern in _OPTIMIZERS):
        missing.append("optimizer")
    if not (path / WHOLE_SCHEDULER).is_file():
        missing.append("scheduler")
    if missing:
        logger.warning(
            "%s has no state of the %s: optimizer and learning rate start anew",
            folder,
            " and the ".join(missing),
        )


# ---- the order of samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors(Constants):
    """Factors of the number of samples in an optimizer step."""

    what: ClassVar[str] = "factors of an optimizer step"

    batch: Whole
    """`per_device_train_batch_size`."""
    accumulation: Whole
    """`gradient_accumulation_steps`."""
    processes: Whole

    @classmethod
    def of(cls, trainer: Trainer) -> "Factors":
        """Return the factors of a trainer's steps."""
        batch: int = trainer._train_batch_size
        accumulation: int = trainer.args.gradient_accumulation_steps
        samples: int = trainer.get_total_train_batch_size(trainer.args)
        return cls(
            batch=batch, accumulation=accumulation, processes=samples // (batch * accumulation)
        )

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        return self.batch * self.accumulation * self.processes

    def __str__(self) -> str:
        return (
            f"per_device_train_batch_size={self.batch}, gradient_accumulation_steps="
            f"{self.accumulation} and {_processes(self.processes)}"
        )


def check_factors(
    folder: str, marker: Mapping[str, Any], now: Factors, *, says: bool = True
) -> None:
    """Raise ValueError, with values that fit, if a run would draw another number of samples in a
    step than the checkpoint's run; log other factors of the same number.

    Args:
        folder: The checkpoint.
        marker: Its metadata. Earlier versions saved only the product of the factors, and the
            plain Trainer saves nothing; missing values are not checked.
        now: The factors of this run.
        says: True on the rank that logs.
    """
    samples = marker.get("sequences_per_step", now.samples)
    former = Factors.from_record(marker["factors"]) if "factors" in marker else now
    if samples != now.samples:
        own, rest = divmod(samples, now.processes)
        advice = f"resume on a number of processes that divides {samples}"
        if former.processes == now.processes and former != now:
            advice = (
                f"set per_device_train_batch_size={former.batch} and "
                f"gradient_accumulation_steps={former.accumulation}"
            )
        elif not rest:
            advice = (
                f"on {_processes(now.processes)} the product of per_device_train_batch_size and "
                f"gradient_accumulation_steps must be {own}"
            )
        raise ValueError(
            f"{folder} was trained with {samples} sequences per optimizer step, this run draws "
            f"{now.samples} (per_device_train_batch_size x gradient_accumulation_steps x "
            f"processes): the data order would change; {advice}"
        )
    if former != now and says:
        logger.warning(
            "%s was trained with %s, this run has %s: each step draws as many samples, but not "
            "always the same: the end of an epoch, group_by_length, a sampler without a seed, "
            "streams and loaders of your own depend on these",
            folder,
            former,
            now,
        )


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"
