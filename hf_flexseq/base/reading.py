"""Read user files: text and JSON, with limits that are checked while reading.

    read_text(path, limits)    a file or stdin, gzipped or not: never more than `limits.bytes`
    parse_json(text)           one JSON value: finite numbers, no key twice, not too deep

A file can be an endless device, a small archive of gigabytes, or JSON nested a million deep. Input
above a limit raises an error that says how to raise the limit.

Rejected: a limit on the reported file size. Devices and pipes report none, and the size of an
archive does not bound its content.
"""

import gzip
import json
import sys
import zlib
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from hf_flexseq.base.values import quoted, whole

PIECE = 1 << 20  # bytes per read

# Bytes of text per list or object in it: a list takes up to 250 bytes of memory, from 3 of text.
BYTES_PER_CONTAINER = 64

# Upper bound of a limit.
MAX_LIMIT = 2**50


class BeyondLimit(ValueError):
    """Input exceeds a limit; the message says how to raise the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the work of a command; `beyond` says how to raise them.

    With the defaults, reading and planning take about a gigabyte and ten seconds on one core.
    """

    bytes: int = 64 << 20
    """Bytes of text in a file, unpacked. As Python objects they take up to ten times as many."""
    lengths: int = 4_000_000
    """Sequences in a file."""
    tokens: int = 1_000_000_000
    """Token ids in a list column of a Parquet file."""
    sequences: int = 8192
    """Sequences of one planned step; the planner takes seconds for these."""
    ranks: int = 4096
    """Ranks of a topology or of a plan."""
    work: int = 500_000
    """Events of the timelines of a file, about ten microseconds each."""

    def __post_init__(self) -> None:
        for one in fields(self):
            whole(one.name, getattr(self, one.name), least=1, most=MAX_LIMIT)

    def refuse_above(self, name: str, amount: int, what: str) -> None:
        """Raise BeyondLimit if `amount` is above the limit `name`.

        what: the quantity in words, such as "8x8 has 64 ranks".
        """
        limit = getattr(self, name)
        if amount > limit:
            raise BeyondLimit(f"{what}: {beyond(name, limit, amount)}")


DEFAULT_LIMITS = Limits()


def beyond(name: str, limit: int, enough: int | None = None) -> str:
    """Return how to raise a limit. enough: a sufficient value, None if unknown."""
    value = "N" if enough is None else str(enough)
    return f"the limit is {limit:,} {name}, raise it with --limit {name}={value}"


# ---- text


def read_text(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return the text of a file, gzipped or not; `-` is stdin.

    Raises OSError, and ValueError if it is not text or exceeds `limits.bytes`.
    """
    if str(path) == "-":
        return _decoded(_standard_input(limits.bytes))
    with Path(path).open("rb") as file:
        if Path(path).suffix == ".gz":
            return _decoded(_unpacked(file, limits.bytes))
        return _decoded(_bytes_of(file, limits.bytes))


def _standard_input(limit: int) -> bytes:
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:  # a replaced stdin with text only
        return _bytes_of(BytesIO(sys.stdin.read(limit + 1).encode()), limit)
    return _bytes_of(binary, limit)


def _bytes_of(file: BinaryIO, limit: int) -> bytes:
    """Return all bytes of a file. Raises ValueError above `limit`, without reading on."""
    pieces = []
    count = 0
    while piece := file.read(PIECE):
        count += len(piece)
        if count > limit:
            raise ValueError(f"is too long: {beyond('bytes', limit)}")
        pieces.append(piece)
    return b"".join(pieces)


def _unpacked(file: BinaryIO, limit: int) -> bytes:
    """Return the unpacked bytes of a gzipped file. Raises ValueError above `limit`."""
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            return _bytes_of(unpacked, limit)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"is not gzipped text ({error})") from error


def _decoded(data: bytes) -> str:
    """Return bytes as text. Raises ValueError unless they are UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 text (byte {error.start} is {data[error.start]:#04x})"
        ) from error


# ---- JSON


def parse_json(text: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the JSON value in `text`.

    Raises ValueError for invalid JSON, NaN and infinity, repeated keys, numbers of thousands of
    digits, values nested deeper than Python's parser goes, and more lists and objects than memory
    holds.
    """
    containers = text.count("[") + text.count("{")
    most = max(1000, limits.bytes // BYTES_PER_CONTAINER)
    if containers > most:
        enough = containers * BYTES_PER_CONTAINER
        raise ValueError(
            f"has {containers:,} lists and objects, more than {most:,}: "
            f"{beyond('bytes', limits.bytes, enough)}"
        )
    try:
        return json.loads(
            text, parse_constant=_no_constant, object_pairs_hook=_object_without_repeats
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        if "\n" not in text.strip():
            where = f"column {error.colno}"  # one line of a file: the caller names its number
        raise ValueError(f"is not JSON ({error.msg}: {where})") from error
    except RecursionError:
        raise ValueError("nests lists or objects too deep") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"is not JSON ({name} is not a number)")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of (key, value) pairs. Raises ValueError for a repeated key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"has an object with the key {quoted(key)} twice")
            seen.add(key)
    return made
