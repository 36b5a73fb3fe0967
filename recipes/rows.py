"""Checks of what was loaded: a mistake in the data is named before anything is tokenized."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from arguments import CorpusArguments

BATCH = 10_000  # rows that are looked at together


def check_rows(documents: Dataset, columns: tuple[str, ...], args: CorpusArguments) -> None:
    """Raise ValueError where one of the columns holds neither text nor messages, as it should, or
    has nothing in a row. Rows are counted from 1."""
    if not len(documents):
        raise ValueError(f"{args.dataset} has no rows")
    for column in columns:
        kind, wanted = kind_of(documents, column), args.kinds(column)
        if kind not in wanted:
            raise ValueError(
                f"column {column!r} of {args.dataset} holds {kind}: give {' or '.join(wanted)}"
            )
        missing = list(_rows_without(documents, column))
        if missing:
            raise ValueError(
                f"{args.dataset} has nothing in column {column!r} of {len(missing):,} of its "
                f"{len(documents):,} rows, of row {missing[0]:,} first: fill them or leave them "
                "out"
            )


def check_template(
    documents: Dataset,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    args: CorpusArguments,
) -> None:
    """Raise ValueError where messages are to be written by a tokenizer without a template."""
    for column in columns:
        if kind_of(documents, column) == "messages" and not tokenizer.chat_template:
            raise ValueError(
                f"column {column!r} of {args.dataset} holds messages, and the tokenizer "
                f"{tokenizer.name_or_path} has no chat template to write them: name the tokenizer "
                "of a chat model as tokenizer_name_or_path, or write the messages out as text"
            )


def check_longer(
    longer: int, count: int, what: str, limit: str, choice: str | None, advice: str
) -> None:
    """Raise ValueError if some documents are too long and the options do not say what to do.

    longer, count: numbers of `what`. limit: the option and its value. choice: what the options
    say. advice: what to set.
    """
    if longer and choice is None:
        raise ValueError(
            f"{longer:,} of {count:,} {what} are longer than {limit} tokens: set {advice}, or "
            f"raise {limit.partition('=')[0]}"
        )


def kind_of(documents: Dataset, column: str) -> str:
    """Return what a column holds: text, messages, or words for anything else."""
    type_ = documents.features.arrow_schema.field(column).type
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "text"
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)):
        return f"values other than text ({type_})"
    message = type_.value_type
    if not pa.types.is_struct(message):
        return f"lists of {message}"
    names = [message.field(index).name for index in range(message.num_fields)]
    if {"role", "content"} <= set(names):
        return "messages"
    return f"lists with {' and '.join(names)}, where messages have role and content"


def _rows_without(documents: Dataset, column: str) -> Iterator[int]:
    """Yield the numbers, from 1, of rows that have nothing in a column."""
    tables = documents.select_columns([column]).with_format("arrow").iter(BATCH)
    for batch, table in enumerate(tables):
        values = table.column(column)
        if values.null_count:
            for index in pc.indices_nonzero(pc.is_null(values)).to_pylist():
                yield batch * BATCH + index + 1


def is_blank(path: Path) -> bool:
    """Return whether a file has nothing but white space."""
    with path.open("rb") as lines:
        return not any(line.strip() for line in lines)


def broken_line(path: Path) -> str | None:
    """Return which line of a file is the first that is not a JSON object, and why; None without
    any."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                return f"line {number:,} is not JSON ({error.msg}, column {error.colno:,})"
            except UnicodeDecodeError:
                return f"line {number:,} is not UTF-8"
            if not isinstance(row, dict):
                return f'line {number:,} is not a row with names, such as {{"text": "..."}}'
    return None
