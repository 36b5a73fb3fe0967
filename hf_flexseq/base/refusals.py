"""A refusal as data, and the check that raises for the first one that applies.

A refusal is an error before training instead of a wrong result during it. ValueError stands for a
setting that contradicts planned steps, NotImplementedError for one that hf_flexseq lacks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")


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
    """Advice: what the user can set instead."""

    error: type[Exception] = NotImplementedError
    """Class of the exception."""


def refuse(refusals: Iterable[Refusal[Case]], case: Case, *, where: str = "") -> None:
    """Raise the error of the first refusal that applies to a case. where: a text after it."""
    for refusal in refusals:
        found = refusal.found(case)
        if found:
            what = found if isinstance(found, str) else refusal.setting
            raise refusal.error(
                f"hf_flexseq does not support {what}{where}: {refusal.why}; {refusal.instead}"
            )


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
