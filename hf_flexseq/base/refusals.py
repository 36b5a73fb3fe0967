"""A refusal as data, and checks that raise for all that applies at once.

A refusal is an error before training instead of a wrong result during it. ValueError stands for a
setting that contradicts planned steps, NotImplementedError for one that hf_flexseq lacks. Launches
of a large job are dear, so independent checks all run, and one error says all that they found.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")

REFUSED = (ValueError, NotImplementedError, ImportError)
"""The errors that checks raise."""

_PARTS = "flexseq_parts"  # attribute of an error of several refusals: the error of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal(Generic[Case]):
    """A setting that hf_flexseq does not support."""

    setting: str
    """Name of the setting, for the documentation."""
    found: Callable[[Case], Any]
    """Function that returns the setting with its value for the error, True for `setting` itself,
    or None or False if it is not set."""
    why: str
    """Reason of the refusal."""
    instead: str
    """Advice: settings that the user can choose instead."""
    error: type[Exception] = NotImplementedError
    """Class of the exception."""
    keeps: Callable[[Case], str] | None = None
    """Function that returns the end of the advice, the batch and accumulation that keep the tokens
    of a step; None for a setting that does not change them."""


def refuse(refusals: Iterable[Refusal[Case]], case: Case, *, where: str = "") -> None:
    """Raise the error of the refusals that apply to a case. where: a text after each setting."""
    errors: list[Exception] = []
    for refusal in refusals:
        found = refusal.found(case)
        if found:
            what = found if isinstance(found, str) else refusal.setting
            advice = refusal.instead + (refusal.keeps(case) if refusal.keeps else "")
            text = f"hf_flexseq does not support {what}{where}: {refusal.why}; {advice}"
            errors.append(refusal.error(text))
    raise_all(errors)


def together(*checks: Callable[[], object]) -> None:
    """Run independent checks, and raise what all of them refuse as one error."""
    errors: list[Exception] = []
    for check in checks:
        try:
            check()
        except REFUSED as error:
            errors += getattr(error, _PARTS, [error])
    raise_all(errors)


def raise_all(errors: Iterable[Exception]) -> None:
    """Raise an error as it is, and several as one, with a line for each: of their class if they
    have the same, else NotImplementedError if any is one, otherwise ValueError. Returns without
    any."""
    errors = list({str(error): error for error in errors}.values())
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kinds = {type(error) for error in errors}
        is_lacking = any(isinstance(error, NotImplementedError) for error in errors)
        kind = NotImplementedError if is_lacking else ValueError
        lines = [f"{number}. {error}" for number, error in enumerate(errors, start=1)]
        text = "\n".join([f"{len(errors)} reasons to refuse this:", *lines])
        whole = (kinds.pop() if len(kinds) == 1 else kind)(text)
        setattr(whole, _PARTS, errors)
        raise whole


def above_one(owner: Any, *names: str) -> dict[str, int]:
    """Return the degrees of parallelism among the attributes of an object."""
    degrees = {name: getattr(owner, name, None) or 1 for name in names}
    return {name: degree for name, degree in degrees.items() if degree > 1}


def same_step(degree: int, args: Any, *, batch: str = "per_device_train_batch_size") -> str:
    """Return the end of an advice: the batch and accumulation with which each rank draws alone its
    share of the examples that `degree` ranks have drawn together. args: None if they are not
    known. batch: name of the option in `args`."""
    if args is None:
        return f"; a batch or accumulation divided by {degree} keeps the tokens of a step"
    accumulation = "gradient_accumulation_steps"
    drawn = [getattr(args, name, None) or 1 for name in (batch, accumulation)]
    samples = max(1, math.prod(drawn) // degree)
    size = math.gcd(drawn[0], samples)
    ratio = samples * degree / math.prod(drawn)
    kept = "keep the tokens" if ratio == 1 else f"are the nearest: {ratio:.3g} times the tokens"
    return f"; {batch}={size} and {accumulation}={samples // size} {kept} of a step"


def option(
    name: str, is_refused: Callable[[Any], Any] = bool, *, holder: str = ""
) -> Callable[[Any], str | None]:
    """Return a function that finds an attribute with a refused value.

    name: the attribute; one that is missing counts as None.
    is_refused: True for a refused value.
    holder: the attribute of the case that holds it. Default: the case itself.
    """

    def found(case: Any) -> str | None:
        owner = getattr(case, holder) if holder else case
        value = getattr(owner, name, None)
        return f"{name}={value!r}" if is_refused(value) else None

    return found
