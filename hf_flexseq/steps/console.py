"""Messages of a training run on the screen, besides its metrics.

beside_bars()    lines that do not tear a progress bar
DrawnNotes       warnings about the data of steps
Predictions      why steps take much more, or much less, time than was predicted
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.trace import LogFigures

logger = logging.getLogger(__name__)

# A prediction is far off when it differs by more than this factor.
FAR_OFF = 2.0
# Steps that are judged together, at least: a single one may be an outlier.
JUDGED = 3
# Load of a machine per core beyond which processes take turns.
BUSY = 1.5


def beside_bars() -> AbstractContextManager[None]:
    """Return a context for lines on stderr, in which progress bars are hidden."""
    bars: AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stderr)
    return bars


class DrawnNotes:
    """Warnings about the data of drawn steps, which rank 0 logs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_noted_padding = False

    def say_other_rows(self, step: RankStep[Any]) -> None:
        """Warn if the user's collator makes other rows of whole batches."""
        if step.drawn.counts.other_rows:
            self._warn(
                "step %d: the data_collator makes %d rows otherwise of a whole batch than of "
                "each example, as hf_flexseq calls it: it looks at other rows, gives padding "
                "labels, puts padding or another example before a token that has one, or is "
                "random",
                step.number,
                step.drawn.counts.other_rows,
            )

    def say_padding(self, step: RankStep[Any]) -> None:
        """Warn once about targets that only the plain Trainer would have."""
        if step.drawn.counts.padding_targets and not self._has_noted_padding:
            self._has_noted_padding = True
            self._warn(
                "step %d leaves out %d targets beside padding: the plain Trainer would train "
                "on labels where attention_mask is 0, and on a first token predicted from "
                "padding on its left or from another sequence of its row; %d targets of tokens "
                "stay (said once)",
                step.number,
                step.drawn.counts.padding_targets,
                step.targets,
            )

    def _warn(self, text: str, *values: Any) -> None:
        if self._rank == 0:
            with beside_bars():
                logger.warning(text, *values)


class Predictions:
    """Compares predicted with measured seconds, and speaks up once when they are far apart."""

    def __init__(self, cost_model: str) -> None:
        """cost_model: as in `FlexSeqArguments`."""
        self._cost_model = cost_model
        self._steps: list[LogFigures] | None = None  # to be judged; None before the first step
        self._has_spoken = False

    def add(self, figures: LogFigures) -> None:
        """Count a step, but for the first one, which also warms up."""
        if self._steps is None:
            self._steps = []
        elif not self._has_spoken:
            self._steps.append(figures)

    def verdict(self) -> str | None:
        """Return why the steps since the last verdict are far from their predictions, in one line;
        None where they are not, where they are too few, and after the first such line."""
        if self._steps is None or len(self._steps) < JUDGED:
            return None
        line = _far_off(self._steps, self._cost_model)
        self._steps.clear()
        self._has_spoken = line is not None
        return line


def _far_off(steps: Sequence[LogFigures], cost_model: str) -> str | None:
    """Return why predictions are far off, in one line; None where they are not."""
    predicted = sum(figures["predicted_s"] for figures in steps) / len(steps)
    measured = sum(figures["measured_s"] for figures in steps) / len(steps)
    if not predicted or not measured:
        return None
    ratio = measured / predicted
    if 1 / FAR_OFF <= ratio <= FAR_OFF:
        return None
    reasons = []
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if ratio > 1 and load > BUSY * cores:
        reasons.append(f"this machine is busy, load {load:.1f} on {cores} cores")
    reasons.append(_of_the_cost_model(cost_model))
    return (
        f"a step takes {measured:.3g} s, {ratio:.2g} times the predicted {predicted:.3g} s (the "
        f"first step, which warms up, is not counted): {'; '.join(reasons)}"
    )


def _of_the_cost_model(name: str) -> str:
    """Return why a cost model may be wrong here, and what to do."""
    if name == "estimate":
        return "cost_model='estimate' is arithmetic, cost_model='auto' corrects it by the steps"
    if name == "auto":
        return "the steps that the cost model has learned from ran at another load of this machine"
    if name in PRESETS:
        return f"cost_model={name!r} describes other devices, cost_model='auto' learns these"
    return f"cost_model={name!r} may describe another machine, cost_model='auto' learns this one"
