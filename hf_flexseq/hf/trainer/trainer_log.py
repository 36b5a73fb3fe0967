"""The entries in the log of a Trainer besides the Trainer's own.

remarks        where code of the user's sees something else than under the plain Trainer,
               columns that are dropped, and streams that are dealt out otherwise
figures        of the steps since the last entry, as means
predictions    a warning if measured seconds are far from the predicted ones
"""

import logging
from typing import Any

from transformers import Trainer

from hf_flexseq.hf.engine.dataset_checks import dealt_otherwise, dropped_in
from hf_flexseq.hf.trainer.overrides import remarks
from hf_flexseq.steps.console import Predictions, beside_bars
from hf_flexseq.steps.trace import LogFigures, logged_figures, plan_line

# the name that users filter by (docs/start.md)
logger = logging.getLogger("hf_flexseq.hf.trainer.trainer")


class TrainerLog:
    """Collects the entries for one trainer's log; rank 0 writes them."""

    def __init__(self, trainer: Trainer, cost_model: str) -> None:
        """cost_model: as in `FlexSeqArguments`."""
        self._trainer: Any = trainer
        self._said: set[str] = set()
        self._figures: list[LogFigures] = []  # of the steps since the last entry
        self.judge_by(cost_model)

    def judge_by(self, cost_model: str) -> None:
        """Compare steps with the predictions of this option from now on."""
        self._predictions = Predictions(cost_model)

    def say_remarks(self) -> None:
        """Log each remark on the user's code, on dropped columns, and on streams, once."""
        trainer = self._trainer
        if not trainer.is_world_process_zero():
            return
        for line in (*remarks(trainer), *dropped_in(trainer), *dealt_otherwise(trainer)):
            if line not in self._said:
                self._said.add(line)
                logger.warning("%s", line)

    def note(self, number: int, figures: LogFigures) -> None:
        """Record the figures of a step for the next entry."""
        self._figures.append(figures)
        self._predictions.add(figures)
        if self._trainer.is_world_process_zero() and logger.isEnabledFor(logging.INFO):
            with beside_bars():
                logger.info("step %d: %s", number, plan_line(figures))

    def take_figures(self) -> LogFigures:
        """Return the mean figures since the last entry, under their names in the log."""
        means = logged_figures(self._figures)
        self._figures.clear()
        return means

    def judge_predictions(self) -> None:
        """Warn once if the steps since the last entry are far from their predictions."""
        line = self._predictions.verdict()
        if line is not None and self._trainer.is_world_process_zero():
            with beside_bars():
                logger.warning("%s", line)
