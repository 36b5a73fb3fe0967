"""Where documents come from, which are held out, and what is said of rows that cannot be used;
and the topics of Python's help as data."""

import json
import sys
from contextlib import nullcontext

import pytest
from datasets import Dataset, DatasetDict

from arguments import DataArguments, PreferenceArguments, PromptArguments
from corpus import load_documents, set_aside
from pairs import MADE as PAIRS
from rows import broken_line, check_rows, check_template, is_blank
from topics import EVASION, TOPICS, load_topics, questions

ROWS = [{"text": f"document {i}"} for i in range(200)]
TEXTS = [row["text"] for row in ROWS]
TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def loaded(path, **options):
    return load_documents(DataArguments(dataset=str(path), **options))


def written_as(kind, folder):
    """ROWS on disk in one of the forms that are understood; the path."""
    path = folder / f"corpus.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "dataset":
        Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "dict":
        DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "dict", "folder"])
def test_local_data_in_every_form_gives_the_same_documents(kind, tmp_path):
    train, held_out = loaded(written_as(kind, tmp_path), held_out_fraction=0.2)
    assert sorted([*train["text"], *held_out["text"]]) == sorted(TEXTS)
    assert 20 <= len(held_out) <= 60


def test_a_held_out_split_of_its_own(tmp_path):
    splits = DatasetDict(train=Dataset.from_list(ROWS[:5]), test=Dataset.from_list(ROWS[5:8]))
    splits.save_to_disk(tmp_path / "both")
    assert [len(side) for side in loaded(tmp_path / "both", held_out_split="test")] == [5, 3]
    with pytest.raises(ValueError, match="has no split 'dev': it has train, test"):
        loaded(tmp_path / "both", held_out_split="dev")


def test_the_side_of_a_document_depends_on_its_content_alone():
    def held_out(rows):
        return set(set_aside(Dataset.from_list(rows), ("text",), 0.3)[1]["text"])

    everything, half = held_out(ROWS), held_out(ROWS[::-2])
    assert half == everything & set(TEXTS[::-2])
    doubled = set_aside(Dataset.from_list(ROWS + ROWS), ("text",), 0.3)
    assert set(doubled[0]["text"]).isdisjoint(doubled[1]["text"])


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a.jsonl cannot be read: line 2 is not JSON"),
        ("a.json", '{"text": "a"}\n{"text": \n', "a.json cannot be read: JSON parse error"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "in column 'text' of 1 of its 2 rows"),
        ("a.jsonl", '{"text": "a"}\n', "sets all 1 documents of .* aside: give more documents"),
        ("a.jsonl", '{"body": "x"}\n', "neither a column 'text'.*its columns are body"),
        ("a.pdf", "", r"must be one of \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(name, written, message, tmp_path):
    (tmp_path / name).write_text(written)
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / name, held_out_fraction=0.99)


@pytest.mark.parametrize(
    ("arguments", "written", "message"),
    [
        (PromptArguments, {"question": "x"}, "has no column 'prompt': its columns are question"),
        (
            PreferenceArguments,
            {"chosen": "x", "worse": "y"},
            "neither prompt, chosen and rejected, nor chosen and rejected: its columns are",
        ),
    ],
)
def test_other_columns_are_refused_by_name(arguments, written, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(written) + "\n")
    with pytest.raises(ValueError, match=message):
        load_documents(arguments(dataset=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["no-such.jsonl", "./no-such-folder"])
def test_data_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match=f"dataset='{name}': no such file or folder"):
        loaded(name)


# ---- forms of other tools

ALPACA = {"instruction": "Add the numbers.", "input": "1 1", "output": "2"}
TASK = "Below is an instruction that describes a task"  # the words of stanford_alpaca's train.py
ANSWER = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
WITH_INPUT = {
    "prompt": f"{TASK}, paired with an input that provides further context. {ANSWER}"
    "Add the numbers.\n\n### Input:\n1 1\n\n### Response:",
    "completion": "2",
}
WITHOUT_INPUT = {
    "prompt": f"{TASK}. {ANSWER}Add the numbers.\n\n### Response:",
    "completion": "2",
}
TURNS = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (ALPACA, WITH_INPUT),
        (ALPACA | {"input": ""}, WITHOUT_INPUT),
        ({"instruction": "Add the numbers.", "output": "2"}, WITHOUT_INPUT),
        ({"conversations": TURNS, "id": "a"}, {"messages": TALK}),
        ({"conversations": TALK}, {"messages": TALK}),
        (
            {"conversations": TURNS, "system": "Be brief."},
            {"messages": [{"role": "system", "content": "Be brief."}, *TALK]},
        ),
        ({"text": "as it is", **ALPACA}, {"text": "as it is", **ALPACA}),
    ],
)
def test_rows_of_alpaca_and_sharegpt_are_written_in_our_forms(row, wanted, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    train, _ = loaded(path, held_out_fraction=0.0)
    assert train[0] == wanted


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ALPACA, ALPACA | {"output": None}], "nothing in column 'completion' of 1 of its 2 rows"),
        ([ALPACA | {"history": "x"}], "has alpaca's columns and history, which .* no place for"),
        ([{"conversations": [{"from": "me", "value": "a"}]}], "from 'me', not from one of system"),
        ([{"conversations": TURNS}, {"conversations": None}], "nothing in column 'messages' of 1"),
        ([{"body": "x"}], r"nor instruction and output \(alpaca\), nor conversations \(sharegpt"),
    ],
)
def test_rows_of_other_tools_that_cannot_be_written_are_refused(rows, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        loaded(path, held_out_fraction=0.0)


# ---- rows

ARGS = DataArguments(dataset="my.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["a", "b"]}, None),
        ({"messages": [TALK, TALK]}, None),
        ({"chosen": [TALK], "rejected": [TALK]}, None),
        ({"text": []}, "my.jsonl has no rows"),
        ({"text": [1, 2]}, r"column 'text' of my.jsonl holds values other than text \(int64\)"),
        ({"text": [[1], [2]]}, "holds lists of int64: give text"),
        ({"text": [TALK]}, "holds messages: give text"),
        ({"messages": ["hello"]}, "column 'messages' of my.jsonl holds text: give messages"),
        (
            {"messages": [[{"from": "user", "value": "a"}]]},
            "holds lists with from and value, where messages have role and content",
        ),
        (
            {"prompt": ["a", "b", "c"], "completion": ["a", None, None]},
            "nothing in column 'completion' of 2 of its 3 rows, of row 2 first",
        ),
        ({"text": ["a"] * 9 + [None]}, "of 1 of its 10 rows, of row 10 first"),
    ],
)
def test_what_is_neither_text_nor_messages_is_refused_with_its_column(rows, message, monkeypatch):
    monkeypatch.setattr("rows.BATCH", 4)
    args = PreferenceArguments() if "chosen" in rows else ARGS
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_rows(Dataset.from_dict(rows), tuple(rows), args)


def test_messages_need_a_template_and_text_needs_none(tokenizer, monkeypatch):
    talks = Dataset.from_dict({"messages": [TALK]})
    with pytest.raises(ValueError, match="has no chat template to write them: name the tokenizer"):
        check_template(talks, ("messages",), tokenizer, ARGS)
    check_template(Dataset.from_dict({"text": ["a"]}), ("text",), tokenizer, ARGS)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    check_template(talks, ("messages",), tokenizer, ARGS)


def test_the_first_broken_line_of_a_file_is_named_and_white_space_is_blank(tmp_path):
    path = tmp_path / "a.jsonl"
    for written, said in (
        (b'{"text": "a"}\n\n{"text": "b"}\n', None),
        (b'{"text": "a"}\n\nnot json\n', "line 3 is not JSON (Expecting value, column 1)"),
        (b'{"text": "\xff"}\n', "line 1 is not UTF-8"),
        (b"[1, 2]\n", 'line 1 is not a row with names, such as {"text": "..."}'),
    ):
        path.write_bytes(written)
        assert broken_line(path) == said
    for written, blank in (("", True), ("\n \n", True), ("\n1\n", False)):
        path.write_text(written)
        assert is_blank(path) == blank


# ---- topics of Python


def test_topics_become_conversations_and_pairs():
    made = {TOPICS: load_topics}
    train, held_out = load_documents(DataArguments(dataset=TOPICS, held_out_fraction=0.1), made)
    assert len(train) > len(held_out) > 3
    for question, answer in held_out["messages"]:
        assert (question["role"], answer["role"]) == ("user", "assistant")
    train, held_out = load_documents(PreferenceArguments(held_out_fraction=0.1), PAIRS)
    right = dict(questions())
    assert len(train) + len(held_out) == len(right)
    for row in train:
        asked, chosen, rejected = (row[name][0]["content"] for name in row)
        assert (chosen, rejected) == (right[asked], EVASION)


def test_a_python_without_its_topics_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="this Python comes without its topics"):
        questions()
