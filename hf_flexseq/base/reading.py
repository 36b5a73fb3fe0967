"""Read what a user hands over: text and JSON, with limits that hold while reading.

    read_text(path, limits)    a file or stdin, gzipped or not: never more than `limits.bytes`
    parse_json(text)           one JSON value: finite numbers, no key twice, not too deep

A file can be anything: an endless device, a small archive of gigabytes, JSON that is nested a
million deep. What goes beyond a limit is refused in one line that says how to raise it.

Rejected: a limit on the size that the file system reports. Devices and pipes report none, and an
archive's says nothing of its content.
"""

import gzip
import json
import sys
import zlib
from dataclasses import dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from hf_flexseq.base.values import quoted, whole

PIECE = 1 << 20  # bytes that are read at a time

# Bytes of text per list or object in it: a list takes up to 250 bytes of memory, from 3 of text.
BYTES_PER_CONTAINER = 64

# The most that a limit can be raised to.
MAX_LIMIT = 2**50


class BeyondLimit(ValueError):
    """Something is more work than a limit allows; the message says how to raise it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much work a command takes on; each can be raised, see `beyond`.

    With the defaults everything that is read or decided stays within about a gigabyte of memory
    and ten seconds on one core.
    """

    bytes: int = 64 << 20
    """Bytes of text in a file, unpacked. As Python objects they take up to ten times as many."""
    lengths: int = 4_000_000
    """Sequences in a file."""
    tokens: int = 1_000_000_000
    """Token ids in a column of a Parquet file, whose lists are counted."""
    sequences: int = 8192
    """Sequences of one step that is planned: the planner takes seconds for these."""
    ranks: int = 4096
    """Ranks of a topology or of a plan."""
    work: int = 500_000
    """Events of the timelines of a file: about ten microseconds each."""

    def __post_init__(self) -> None:
        for one in fields(self):
            whole(one.name, getattr(self, one.name), least=1, most=MAX_LIMIT)

    def refuse_above(self, name: str, amount: int, what: str) -> None:
        """Raise BeyondLimit when `amount` is above the limit `name`.

        what: that there are so many of, such as "8x8 has 64 ranks".
        """
        limit = getattr(self, name)
        if amount > limit:
            raise BeyondLimit(f"{what}: {beyond(name, limit, amount)}")

    def with_values(self, values: list[tuple[str, int]]) -> "Limits":
        """Return these limits with some of them set to other values, as (name, value) pairs."""
        return replace(self, **dict(values))


DEFAULT_LIMITS = Limits()


def beyond(name: str, limit: int, enough: int | None = None) -> str:
    """Return the words that say what a limit is and how to raise it. enough: a value that would
    do, None when nobody knows."""
    value = "N" if enough is None else str(enough)
    return f"the limit is {limit:,} {name}, raise it with --limit {name}={value}"


# ---- text


def read_text(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return the text of a file, gzipped or not; `-` is stdin.

    Raises ValueError for what is no text or above `limits.bytes`, and OSError.
    """
    if str(path) == "-":
        return _decoded(_standard_input(limits.bytes))
    with Path(path).open("rb") as file:
        if Path(path).suffix == ".gz":
            return _decoded(_unpacked(file, limits.bytes))
        return _decoded(_bytes_of(file, limits.bytes))


def _standard_input(limit: int) -> bytes:
    """Return the bytes that come from stdin."""
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:  # a stand-in that has only text
        return _bytes_of(BytesIO(sys.stdin.read(limit + 1).encode()), limit)
    return _bytes_of(binary, limit)


def _bytes_of(file: BinaryIO, limit: int) -> bytes:
    """Return all bytes of a file. Raises ValueError as soon as there are more than `limit`."""
    pieces = []
    count = 0
    while piece := file.read(PIECE):
        count += len(piece)
        if count > limit:
            raise ValueError(f"is too long: {beyond('bytes', limit)}")
        pieces.append(piece)
    return b"".join(pieces)


def _unpacked(file: BinaryIO, limit: int) -> bytes:
    """Return the unpacked bytes of a gzipped file, of which there are at most `limit`."""
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            return _bytes_of(unpacked, limit)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"is not gzipped text ({error})") from error


def _decoded(data: bytes) -> str:
    """Return bytes as text. Raises ValueError for other than UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no text in UTF-8 (byte {error.start} is {data[error.start]:#04x})"
        ) from error


# ---- JSON


def parse_json(text: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the JSON value in `text`.

    Raises ValueError for other text, for NaN and infinity, a key that an object has twice, numbers
    of thousands of digits, values nested hundreds deep, and more lists and objects than memory
    holds.
    """
    containers = text.count("[") + text.count("{")
    most = max(1000, limits.bytes // BYTES_PER_CONTAINER)
    if containers > most:
        enough = containers * BYTES_PER_CONTAINER
        raise ValueError(
            f"has {containers:,} lists and objects, at most {most:,} are taken: "
            f"{beyond('bytes', limits.bytes, enough)}"
        )
    try:
        return json.loads(
            text, parse_constant=_no_constant, object_pairs_hook=_object_without_repeats
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        if "\n" not in text.strip():
            where = f"column {error.colno}"  # a line of a file, which has another number there
        raise ValueError(f"is not JSON ({error.msg}: {where})") from error
    except RecursionError:
        raise ValueError("is not read: lists or objects are nested too deep") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"is not JSON ({name} is no number)")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these (key, value) pairs. Raises ValueError for a key that is there
    twice: which of its values counts differs from reader to reader."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"is not read: an object has the key {quoted(key)} twice")
            seen.add(key)
    return made
