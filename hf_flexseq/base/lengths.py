"""Read sequence lengths from a file.

* text: one integer per line, a JSON list, or JSON lines with a column; each also as `.gz`;
* a Parquet file (needs pyarrow) or a saved HuggingFace dataset (a directory; needs datasets) with
  a column.

* JSON lines of groups that share a prefix: `{"prefix": 2048, "branches": [512, 512]}`, two rows of
  2,560 tokens;
* JSON lines of rows with images: `{"text": 300, "images": [1024, {"patches": 4096, "frames": 8}]}`
  is 300 tokens of text with an image of 1,024 patches and a video of eight frames.

A column holds lengths, or lists (token ids) whose lengths count. The default column is `length` or
`input_ids`. Anything but positive lengths raises ValueError in one line, and so does input above
the limits (`reading.Limits`), which are checked while reading.
"""

import importlib
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from hf_flexseq.base.reading import DEFAULT_LIMITS, Limits, parse_json, read_text
from hf_flexseq.base.values import (
    MAX_TOKENS,
    are_whole,
    fields_of,
    in_errors,
    items,
    quoted,
    whole,
)

# Default columns, in order of preference.
USUAL_COLUMNS = ("length", "input_ids")

# Columns of a group of rows that share a prefix.
GROUP_COLUMNS = ("prefix", "branches")

# Columns of a row with images.
IMAGE_COLUMNS = ("text", "images")

COLUMNS_NAMED = 8  # columns named in a message

# Rows of a column in memory at a time.
ROWS_AT_A_TIME = 1024

# Errors of the datasets library for a broken dataset, besides ValueError.
UNREADABLE = (AttributeError, FileNotFoundError, IndexError, KeyError, RecursionError, TypeError)


class Patches(NamedTuple):
    """An image or a video, as a vision tower sees it."""

    patches: int
    frames: int | None
    """Of a video, whose patches attend to patches of their frame; None for an image."""

    @property
    def pairs(self) -> int:
        """Pairs of patches that attend to each other."""
        return self.patches**2 // (self.frames or 1)


def read_lengths(
    path: str | Path, column: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> list[int]:
    """Return the lengths in `path`, in its order.

    Raises ValueError naming the file, and OSError if it cannot be read. column: name of the
    column, None for the default. limits: on reading.
    """
    path = Path(path)
    with in_errors(path):
        if path.is_dir():
            values = _saved_dataset(path, column, limits)
        elif path.suffix == ".parquet":
            values = _parquet(path, column, limits)
        else:
            values = _text(read_text(path, limits), column, limits)
        return _checked(values)


def parse_groups(text: str, limits: Limits = DEFAULT_LIMITS) -> list[tuple[int, list[int]]] | None:
    """Return groups of rows that share a prefix, JSON lines with the tokens of the `prefix` and of
    each of the `branches` behind it; None if the first line is not such a group.

    Raises ValueError, naming the line, for anything else.
    """
    groups: list[tuple[int, list[int]]] = []
    if text.lstrip()[:1] != "{":
        return None
    for number, line in _lines(text):
        row = _json(line, f"line {number}", limits)
        if not isinstance(row, dict) or set(GROUP_COLUMNS) - set(row):
            if not groups:
                return None
            raise ValueError(f"line {number} has no {' and '.join(GROUP_COLUMNS)}")
        branches = row[GROUP_COLUMNS[1]]
        if not isinstance(branches, list):
            raise ValueError(f"line {number}: branches {quoted(branches)} are no list of tokens")
        with in_errors(f"line {number}"):
            prefix, *tokens = _checked([row[GROUP_COLUMNS[0]], *branches])
        if not tokens:
            raise ValueError(f"line {number} has no branches")
        groups.append((prefix, tokens))
    return groups


def parse_images(
    text: str, limits: Limits = DEFAULT_LIMITS
) -> list[tuple[int, list[Patches]]] | None:
    """Return rows with images, JSON lines with the tokens of the `text` and the patches of each of
    the `images`; None if the first line is not such a row.

    Raises ValueError, naming the line, for anything else.
    """
    rows: list[tuple[int, list[Patches]]] = []
    if text.lstrip()[:1] != "{":
        return None
    count = 0  # of images
    for number, line in _lines(text):
        row = _json(line, f"line {number}", limits)
        if not rows and not _counts_images(row):
            return None
        with in_errors(f"line {number}"):
            row = fields_of(row, "a row with images", needed=IMAGE_COLUMNS)
            tokens = whole("text", row["text"], most=MAX_TOKENS)
            images = [_patches(image) for image in items("images", row["images"])]
            if not tokens and not images:
                raise ValueError("a row needs tokens of text, or images")
        count += len(images)
        limits.refuse_above("lengths", count, f"has {count:,} images")
        rows.append((tokens, images))
        limits.refuse_above("lengths", len(rows), f"has {len(rows):,} rows")
    return rows


def _counts_images(row: Any) -> bool:
    """Tell if the first row of a file has the columns of rows with images, and no lengths."""
    if not isinstance(row, dict):
        return False
    return not set(IMAGE_COLUMNS) - set(row) and not set(USUAL_COLUMNS) & set(row)


def _patches(image: Any) -> Patches:
    """Return an image: its patches, or a video with its frames. Raises ValueError for others."""
    if not isinstance(image, dict):
        return Patches(whole("patches of an image", image, least=1, most=MAX_TOKENS), None)
    video = fields_of(image, "a video", needed=Patches._fields)
    patches = whole("patches of a video", video["patches"], least=1, most=MAX_TOKENS)
    frames = whole("frames of a video", video["frames"], least=1, most=MAX_TOKENS)
    if patches % frames:
        raise ValueError(f"{patches:,} patches in {frames:,} frames: give each frame as many")
    return Patches(patches, frames)


def parse_lengths(
    text: str, column: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> list[int]:
    """Return the lengths in the text of a file. Raises ValueError for other text."""
    return _checked(_text(text, column, limits))


# ---- text


def _text(text: str, column: str | None, limits: Limits) -> Sequence[Any]:
    """Return the values of a JSON list, of JSON lines, or of one integer per line."""
    first = text.lstrip()[:1]
    if first == "[":
        values: list[Any] = _json(text, "the JSON list", limits)
        limits.refuse_above("lengths", len(values), f"has {len(values):,} lengths")
        return values
    # one on each line: counted before splitting
    count = text.count("\n") + 1
    limits.refuse_above("lengths", count, f"has {count:,} lines")
    if first == "{":
        return _from_rows(_lines(text), column, limits)
    return [_integer(line, number) for number, line in _lines(text)]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line that is not empty."""
    for number, line in enumerate(StringIO(text), 1):
        if line.strip():
            yield number, line


def _json(text: str, where: str, limits: Limits) -> Any:
    """Return the JSON value in `text`. Raises ValueError, naming the place, for other text."""
    try:
        return parse_json(text, limits)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def _integer(line: str, number: int) -> int:
    """Return the integer on a line. Raises ValueError, naming the line, for other text."""
    try:
        return int(line)
    except ValueError:
        raise ValueError(f"line {number} is not an integer: {quoted(line.strip())}") from None


def _from_rows(
    lines: Iterator[tuple[int, str]], column: str | None, limits: Limits
) -> Sequence[int]:
    """Return the column's length of each row, one row to a line."""
    name = None
    values = []
    for index, (number, line) in enumerate(lines):
        row = _json(line, f"line {number}", limits)
        if index == 0 and isinstance(row, dict):
            name = _chosen(column, list(row))
        if not isinstance(row, dict) or name not in row:
            raise ValueError(f"line {number} has no column {quoted(name)}")
        values.append(_length_of(row[name]))  # lists of token ids are not kept
    return values


# ---- columns


def _parquet(path: Path, column: str | None, limits: Limits) -> Sequence[Any]:
    """Return the lengths in a column of a Parquet file.

    A few bytes can encode billions of equal values. So rows are counted before unpacking, and
    token ids during it. Column statistics are not used: a broken one aborts the process (pyarrow
    26).
    """
    parquet = _imported("pyarrow.parquet", "Parquet files need pyarrow")
    pyarrow = _imported("pyarrow", "Parquet files need pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            name = _chosen(column, file.schema_arrow.names)
            rows = file.metadata.num_rows
            limits.refuse_above("lengths", rows, f"has {rows:,} rows")
            lengths: list[Any] = []
            tokens = 0
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=[name]):
                values = batch.column(0)
                if hasattr(values, "flatten"):  # of lists
                    tokens += len(values.flatten())
                    limits.refuse_above("tokens", tokens, f"has {tokens:,} token ids and more")
                lengths += _lengths_of(values)
            return lengths
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ValueError(f"is not a readable Parquet file ({error})") from error


def _saved_dataset(path: Path, column: str | None, limits: Limits) -> Sequence[Any]:
    """Return the lengths in a column of a saved HuggingFace dataset."""
    datasets = _imported("datasets", "saved datasets need the datasets library")
    pyarrow = _imported("pyarrow", "saved datasets need pyarrow")
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise ValueError("is not a saved dataset")
    logs = datasets.utils.logging
    verbosity = logs.get_verbosity()
    logs.set_verbosity_error()  # it logs long warnings about unknown files
    try:
        dataset = datasets.load_from_disk(str(path))
        if isinstance(dataset, datasets.DatasetDict):
            raise ValueError(
                f"holds several splits: give the directory of one of {', '.join(dataset)}"
            )
        name = _chosen(column, dataset.column_names)
        limits.refuse_above("lengths", len(dataset), f"has {len(dataset):,} rows")
        # The raw table: a format's fingerprint would need a pickle.
        return _lengths_of(dataset.data.column(name))
    except UNREADABLE as error:
        raise ValueError(f"is not a readable saved dataset ({error!r})") from error
    except pyarrow.ArrowException as error:
        raise ValueError(f"is not a readable saved dataset ({error})") from error
    finally:
        logs.set_verbosity(verbosity)


def _lengths_of(values: Any) -> Sequence[Any]:
    """Return the values of an arrow column, or the lengths of its lists without unpacking them."""
    types = _imported("pyarrow.types", "columns need pyarrow")
    compute = _imported("pyarrow.compute", "columns need pyarrow")
    if types.is_list(values.type) or types.is_large_list(values.type):
        values = compute.list_value_length(values)
    elif not types.is_integer(values.type):
        raise ValueError(f"holds values of type {values.type}: expected whole numbers")
    column: list[Any] = values.to_pylist()
    return column


def _imported(module: str, need: str) -> Any:
    """Return a module. Raises ValueError with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{need}: pip install {module.partition('.')[0]}") from error


def _chosen(column: str | None, names: Sequence[str]) -> str:
    """Return the column to read. Raises ValueError if `names` lacks it."""
    wanted = USUAL_COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    missing = f"no column {quoted(column)}"
    if column is None:
        missing = "no column `length` or `input_ids`: name one"
    shown = ", ".join(map(str, names[:COLUMNS_NAMED]))
    more = ", ..." if len(names) > COLUMNS_NAMED else ""
    raise ValueError(f"{missing} (it has {shown}{more})")


# ---- values


def _length_of(value: Any) -> Any:
    """Return the length of a list, and any other value as it is."""
    return len(value) if isinstance(value, list) else value


def _checked(values: Sequence[Any]) -> list[int]:
    """Return the lengths. Raises ValueError for invalid values."""
    lengths = [_length_of(value) for value in values]
    if not lengths:
        raise ValueError("holds no lengths")
    if are_whole(lengths, least=1, most=MAX_TOKENS):
        return lengths
    for index, length in enumerate(lengths):
        whole(f"tokens of sequence {index}", length, least=1, most=MAX_TOKENS)
    return lengths
