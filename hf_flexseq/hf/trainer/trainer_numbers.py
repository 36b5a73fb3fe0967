"""What a loss counts on its trainer while it runs, to be put back if that run does not count."""

import copy
from typing import Any

from transformers import Trainer


class TrainerNumbers:
    """Numbers among a trainer's attributes, and TRL's metrics, as they are now."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._numbers = {}
        for name, value in vars(trainer).items():
            if isinstance(value, int | float):
                self._numbers[name] = value
        self._metrics = copy.deepcopy(getattr(trainer, "_metrics", None))

    def restore(self) -> None:
        """Give the trainer these values back."""
        vars(self._trainer).update(self._numbers)
        if self._metrics is not None:
            self._trainer._metrics = copy.deepcopy(self._metrics)
