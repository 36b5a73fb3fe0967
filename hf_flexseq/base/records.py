"""Records of frozen dataclasses: their fields are checked, written as plain JSON values and read
again by their annotations.

    linear_s: Positive                                   a number above 0
    bandwidths: tuple[tuple[Whole, Positive], ...]       a list of pairs
    kernel: AttentionKernel | None = None                a record, left out where there is none
    lengths: Annotated[tuple[int, ...], Form(...)]       read and written by functions of its own

Numbers that are annotated `float` are written as floats, so that equal records have equal digests.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from hf_flexseq.base.values import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_SECONDS,
    VERSION,
    fields_of,
    flag,
    items,
    number,
    positive,
    whole,
    word,
)


class Bounds(NamedTuple):
    """Bounds of a number. A whole one has at most `MAX_COUNT`, too."""

    least: float = 0
    most: float = MAX_BYTES
    above: bool = False
    """True if the number is above 0."""


class Form(NamedTuple):
    """How a field is read and written whose values constructors do not check."""

    read: Callable[[str, Any], Any]
    """Returns the value that has a name and these JSON values. Raises ValueError for others."""
    write: Callable[[Any], Any]
    """Returns the JSON values of the value."""


Amount = Annotated[float, Bounds()]
Positive = Annotated[float, Bounds(above=True)]
Seconds = Annotated[float, Bounds(most=MAX_SECONDS)]
Share = Annotated[float, Bounds(most=1.0)]
Whole = Annotated[int, Bounds(least=1)]


class Constants:
    """A frozen dataclass whose fields are numbers, words, flags, tuples and other records."""

    __slots__ = ()

    what: ClassVar[str]
    """Its name in messages, such as "a cost model"."""
    is_versioned: ClassVar[bool] = False
    """True if its record has the version of the format."""

    def __post_init__(self) -> None:
        for name, hint, _ in _fields(type(self)):
            _check(name, getattr(self, name), hint)

    def to_record(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, without those that are None by default."""
        record: dict[str, Any] = {"version": VERSION} if self.is_versioned else {}
        for name, hint, default in _fields(type(self)):
            value = getattr(self, name)
            if value is not None or default is not None:
                record[name] = _written(value, hint)
        return record

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Inverse of `to_record`. Raises ValueError, naming the key, for any other record."""
        hints = {name: hint for name, hint, _ in _fields(cls)}
        needed = [name for name, _, default in _fields(cls) if default is MISSING]
        given = fields_of(record, cls.what, needed=needed, optional=hints)
        values = {name: _read(name, given[name], hints[name]) for name in hints if name in given}
        return cls(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the annotations of a record's fields."""
    return hints_of(kind, include_extras=True)


def _fields(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, annotation and default, or its factory, of each field of a record."""
    for one in fields(kind):
        default = one.default if one.default_factory is MISSING else one.default_factory
        yield one.name, _hints(kind)[one.name], default


class _Parts(NamedTuple):
    """An annotation taken apart."""

    kind: Any
    inner: tuple[Any, ...]
    bounds: Bounds
    form: Form | None
    is_optional: bool


@functools.cache
def _parts(hint: Any) -> _Parts:
    """Return the parts of an annotation."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        added = inner[1]
        name = "form" if isinstance(added, Form) else "bounds"
        return _parts(inner[0])._replace(**{name: added})
    if kind in (Union, UnionType):
        return _parts(inner[0])._replace(is_optional=True)
    return _Parts(kind or hint, inner, Bounds(), None, False)


def _each(name: str, value: Any, inner: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Return the values of a list with their annotations, of a tuple with these inside."""
    values = items(name, value)
    if inner[-1] is Ellipsis:
        return [(one, inner[0]) for one in values]
    if len(values) != len(inner):
        raise ValueError(f"{name}: must be a list of pairs")
    return list(zip(values, inner, strict=True))


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless a value fits its annotation; records have checked theirs."""
    kind, inner, bounds, form, is_optional = _parts(hint)
    if form is not None or (value is None and is_optional):
        return
    if kind is tuple:
        for one, of_one in _each(name, value, inner):
            _check(name, one, of_one)
    elif kind is float:
        check = positive if bounds.above else functools.partial(number, least=bounds.least)
        check(name, value, most=bounds.most)
    elif kind is int:
        whole(name, value, least=int(bounds.least), most=int(min(bounds.most, MAX_COUNT)))
    elif kind is str:
        word(name, value)
    elif kind is bool:
        flag(name, value)


def _written(value: Any, hint: Any) -> Any:
    """Return a value as JSON values."""
    kind, inner, _, form, _ = _parts(hint)
    if form is not None:
        return form.write(value)
    if value is None:
        return None
    if kind is tuple:
        return [_written(one, of_one) for one, of_one in _each("", value, inner)]
    if kind is float:
        return float(value)
    return value.to_record() if hasattr(value, "to_record") else value


def _read(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a field from JSON values, for the constructor to check."""
    kind, inner, _, form, is_optional = _parts(hint)
    if form is not None:
        return form.read(name, value)
    if value is None and is_optional:
        return None
    if kind is tuple:
        return tuple(_read(name, one, of_one) for one, of_one in _each(name, value, inner))
    if not hasattr(kind, "from_record"):
        return value
    try:
        return kind.from_record(value)
    except ValueError as error:
        raise ValueError(f"{name}, {error}") from error
