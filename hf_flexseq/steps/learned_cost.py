"""Corrections that a run makes to its cost model while it trains.

With `cost_model="auto"` a run begins with the estimate. Steps that have run are compared with it
(`cost/correction.py`): after so many steps as `CORRECTIONS` says, rank 0 fits a factor for each
term, and all ranks get them. A correction counts from a fixed step on, the first that no rank can
have drawn when it is made, so that it does not matter how long anything took.

After the last correction the cost model is frozen, and kept for later runs. A checkpoint freezes
it, too, with corrections that are still to come into effect: a resumed run would measure other
times than the run itself after the checkpoint, and could not repeat its plans.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hf_flexseq.base.values import quoted
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.correction import (
    FACTORS,
    Correction,
    MeasuredStep,
    Observation,
    corrected,
    fit,
    usable,
)
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.steps.console import beside_bars

logger = logging.getLogger(__name__)

CORRECTIONS = (2, 4, 8, 14, 20)
"""Numbers of steps after which factors are fitted; none after the last."""
# Steps that take longer than later ones, for libraries and caches get ready in them.
WARM_UP = 1
# Steps of a fit that later runs may begin with.
ENOUGH = 8


class Version(NamedTuple):
    """Factors of the estimate's terms."""

    first_step: int
    """Number of the first step that is planned with them."""
    factors: tuple[float, ...]
    """[FACTORS], see `cost/correction.py`."""


class LearnedCost:
    """The factors of a run's cost model, by step."""

    def __init__(self, versions: Sequence[Version] = (), *, learns: bool = False) -> None:
        """versions: ascending by step, of an earlier run or a checkpoint. learns: True to go on
        with corrections."""
        self.versions = list(versions)
        self.keep: Callable[[dict[str, Any]], None] = lambda record: None
        """Keeps the factors for later runs, on rank 0."""
        self._meets = learns  # ranks at corrections; alike on all of them
        self._is_frozen = not learns
        self._steps = 0
        self._observations: list[Observation] = []  # on rank 0, as is the next
        self._correction: Correction | None = None  # the last one
        self._held = 0.0  # the most that a device held of tokens, over the estimate; on rank 0

    # ---- which factors

    def factors_of(self, number: int) -> tuple[float, ...] | None:
        """Return the factors by which step `number` is planned; None for the estimate's."""
        counting = [one.factors for one in self.versions if one.first_step <= number]
        return counting[-1] if counting else None

    @property
    def newest(self) -> tuple[float, ...] | None:
        """The factors of the last correction."""
        return self.versions[-1].factors if self.versions else None

    def begin_anew(self) -> None:
        """Let the newest factors count for all steps, whose numbers begin anew."""
        if self.versions:
            self.versions = [Version(0, self.versions[-1].factors)]

    # ---- steps that have run

    def take(
        self,
        step: MeasuredStep,
        cost: CostModel,
        communicator: Communicator,
        *,
        first_step: int,
        held: float,
    ) -> None:
        """Learn from a step that has run. Collective over the world.

        cost: the estimate. first_step: number of the first step that cannot be planned yet. held:
        bytes that devices have held for tokens, divided by the estimate's; 0.0 if not known.
        """
        if not self._meets:
            return
        self._steps += 1
        is_first = communicator.rank == 0
        if is_first and not self._is_frozen and self._steps > WARM_UP:
            self._observations += usable(step.observations(cost, communicator.topology))
        self._held = max(self._held, held)
        if self._steps not in CORRECTIONS:
            return
        factors = None
        if self._observations:
            self._correction = fit(self._observations)
            factors = self._factors(self._correction)
        factors = communicator.cpu_group.broadcast_value(factors)
        if factors is not None:
            self.versions.append(Version(first_step, tuple(factors)))
        if self._steps == CORRECTIONS[-1]:
            self._meets = False
            self.freeze(f"{self._steps} steps have run")

    def freeze(self, why: str) -> None:
        """Make no more corrections. why: in words."""
        if self._is_frozen:
            return
        self._is_frozen = True
        self._observations = []
        if self._correction is None:
            return
        with beside_bars():
            logger.info(
                "the cost model is frozen, since %s: %s%s",
                why,
                self._correction.text(),
                f"; a token takes {self._held:.2f} times its bytes" if self._held else "",
            )
        if self._steps >= ENOUGH:
            self.keep(record_of([Version(0, self._factors(self._correction))]))

    def _factors(self, correction: Correction) -> tuple[float, ...]:
        """Return the factors of a correction and of the bytes of a token, [FACTORS]."""
        return (*correction.factors, self._held or 1.0)


# ---- records


def record_of(versions: Sequence[Version]) -> dict[str, Any]:
    """Return the factors of a run as plain JSON values."""
    return {
        "terms": list(FACTORS),
        "versions": [[one.first_step, list(one.factors)] for one in versions],
    }


def versions_of(record: Any) -> list[Version]:
    """Inverse of `record_of`. Raises ValueError for another record."""
    if not isinstance(record, dict) or record.get("terms") != list(FACTORS):
        raise ValueError("its terms are those of another version of hf_flexseq")
    found = []
    for one in record.get("versions", []):
        is_pair = isinstance(one, list) and len(one) == 2
        if not is_pair or not isinstance(one[0], int) or not _are_factors(one[1]):
            raise ValueError(f"not a step and the factors from it on: {quoted(one)}")
        found.append(Version(one[0], tuple(one[1])))
    return found


def _are_factors(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(FACTORS):
        return False
    return all(isinstance(one, int | float) and one >= 0 and np.isfinite(one) for one in value)


@lru_cache(maxsize=4)
def corrected_cost(cost: CostModel, factors: tuple[float, ...] | None) -> CostModel:
    """Return `cost` with factors, `cost` itself without any."""
    return cost if factors is None else corrected(cost, factors)
