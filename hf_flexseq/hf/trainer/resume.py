"""Choose the whole checkpoint that a run resumes from.

`resume_from_checkpoint=True` takes the newest whole checkpoint and passes over others with a
warning; a checkpoint that is named must be whole. `checkpoints/manifest.py` defines whole.
Rank 0 looks, and all ranks do as it says.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER, Inspection, inspect
from hf_flexseq.checkpoints.optimizer import WHOLE_SCHEDULER, is_named
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator

logger = logging.getLogger(__name__)

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
    """Return what the user may do about a checkpoint that cannot be gone on from."""
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
