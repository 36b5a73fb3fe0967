"""How far an optimizer step is from another one.

Gradients are compared, not losses: a loss agrees to many digits where a gradient is wrong. The
error of a parameter is ||found - wanted|| / ||wanted||, with 1e-3 of the largest norm of all
parameters as the smallest divisor, below which no digits are left.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Gradients = dict[str, torch.Tensor]

FLOOR = 1e-3  # of the largest norm of a gradient


class StepOutcome(NamedTuple):
    """The loss and the gradients of an optimizer step."""

    loss: float
    """Mean loss over all target tokens."""
    gradients: Gradients
    """Gradient of each trainable parameter by name, on the CPU in float64; 0 where none is."""


class ErrorBounds(NamedTuple):
    """How far a step may be from the one without hf_flexseq."""

    loss: float
    """Relative error of the loss."""
    gradient: float
    """Error of any gradient."""


class Difference(NamedTuple):
    """How far a step is from another one."""

    loss: float
    """Relative error of the loss."""
    gradient: float
    """Largest error of a gradient."""
    parameter: str
    """Name of the parameter with that error; "" without gradients."""
    missing: tuple[str, ...]
    """Parameters that have a gradient in one step alone."""

    def within(self, bounds: ErrorBounds) -> bool:
        """Return True if nothing is missing and no error is above its bound or NaN."""
        is_close = self.loss <= bounds.loss and self.gradient <= bounds.gradient
        return is_close and not self.missing

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self._asdict(), "missing": list(self.missing)}


def difference(found: StepOutcome, wanted: StepOutcome) -> Difference:
    """Return how far the step `found` is from the step `wanted`."""
    loss = abs(found.loss - wanted.loss) / max(abs(wanted.loss), 1e-12)
    missing = tuple(sorted(found.gradients.keys() ^ wanted.gradients.keys()))
    errors = errors_of(found.gradients, wanted.gradients)
    worst = max(errors, key=lambda name: _as_error(errors[name]), default="")
    return Difference(loss, errors.get(worst, 0.0), worst, missing)


def furthest(differences: Sequence[Difference]) -> Difference:
    """Return the largest loss error and the largest gradient error of several ranks, with all that
    is missing on any."""
    loss = max((one.loss for one in differences), key=_as_error)
    worst = max(differences, key=lambda one: _as_error(one.gradient))
    missing = sorted({name for one in differences for name in one.missing})
    return worst._replace(loss=loss, missing=tuple(missing))


def _as_error(value: float) -> tuple[bool, float]:
    return value != value, value  # NaN, which is never the largest, is looked for first


def errors_of(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Return the error of each parameter that both steps have."""
    floor = FLOOR * max((float(gradient.norm()) for gradient in wanted.values()), default=0.0)
    errors = {}
    for name in wanted.keys() & found.keys():
        size = max(float(wanted[name].norm()), floor, 1e-300)
        errors[name] = float((found[name] - wanted[name]).norm()) / size
    return dict(sorted(errors.items()))


def has_learned(step: StepOutcome) -> bool:
    """Return True if any gradient is not 0: two steps that compute nothing agree."""
    return any(bool(gradient.any()) for gradient in step.gradients.values())
