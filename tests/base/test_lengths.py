"""Lengths in every form that a user may have them, and one clear line for anything else."""

import gzip
import json
import pickle
import sys

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from hf_flexseq.base.lengths import Patches, parse_groups, parse_images, read_lengths
from hf_flexseq.base.reading import Limits
from tests.planted import Planted, marks

LENGTHS = [5, 1, 300]
ROWS = [{"length": n, "input_ids": [0] * (n + 1), "text": "x"} for n in LENGTHS]
TOKENS = [6, 2, 301]


@pytest.mark.parametrize(
    "text", [json.dumps(LENGTHS, indent=1), "5\n 1\n\n300\n", "\n".join(map(json.dumps, ROWS))]
)
def test_text(tmp_path, text):
    (tmp_path / "a").write_text(text)
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a", "a.gz"):
        assert read_lengths(tmp_path / name) == LENGTHS
        if "input_ids" in text:
            assert read_lengths(tmp_path / name, "input_ids") == TOKENS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read_lengths(path) == LENGTHS
    assert read_lengths(path, "input_ids") == TOKENS
    with pytest.raises(ValueError, match="holds values of type string: expected whole"):
        read_lengths(path, "text")
    with pytest.raises(ValueError, match=r"no column 'tokens' \(it has length, input_ids, text\)"):
        read_lengths(path, "tokens")


def test_a_parquet_file_beyond_the_limits_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"length": [7] * 5000, "input_ids": [[1] * 10] * 5000})
    parquet.write_table(table, path)
    with pytest.raises(ValueError, match="raise it with --limit lengths="):
        read_lengths(path, None, Limits(lengths=4999))
    with pytest.raises(ValueError, match="raise it with --limit tokens="):
        read_lengths(path, "input_ids", Limits(tokens=49_999))
    assert read_lengths(path, "input_ids") == [10] * 5000


def test_a_saved_dataset(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.select([2, 0]).save_to_disk(tmp_path / "chosen")
    saved.remove_columns("length").save_to_disk(tmp_path / "tokens")
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "splits")
    assert read_lengths(tmp_path / "chosen") == [300, 5]
    assert read_lengths(tmp_path / "tokens") == TOKENS
    with pytest.raises(ValueError, match="several splits: give the directory of one of train"):
        read_lengths(tmp_path / "splits")
    with pytest.raises(ValueError, match="is not a"):
        read_lengths(tmp_path)


def test_a_pickle_in_a_saved_dataset_is_not_loaded(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    files = list((tmp_path / "saved").iterdir())
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(pickle.dumps(Planted(tmp_path)))
        with pytest.raises((ValueError, OSError)):
            read_lengths(tmp_path / "saved")
        file.write_bytes(whole)
    assert not marks(tmp_path)
    assert read_lengths(tmp_path / "saved") == LENGTHS


@pytest.mark.parametrize(
    "text, column, message",
    [
        ("", None, "holds no lengths"),
        ("[]", None, "holds no lengths"),
        ("5\n0\n", None, "tokens of sequence 1=0: must be at least 1"),
        ("[5, -3]", None, "tokens of sequence 1=-3: must be at least 1"),
        ("[5, 2.5]", None, "tokens of sequence 1=2.5: must be a whole number"),
        ("[5, true]", None, "tokens of sequence 1=True: must be a whole number"),
        ("5\nlong\n", None, "line 2 is not an integer: 'long'"),
        ("[5, ", None, "the JSON list is not JSON"),
        ('{"length": 5}\n{"length"', None, "line 2 is not JSON"),
        ('{"tokens": 5}', None, r"no column `length` or `input_ids`: name one \(it has tokens\)"),
        ('{"tokens": 5}\n{"length": 5}', "tokens", "line 2 has no column 'tokens'"),
        ('{"tokens": 5}', "size", "no column 'size'"),
    ],
)
def test_other_text_is_refused(tmp_path, text, column, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_lengths(tmp_path / "a.txt", column)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_lengths(tmp_path / "missing.txt")
    for name in ("broken.gz", "binary.txt", "broken.parquet"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=name):
            read_lengths(tmp_path / name)


def test_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match="need pyarrow: pip install pyarrow"):
        read_lengths(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="need the datasets library: pip install datasets"):
        read_lengths(tmp_path)


# ---- groups that share a prefix


def test_groups_are_a_prefix_and_branches():
    text = '{"prefix": 8, "branches": [1, 2]}\n\n{"prefix": 3, "branches": [4]}\n'
    assert parse_groups(text) == [(8, [1, 2]), (3, [4])]
    assert parse_groups("5\n6") is None
    assert parse_groups('{"length": 5}') is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"length": 5}', "line 2 has no prefix and branches"),
        ('{"prefix": 8, "branches": 3}', "line 2: branches 3 are no list"),
        ('{"prefix": 8, "branches": []}', "line 2 has no branches"),
        ('{"prefix": 0, "branches": [1]}', "line 2: tokens of sequence 0=0"),
        ('{"prefix": 8, "branches": ["x"]}', "line 2: tokens of sequence 1='x': must be"),
        ("{", "line 2"),
    ],
)
def test_what_is_no_group_is_refused_with_its_line(line, said):
    with pytest.raises(ValueError, match=said):
        parse_groups('{"prefix": 8, "branches": [1, 2]}\n' + line)


# ---- images


def test_rows_with_images_have_text_and_patches():
    video = {"patches": 24, "frames": 3}
    rows = [{"text": 8, "images": [4, 16, video]}, {"text": 5, "images": []}]
    rows.append({"text": 0, "images": [4]})
    made = parse_images("\n\n".join(map(json.dumps, rows)))
    assert made == [
        (8, [Patches(4, None), Patches(16, None), Patches(24, 3)]),
        (5, []),
        (0, [Patches(4, None)]),
    ]
    # each of 16 with all of the image; each of 24 with the 8 of its frame
    assert [one.pairs for one in made[0][1]] == [16, 256, 24 * 8]


@pytest.mark.parametrize(
    "text",
    [
        "5\n6",
        '{"length": 5}',
        '{"text": 5}',
        '{"length": 5, "text": "x", "images": ["a.png"]}',
        '{"prefix": 8, "branches": [1, 2]}',
    ],
)
def test_other_forms_are_no_rows_with_images(text):
    assert parse_images(text) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 5}', r"line 2: not a row with images: missing keys \['images'\]"),
        ('{"text": 5, "images": [], "image": 3}', r"line 2: .*unknown keys \['image'\]"),
        ("7", "line 2: not a row with images: expected a JSON object, got int"),
        ('{"text": "a", "images": []}', "line 2: text='a': must be a whole number"),
        ('{"text": -1, "images": []}', "line 2: text=-1: must be at least 0"),
        ('{"text": 0, "images": []}', "line 2: a row needs tokens of text, or images"),
        ('{"text": 1, "images": 4}', "line 2: images=4: must be a list"),
        ('{"text": 1, "images": [0]}', "line 2: patches of an image=0: must be at least 1"),
        ('{"text": 1, "images": ["a.png"]}', "line 2: patches of an image='a.png'"),
        ('{"text": 1, "images": [{"patches": 4}]}', "line 2: not a video: missing keys"),
        (
            '{"text": 1, "images": [{"patches": 10, "frames": 3}]}',
            "line 2: 10 patches in 3 frames: give each frame as many",
        ),
        ('{"text": 1, "images": [{"patches": 4, "frames": 0}]}', "line 2: frames of a video=0"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_what_is_no_row_with_images_is_refused_with_its_line(line, said):
    with pytest.raises(ValueError, match=said):
        parse_images('{"text": 8, "images": [1, 2]}\n' + line)


def test_images_are_counted_against_the_limit():
    text = '{"text": 8, "images": [1, 2]}\n' * 2
    assert len(parse_images(text, Limits(lengths=4))) == 2
    with pytest.raises(ValueError, match="has 4 images: the limit is 3 lengths"):
        parse_images(text, Limits(lengths=3))
