"""What is wrong with loaded rows is said in words."""

import pytest
from datasets import Dataset

from arguments import DataArguments, PreferenceArguments
from rows import broken_line, check_rows, check_template, is_blank

TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
ARGS = DataArguments(dataset="my.jsonl")


def test_text_and_messages_pass():
    check_rows(Dataset.from_dict({"text": ["a", "b"]}), ("text",), ARGS)
    check_rows(Dataset.from_dict({"messages": [TALK, TALK]}), ("messages",), ARGS)
    pairs = Dataset.from_dict({"chosen": [TALK], "rejected": [TALK]})
    check_rows(pairs, ("chosen", "rejected"), PreferenceArguments())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": []}, "my.jsonl has no rows"),
        ({"text": [1, 2]}, r"column 'text' of my.jsonl holds values that are no text \(int64\)"),
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
    ],
)
def test_what_is_neither_is_refused_with_its_column(rows, message):
    with pytest.raises(ValueError, match=message):
        check_rows(Dataset.from_dict(rows), tuple(rows), ARGS)


def test_rows_without_a_value_are_found_in_every_batch(monkeypatch):
    monkeypatch.setattr("rows.BATCH", 4)
    documents = Dataset.from_dict({"text": ["a"] * 9 + [None]})
    with pytest.raises(ValueError, match="of 1 of its 10 rows, of row 10 first"):
        check_rows(documents, ("text",), ARGS)


def test_messages_need_a_template_and_text_needs_none(tokenizer, monkeypatch):
    talks = Dataset.from_dict({"messages": [TALK]})
    with pytest.raises(ValueError, match="has no chat template to write them: name the tokenizer"):
        check_template(talks, ("messages",), tokenizer, ARGS)
    check_template(Dataset.from_dict({"text": ["a"]}), ("text",), tokenizer, ARGS)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    check_template(talks, ("messages",), tokenizer, ARGS)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b'{"text": "a"}\n\n{"text": "b"}\n', None),
        (b'{"text": "a"}\n\nnot json\n', "line 3 is no JSON (Expecting value, column 1)"),
        (b'{"text": "\xff"}\n', "line 1 is no UTF-8"),
        (b"[1, 2]\n", 'line 1 is no row with names, as {"text": "..."} is one'),
    ],
)
def test_the_first_broken_line_of_a_file_is_named(written, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(written)
    assert broken_line(path) == said


def test_a_file_of_white_space_is_blank(tmp_path):
    path = tmp_path / "a.jsonl"
    for written, blank in (("", True), ("\n \n", True), ("\n1\n", False)):
        path.write_text(written)
        assert is_blank(path) == blank
