"""Where documents come from: a hub dataset, local files, or the running Python's standard library.

A document is a row in one of three forms:

    text                      one column (`text_column`); every token is a target
    messages                  a conversation, through the chat template; the assistant's turns are
                              targets
    prompt, completion        two columns; only the completion is a target

Rows of alpaca and sharegpt are written in these forms (`other_forms.py`).

`pairs.py` and `prompts.py` say what documents of preference tuning and reinforcement learning are.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from arguments import CorpusArguments
from other_forms import in_own_form
from rows import broken_line, check_rows, is_blank

STDLIB = "python-stdlib"
FILE_TYPES = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}


def load_stdlib() -> Dataset:
    """Return the standard library's modules, one a row."""
    return Dataset.from_generator(stdlib_files, gen_kwargs=stdlib())


# Corpora that are made here, by their names.
MADE: Mapping[str, Callable[[], Dataset]] = {STDLIB: load_stdlib}


def load_documents(
    args: CorpusArguments, made: Mapping[str, Callable[[], Dataset]] = MADE
) -> tuple[Dataset, Dataset]:
    """Return (train, held out), still as text, in an order that is always the same.

    made: what returns those corpora that are made and not loaded. Raises ValueError, OSError, or
    an error of `datasets`, for what cannot be loaded or is no corpus.
    """
    train = in_own_form(_load_split(args, args.dataset_split, made), args)
    columns = document_columns(train, args)
    check_rows(train, columns, args)
    if args.held_out_split:
        held_out = in_own_form(_load_split(args, args.held_out_split, made), args)
        check_rows(held_out, document_columns(held_out, args), args)
    else:
        count = len(train)
        train, held_out = set_aside(train, args.hashed(columns), args.held_out_fraction)
        if not len(train):
            raise ValueError(
                f"held_out_fraction={args.held_out_fraction} sets all {count:,} documents of "
                f"{args.dataset} aside: give more documents, or another fraction"
            )
    return _spread(train, args.max_train_documents), _spread(held_out, args.max_held_out_documents)


def document_columns(documents: Dataset, args: CorpusArguments) -> tuple[str, ...]:
    """Return the columns that make up a document."""
    for columns in args.forms.values():
        if set(columns) <= set(documents.column_names):
            return columns
    forms = list(args.forms)
    wanted = f"neither {', nor '.join(forms)}" if len(forms) > 1 else f"no column {forms[0]!r}"
    raise ValueError(
        f"{args.dataset} has {wanted}: its columns are {', '.join(documents.column_names)}"
    )


def _load_split(
    args: CorpusArguments, split: str, made: Mapping[str, Callable[[], Dataset]]
) -> Dataset:
    if args.dataset in made:
        return made[args.dataset]()
    path = Path(args.dataset)
    if path.is_file():
        return _load_file(path, split)
    if (path / "dataset_dict.json").exists():
        splits = load_from_disk(str(path))
        if split not in splits:
            raise ValueError(f"{path} has no split {split!r}: it has {', '.join(splits)}")
        return splits[split]
    if (path / "state.json").exists():
        return load_from_disk(str(path))
    is_path = path.suffix in FILE_TYPES or args.dataset.startswith((".", "/", "~"))
    if is_path and not path.exists():
        raise ValueError(f"dataset={args.dataset!r}: no such file or folder")
    try:
        return load_dataset(args.dataset, args.dataset_config, split=split)
    except DatasetGenerationError as error:
        raise ValueError(f"{args.dataset} cannot be read: {error.__cause__}") from error


def _load_file(path: Path, split: str) -> Dataset:
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"{path}: a local file must be one of {', '.join(FILE_TYPES)}")
    if is_blank(path):
        raise ValueError(f"{path} is empty")
    whole = {"sample_by": "document"} if path.suffix == ".txt" else {}
    try:
        return load_dataset(
            FILE_TYPES[path.suffix], data_files={split: str(path)}, split=split, **whole
        )
    except (DatasetGenerationError, ValueError) as error:
        reason = broken_line(path) if path.suffix == ".jsonl" else None
        raise ValueError(f"{path} cannot be read: {reason or error.__cause__ or error}") from error


def stdlib(*sources: str) -> dict[str, str]:
    """Return where the standard library is, and which one it is, in which version of this file
    and of further `sources`."""
    digest = hashlib.sha256()
    for source in (__file__, *sources):
        digest.update(Path(source).read_bytes())
    version = f"{sys.version} {digest.hexdigest()}"
    return {"root": sysconfig.get_paths()["stdlib"], "version": version}


def stdlib_files(root: str, version: str) -> Iterator[dict[str, str]]:
    """Yield the standard library's own modules, without its tests and what was installed into it.

    version: unused here, but `datasets` caches by the arguments and the name of this function:
    another Python under the same path is another corpus, and so is what other code makes of it.
    """
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for path in sorted(Path(root).rglob("*.py")):
        name = path.relative_to(root)
        text = path.read_bytes().decode("utf-8", errors="replace")
        if text.strip() and skipped.isdisjoint(name.parts):
            yield {"path": str(name), "text": text}


def set_aside(
    documents: Dataset, columns: tuple[str, ...], fraction: float
) -> tuple[Dataset, Dataset]:
    """Return (kept, held out) by a hash of the content.

    A document's side depends on nothing else, and two copies of one are on the same side.
    """
    options = {"columns": columns, "fraction": fraction}
    kept = documents.filter(_on_side, fn_kwargs=options | {"held_out": False})
    held_out = documents.filter(_on_side, fn_kwargs=options | {"held_out": True})
    return kept, held_out


def _on_side(row: dict, columns: tuple[str, ...], fraction: float, held_out: bool) -> bool:
    """Return whether a document is on the held-out side, or on the other one."""
    content = json.dumps([row[column] for column in columns], sort_keys=True).encode()
    number = int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64  # in [0, 1)
    return (number < fraction) == held_out


def _spread(documents: Dataset, limit: int | None) -> Dataset:
    """Return at most `limit` documents, spread over the corpus: neighbours are often alike."""
    if limit is None or limit >= len(documents):
        return documents
    return documents.select([i * len(documents) // limit for i in range(limit)])
