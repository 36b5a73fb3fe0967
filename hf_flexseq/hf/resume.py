"""A checkpoint continues with the same data only when an optimizer step still draws as many
sequences: the number is kept beside every checkpoint, in `flexseq.json`."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

FILE = "flexseq.json"
KEY = "sequences_per_step"


class StepSizeCallback(TrainerCallback):
    """Notes beside every checkpoint how many sequences an optimizer step drew."""

    def __init__(self, sequences_per_step: int) -> None:
        self.sequences_per_step = sequences_per_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the note into the checkpoint that was just saved, by rank 0."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            # renamed when it is whole, so that no reader finds half of it
            partial = folder / f"{FILE}.partial"
            partial.write_text(json.dumps({KEY: self.sequences_per_step}), encoding="utf-8")
            partial.replace(folder / FILE)


def check_step_size(checkpoint: str | os.PathLike[str] | None, sequences_per_step: int) -> None:
    """Raise ValueError when `checkpoint` was made with another number of sequences per optimizer
    step."""
    if not checkpoint:
        return
    path = Path(checkpoint) / FILE
    if not path.is_file():
        return
    former = json.loads(path.read_text(encoding="utf-8"))[KEY]
    if former != sequences_per_step:
        raise ValueError(
            f"{checkpoint} was trained with {former} sequences per optimizer step, this run draws "
            f"{sequences_per_step} (per_device_train_batch_size x gradient_accumulation_steps x "
            f"processes): the data order would change"
        )
