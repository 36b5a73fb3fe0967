"""Where documents come from, and which are held out."""

import json

import pytest
from datasets import Dataset, DatasetDict

from arguments import DataArguments
from corpus import load_documents, set_aside, stdlib, stdlib_files

ROWS = [{"text": f"document {i}"} for i in range(200)]


def written_as(kind: str, folder) -> str:
    """ROWS on disk in one of the forms that are understood; the path."""
    path = folder / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "dataset":
        Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "dict":
        DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "dict", "folder"])
def test_local_data_in_every_form_gives_the_same_documents(kind, tmp_path):
    args = DataArguments(dataset=written_as(kind, tmp_path), held_out_fraction=0.2)
    train, held_out = load_documents(args)
    assert sorted([*train["text"], *held_out["text"]]) == sorted(row["text"] for row in ROWS)
    assert 20 <= len(held_out) <= 60


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    train, held_out = load_documents(
        DataArguments(dataset=str(tmp_path / "book.txt"), held_out_fraction=0.0)
    )
    assert train["text"][:] == ["one\n\ntwo\n"]
    assert len(held_out) == 0


def test_a_held_out_split_of_its_own(tmp_path):
    splits = DatasetDict(train=Dataset.from_list(ROWS[:5]), test=Dataset.from_list(ROWS[5:8]))
    splits.save_to_disk(tmp_path / "both")
    train, held_out = load_documents(
        DataArguments(dataset=str(tmp_path / "both"), held_out_split="test")
    )
    assert (len(train), len(held_out)) == (5, 3)


def test_the_side_of_a_document_depends_on_its_content_alone():
    def held_out(rows):
        return set(set_aside(Dataset.from_list(rows), ("text",), 0.3)[1]["text"])

    everything, half = held_out(ROWS), held_out(ROWS[::-2])
    assert half == everything & {row["text"] for row in ROWS[::-2]}
    doubled = set_aside(Dataset.from_list(ROWS + ROWS), ("text",), 0.3)
    assert set(doubled[0]["text"]).isdisjoint(doubled[1]["text"])


def test_limits_are_spread_over_the_corpus(tmp_path):
    args = DataArguments(
        dataset=written_as("jsonl", tmp_path), held_out_fraction=0.0, max_train_documents=4
    )
    assert load_documents(args)[0]["text"][:] == [f"document {i}" for i in (0, 50, 100, 150)]


def test_the_standard_library_without_tests_and_installed_packages(tmp_path):
    for name in ("a.py", "pkg/b.py", "pkg/data.txt", "test/c.py", "site-packages/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [row["path"] for row in stdlib_files(str(tmp_path), "3.x")] == [
        "a.py",
        "latin.py",
        "pkg/b.py",
    ]


def test_other_columns_and_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match="neither a column 'text'.*its columns are body"):
        load_documents(DataArguments(dataset=str(tmp_path / "a.jsonl")))
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(ValueError, match=r"must be one of \.jsonl"):
        load_documents(DataArguments(dataset=str(tmp_path / "a.pdf")))


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a.jsonl cannot be read: line 2 is no JSON"),
        ("a.json", '{"text": "a"}\n{"text": \n', "a.json cannot be read: JSON parse error"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"txt": "b"}\n',
            "nothing in column 'text' of 1 of its 2 rows",
        ),
        ("a.jsonl", '{"text": "a"}\n', "sets all 1 documents of .* aside: give more documents"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(name, written, message, tmp_path):
    path = tmp_path / name
    path.write_text(written)
    with pytest.raises(ValueError, match=message):
        load_documents(DataArguments(dataset=str(path), held_out_fraction=0.99))


def test_a_broken_file_of_a_folder_is_refused_by_the_name_of_the_folder(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read: JSON parse error"):
        load_documents(DataArguments(dataset=str(tmp_path)))


@pytest.mark.parametrize("name", ["no-such.jsonl", "./no-such-folder"])
def test_data_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match=f"dataset='{name}': there is no such file or folder"):
        load_documents(DataArguments(dataset=name))


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = written_as("dict", tmp_path)
    with pytest.raises(ValueError, match="has no split 'test': it has train"):
        load_documents(DataArguments(dataset=path, held_out_split="test"))


def test_other_code_makes_another_corpus_of_the_standard_library(tmp_path):
    maker = tmp_path / "maker.py"
    versions = {stdlib()["version"]}
    for text in ("one", "other"):
        maker.write_text(text)
        versions.add(stdlib(str(maker))["version"])
    assert len(versions) == 3
