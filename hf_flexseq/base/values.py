"""Check external values: types, bounds, keys and versions of records.

Files, pipes and options bring values of any type and size. A value that passes is finite, and
small enough that sums of it are exact in 63 bits. A failed check raises ValueError with one line,
shorter than `LINE` characters, that names the value.
"""

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import countOf
from typing import Any

# ---- bounds

# Tokens of a sequence: positions are int32 on devices, and a squared length fits 63 bits.
MAX_TOKENS = 2**31 - 1

# Token limit of a rank: fits 63 bits times any number of ranks.
MAX_TOKENS_PER_RANK = 2**40

# Ranks of a job: more than any machine has, few enough to loop over.
MAX_RANKS = 2**20

# Other counts: steps, layers, chunks, heads.
MAX_COUNT = 2**31 - 1

# Seconds of a step or a part of it (31 years): sums in nanoseconds fit 63 bits.
MAX_SECONDS = 1e9

# Bytes, and bytes per second: sums fit 63 bits.
MAX_BYTES = 2.0**60

# Characters of a name, and of a note for people.
MAX_NAME = 200
MAX_NOTE = 2000

# Version of every record written here. Records without a version are of version 1.
VERSION = 1

# ---- messages

LINE = 300  # characters of a message
QUOTED = 60  # characters of a rejected value in a message
NAMES_LISTED = 3  # names in a message

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = QUOTED


def quoted(value: object) -> str:
    """Return the printable `repr` of a value, shortened if it is long or deep."""
    return printable(_SHORT.repr(value))


def several(count: int, noun: str) -> str:
    """Return a count with its noun: 1 image, 2,000 images."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a question that names the nearest one of
    the known names; nothing if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {quoted(near[0].removeprefix('--'))}?" if near else ""


def printable(text: str) -> str:
    """Return `text` with characters escaped that would act on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def one_line(text: str, most: int = LINE) -> str:
    """Return `text` as one line of at most `most` printable characters."""
    line = printable(" ".join(text.split()))
    if len(line) > most:
        line = line[: most - 3] + "..."
    return line


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, on one line."""
    first = ", ".join(names[:NAMES_LISTED])
    others = len(names) - NAMES_LISTED
    return first if others <= 0 else f"{first} and {others} others"


@contextmanager
def in_errors(place: object) -> Iterator[None]:
    """Begin a ValueError of the block with a place, such as the path of a file that it reads."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


# ---- single values


def whole(name: str, value: Any, *, least: int = 0, most: int = MAX_COUNT) -> int:
    """Return `value`. Raises ValueError unless it is a whole number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={quoted(value)}: must be a whole number")
    if value < least:
        raise ValueError(f"{name}={quoted(value)}: must be at least {least:,}")
    if value > most:
        raise ValueError(f"{name}={quoted(value)}: must be at most {most:,}")
    return value


def number(name: str, value: Any, *, least: float = 0.0, most: float = MAX_BYTES) -> float:
    """Return `value`. Raises ValueError unless it is a finite number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name}={quoted(value)}: must be a finite number")
    if value < least:
        limit = "not be negative" if least == 0 else f"be at least {least:.10g}"
        raise ValueError(f"{name}={quoted(value)}: must {limit}")
    if value > most:
        raise ValueError(f"{name}={quoted(value)}: must be at most {most:.10g}")
    return value


def positive(name: str, value: Any, *, most: float = MAX_BYTES) -> float:
    """Return `value`. Raises ValueError unless it is a finite number in (0, most]."""
    if number(name, value, most=most) == 0:
        raise ValueError(f"{name}={quoted(value)}: must be positive")
    return value  # type: ignore[no-any-return]


def duration(name: str, value: Any) -> float:
    """Return `value`. Raises ValueError unless it is a valid number of seconds."""
    return number(name, value, most=MAX_SECONDS)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value`. Raises ValueError unless it is one of the strings `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {quoted(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return `value`. Raises ValueError unless it is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name}={quoted(value)}: must be true or false")
    return value


def word(name: str, value: Any, *, most: int = MAX_NAME) -> str:
    """Return `value`. Raises ValueError unless it is one line of printable characters."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={quoted(value)}: must be a string")
    if len(value) > most:
        raise ValueError(f"{name}={quoted(value)}: must have at most {most:,} characters")
    if not value.isprintable():
        raise ValueError(f"{name}={quoted(value)}: must be one line without control characters")
    return value


# ---- many values


def items(name: str, value: Any) -> Sequence[Any]:
    """Return `value`. Raises ValueError unless it is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={quoted(value)}: must be a list")
    return value


def wholes(name: str, value: Any, *, least: int = 0, most: int = MAX_COUNT) -> tuple[int, ...]:
    """Return a list as a tuple. Raises ValueError unless it holds whole numbers in [least, most].

    The message names the first other value.
    """
    numbers = tuple(items(name, value))
    if not are_whole(numbers, least=least, most=most):
        for index, one in enumerate(numbers):
            whole(f"{name}[{index}]", one, least=least, most=most)
    return numbers


def are_whole(values: Sequence[Any], *, least: int, most: int) -> bool:
    """Return True if all values are whole numbers in [least, most], or if there are no values."""
    if not values:
        return True
    # No Python call per value; `type` tells True from 1.
    if countOf(map(type, values), int) < len(values):
        return False
    return bool(least <= min(values) and max(values) <= most)


def words(name: str, value: Any) -> tuple[str, ...]:
    """Return a list as a tuple. Raises ValueError unless it holds one-line strings."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={quoted(value)}: must be a list of strings")
    return tuple(word(f"{name}[{index}]", one, most=MAX_NOTE) for index, one in enumerate(value))


# ---- records


def fields_of(
    record: Any, what: str, *, needed: Iterable[str], optional: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return `record`. Raises ValueError unless it is a JSON object with these keys and a
    supported version.

    what: its name in messages, such as "a plan".
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"not {what}: expected a JSON object, got {type(record).__name__}")
    check_version(record, what)
    needed = set(needed)
    missing = needed - record.keys()
    if missing:
        raise ValueError(f"not {what}: missing keys {quoted(sorted(missing))}")
    unknown = record.keys() - needed - set(optional) - {"version"}
    if unknown:
        raise ValueError(f"not {what}: unknown keys {quoted(sorted(map(str, unknown)))}")
    return record


def check_version(record: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless this release reads the record's version."""
    version = record.get("version", 1)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{what} of version {quoted(version)}: this hf_flexseq reads version {VERSION}; "
            "read it with the release that wrote it"
        )
