"""Lengths in every form a user may have them, and one clear line for what is none."""

import gzip
import json
import pickle
import sys
from pathlib import Path

import pytest

from hf_flexseq.base.lengths import read_lengths
from hf_flexseq.base.reading import Limits

LENGTHS = [5, 1, 300]
ROWS = [{"length": n, "input_ids": [0] * (n + 1), "text": "x"} for n in LENGTHS]


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text(tmp_path: Path, suffix: str) -> None:
    assert (
        read_lengths(written(tmp_path / f"a.json{suffix}", json.dumps(LENGTHS, indent=1)))
        == LENGTHS
    )
    assert read_lengths(written(tmp_path / f"a.txt{suffix}", "5\n 1\n\n300\n")) == LENGTHS
    lines = "\n".join(map(json.dumps, ROWS))
    assert read_lengths(written(tmp_path / f"a.jsonl{suffix}", lines)) == LENGTHS
    assert read_lengths(tmp_path / f"a.jsonl{suffix}", "input_ids") == [6, 2, 301]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet") == LENGTHS
    assert read_lengths(tmp_path / "a.parquet", "input_ids") == [6, 2, 301]
    with pytest.raises(ValueError, match="holds values of type string: expected whole"):
        read_lengths(tmp_path / "a.parquet", "text")
    with pytest.raises(ValueError, match=r"no column 'tokens' \(it has length, input_ids, text\)"):
        read_lengths(tmp_path / "a.parquet", "tokens")


@pytest.mark.parametrize("name, column", [("lengths", None), ("tokens", "input_ids")])
def test_a_parquet_file_beyond_the_limits_is_refused(
    tmp_path: Path, name: str, column: str | None
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"length": [7] * 5000, "input_ids": [[1] * 100] * 5000})
    parquet.write_table(table, tmp_path / "a.parquet")
    limits = {"lengths": Limits(lengths=4999), "tokens": Limits(tokens=499_999)}[name]
    with pytest.raises(ValueError, match=f"raise it with --limit {name}="):
        read_lengths(tmp_path / "a.parquet", column, limits)
    assert read_lengths(tmp_path / "a.parquet", "input_ids") == [100] * 5000


def test_a_pickle_in_a_saved_dataset_is_not_loaded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    class Planted:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(tmp_path / "mark"), "w")

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    names = [path.name for path in (tmp_path / "saved").iterdir()]
    assert len(names) == 3
    for name in names:
        whole = (tmp_path / "saved" / name).read_bytes()
        (tmp_path / "saved" / name).write_bytes(pickle.dumps(Planted()))
        with pytest.raises((ValueError, OSError)):
            read_lengths(tmp_path / "saved")
        (tmp_path / "saved" / name).write_bytes(whole)
    assert not (tmp_path / "mark").exists()
    assert read_lengths(tmp_path / "saved") == LENGTHS


def test_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.select([2, 0]).save_to_disk(tmp_path / "chosen")
    saved.remove_columns("length").save_to_disk(tmp_path / "tokens")
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "splits")
    assert read_lengths(tmp_path / "chosen") == [300, 5]
    assert read_lengths(tmp_path / "tokens") == [6, 2, 301]
    with pytest.raises(ValueError, match="several splits: give the directory of one of train"):
        read_lengths(tmp_path / "splits")
    with pytest.raises(ValueError, match="is not a"):
        read_lengths(tmp_path)


@pytest.mark.parametrize(
    "text, column, message",
    [
        ("", None, "holds no lengths"),
        ("[]", None, "holds no lengths"),
        ("5\n0\n", None, "sequence 1 has length 0: every sequence needs at least one token"),
        ("[5, -3]", None, "sequence 1 has length -3"),
        ("[5, 2.5]", None, "sequence 1 has length 2.5: expected an integer"),
        ("[5, true]", None, "expected an integer"),
        ("5\nlong\n", None, "line 2 is not an integer: 'long'"),
        ("[5, ", None, "the JSON list is not JSON"),
        ('{"length": 5}\n{"length"', None, "line 2 is not JSON"),
        ('{"tokens": 5}', None, r"no column `length` or `input_ids`: name one \(it has tokens\)"),
        ('{"tokens": 5}\n{"length": 5}', "tokens", "line 2 has no column 'tokens'"),
        ('{"tokens": 5}', "size", "no column 'size'"),
    ],
)
def test_refuses_what_is_no_list_of_lengths(
    tmp_path: Path, text: str, column: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_lengths(written(tmp_path / "a.txt", text), column)
    assert "\n" not in str(caught.value)


def test_refuses_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_lengths(tmp_path / "missing.txt")
    for name in ("broken.gz", "binary.txt", "broken.parquet"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=name):
            read_lengths(tmp_path / name)


def test_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    written(tmp_path / "a.parquet", "")
    with pytest.raises(ValueError, match="need pyarrow: pip install pyarrow"):
        read_lengths(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="need the datasets library: pip install datasets"):
        read_lengths(tmp_path)
