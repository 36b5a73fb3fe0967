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

USUAL_COLUMNS = ("length", "input_ids")


def read_lengths(path: str | Path, column: str | None = None) -> list[int]:
    """The lengths in `path`, in its order. Raises ValueError, naming the file, and OSError when it
    cannot be read."""
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


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"is neither text nor gzipped text ({error})") from error


def _text(text: str, column: str | None) -> Iterable[Any]:
    """Values of a JSON list, of JSON lines, or of one integer per line."""
    first = text.lstrip()[:1]
    if first == "[":
        values: list[Any] = _json(text, "the JSON list")
        return values
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if first == "{":
        rows = [_json(line, f"line {number}") for number, line in lines]
        return _from_rows(rows, column)
    return (_integer(line, number) for number, line in lines)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error


def _integer(line: str, number: int) -> int:
    try:
        return int(line)
    except ValueError:
        raise ValueError(f"line {number} is no integer: {line.strip()[:40]!r}") from None


def _from_rows(rows: Sequence[Any], column: str | None) -> Iterable[Any]:
    name = _chosen(column, list(rows[0]))
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or name not in row:
            raise ValueError(f"row {number} has no column {name!r}")
    return (row[name] for row in rows)


def _parquet(path: Path, column: str | None) -> Iterable[Any]:
    parquet = _imported("pyarrow.parquet", "Parquet files need pyarrow")
    name = _chosen(column, parquet.read_schema(path).names)
    return _lengths_of(parquet.read_table(path, columns=[name]).column(name))


def _saved_dataset(path: Path, column: str | None) -> Iterable[Any]:
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
    """An arrow column as it is, or the lengths of its lists without making Python lists of
    them."""
    types, compute = (
        _imported(f"pyarrow.{name}", "columns need pyarrow") for name in ("types", "compute")
    )
    is_list = types.is_list(values.type) or types.is_large_list(values.type)
    column: list[Any] = (compute.list_value_length(values) if is_list else values).to_pylist()
    return column


def _imported(module: str, need: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{need}: pip install {module.partition('.')[0]}") from error


def _chosen(column: str | None, names: Sequence[str]) -> str:
    wanted = USUAL_COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    missing = (
        "no column `length` or `input_ids`: name one"
        if column is None
        else f"no column {column!r}"
    )
    raise ValueError(f"{missing} (it has {', '.join(map(str, names))})")


def _checked(values: Iterable[Any]) -> list[int]:
    lengths = [len(value) if isinstance(value, list) else value for value in values]
    if not lengths:
        raise ValueError("holds no lengths")
    for index, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int):
            raise ValueError(
                f"sequence {index} has length {str(length)[:40]!r}, which is no integer"
            )
        if length < 1:
            raise ValueError(
                f"sequence {index} has length {length}: every sequence needs at least one token"
            )
    return lengths
