"""Read sequence lengths from what a user has.

* text: one integer per line, a JSON list, or JSON lines with a column; each also as `.gz`;
* a Parquet file (needs pyarrow) or a saved HuggingFace dataset (a directory; needs datasets) with
  a column.

A column holds the lengths themselves, or lists (token ids), whose lengths count. Without a name,
`length` or `input_ids` is taken. Everything that is no list of positive lengths raises ValueError
in one line.
"""

import gzip
import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Columns that are taken when the user names none, in this order.
USUAL_COLUMNS = ("length", "input_ids")

# Most characters of a wrong value that a message repeats.
QUOTED = 40


def read_lengths(path: str | Path, column: str | None = None) -> list[int]:
    """Return the lengths in `path`, in its order.

    Raises ValueError, naming the file, and OSError when it cannot be read. column: name of the
    column, None for a usual one.
    """
    path = Path(path)
    try:
        if path.is_dir():
            values = _saved_dataset(path, column)
        elif path.suffix == ".parquet":
            values = _parquet(path, column)
        else:
            values = _text(_read_text(path), column)
        return _checked(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# ---- text


def _read_text(path: Path) -> str:
    """Return the text of a file, gzipped or not."""
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"is neither text nor gzipped text ({error})") from error


def _text(text: str, column: str | None) -> Iterable[Any]:
    """Return the values of a JSON list, of JSON lines, or of one integer per line."""
    first = text.lstrip()[:1]
    if first == "[":
        values: list[Any] = _json(text, "the JSON list")
        return values
    lines = []  # (number, line), empty lines left out
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            lines.append((number, line))
    if first == "{":
        rows = [_json(line, f"line {number}") for number, line in lines]
        return _from_rows(rows, column)
    return [_integer(line, number) for number, line in lines]


def _json(text: str, where: str) -> Any:
    """Return the JSON value in `text`. Raises ValueError, saying where, for other text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error


def _integer(line: str, number: int) -> int:
    """Return the integer on a line. Raises ValueError, naming the line, for other text."""
    try:
        return int(line)
    except ValueError:
        raise ValueError(f"line {number} is no integer: {line.strip()[:QUOTED]!r}") from None


def _from_rows(rows: Sequence[Any], column: str | None) -> Iterable[Any]:
    """Return the column's value of each row."""
    name = _chosen(column, list(rows[0]))
    values = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or name not in row:
            raise ValueError(f"row {number} has no column {name!r}")
        values.append(row[name])
    return values


# ---- columns


def _parquet(path: Path, column: str | None) -> Iterable[Any]:
    """Return the lengths in a column of a Parquet file."""
    parquet = _imported("pyarrow.parquet", "Parquet files need pyarrow")
    name = _chosen(column, parquet.read_schema(path).names)
    return _lengths_of(parquet.read_table(path, columns=[name]).column(name))


def _saved_dataset(path: Path, column: str | None) -> Iterable[Any]:
    """Return the lengths in a column of a saved HuggingFace dataset."""
    datasets = _imported("datasets", "saved datasets need the datasets library")
    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError("is no saved dataset") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise ValueError(
            f"holds several splits: give the directory of one of {', '.join(dataset)}"
        )
    name = _chosen(column, dataset.column_names)
    return _lengths_of(dataset.with_format("arrow")[:][name])


def _lengths_of(values: Any) -> Iterable[Any]:
    """Return the values of an arrow column, or the lengths of its lists.

    Lists are measured where they are, without making Python lists of them.
    """
    types = _imported("pyarrow.types", "columns need pyarrow")
    compute = _imported("pyarrow.compute", "columns need pyarrow")
    if types.is_list(values.type) or types.is_large_list(values.type):
        values = compute.list_value_length(values)
    column: list[Any] = values.to_pylist()
    return column


def _imported(module: str, need: str) -> Any:
    """Return a module. Raises ValueError, saying what to install, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{need}: pip install {module.partition('.')[0]}") from error


def _chosen(column: str | None, names: Sequence[str]) -> str:
    """Return the column to read. Raises ValueError when `names` do not have it."""
    wanted = USUAL_COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    missing = f"no column {column!r}"
    if column is None:
        missing = "no column `length` or `input_ids`: name one"
    raise ValueError(f"{missing} (it has {', '.join(map(str, names))})")


# ---- values


def _checked(values: Iterable[Any]) -> list[int]:
    """Return the lengths that are, or that lists have. Raises ValueError for other values."""
    lengths = [len(value) if isinstance(value, list) else value for value in values]
    if not lengths:
        raise ValueError("holds no lengths")
    for index, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int):
            raise ValueError(
                f"sequence {index} has length {str(length)[:QUOTED]!r}, which is no integer"
            )
        if length < 1:
            raise ValueError(
                f"sequence {index} has length {length}: every sequence needs at least one token"
            )
    return lengths
