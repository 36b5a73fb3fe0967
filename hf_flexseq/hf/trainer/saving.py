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
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_flexseq.base.patches import Patch
from hf_flexseq.checkpoints.manifest import begin, finish, flush_files, is_torn
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
        if flushes:
            flush_files(folder)
        cpu_group.barrier()

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
