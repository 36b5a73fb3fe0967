"""Documents to sequences."""

import pytest
from datasets import Dataset

from arguments import DataArguments
from data import conversation_parts, fit, to_sequences, tokenize
from hf_flexseq.config import IGNORE_INDEX

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}"
TALK = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def rows_of(*lengths: int) -> dict[str, list]:
    ids = [list(range(n)) for n in lengths]
    return {"input_ids": ids, "labels": ids}


def test_split_keeps_every_token_in_order():
    pieces = fit(rows_of(10, 3), max_length=4, how="split")
    assert pieces["input_ids"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2]]
    assert pieces["labels"] == pieces["input_ids"]
    assert pieces["length"] == [4, 4, 2, 3]


def test_drop_leaves_long_ones_out():
    assert fit(rows_of(10, 3, 4, 5), max_length=4, how="drop")["length"] == [3, 4]


def test_pieces_without_a_target_are_left_out():
    assert fit(rows_of(9), max_length=4, how="split")["length"] == [4, 4], (
        "a single token predicts nothing"
    )
    prompt_first = {"input_ids": [[1] * 6], "labels": [[IGNORE_INDEX] * 5 + [1]]}
    assert fit(prompt_first, max_length=3, how="split")["labels"] == [
        [IGNORE_INDEX, IGNORE_INDEX, 1]
    ]
    assert fit(rows_of(0, 1), max_length=4, how="split")["length"] == []


def test_text_is_opened_and_closed(tokenizer):
    row = tokenize({"text": ["return x"]}, tokenizer, ("text",))
    (ids,) = row["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert row["labels"] == [ids]
    assert row["length"] == [len(ids)]


def test_only_the_completion_is_learned(tokenizer):
    rows = {"prompt": ["import"], "completion": [" os"]}
    row = tokenize(rows, tokenizer, ("prompt", "completion"))
    ids, labels = row["input_ids"][0], row["labels"][0]
    assert tokenizer.decode(ids) == "<s>import os</s>"
    assert tokenizer.decode([i for i in labels if i != IGNORE_INDEX]) == " os</s>"


def test_only_the_assistant_is_learned(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    row = tokenize({"messages": [TALK]}, tokenizer, ("messages",))
    ids, labels = row["input_ids"][0], row["labels"][0]
    assert (
        tokenizer.decode(ids)
        == "<s>user: 1 + 1?</s><s>assistant: 2</s><s>user: 2 + 2?</s><s>assistant: 4</s>"
    )
    assert tokenizer.decode([i for i in labels if i != IGNORE_INDEX]) == "2</s>4</s>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL)
    with pytest.raises(ValueError, match="writes earlier turns differently"):
        conversation_parts(TALK, tokenizer)


def test_a_conversation_without_an_assistant_teaches_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    documents = Dataset.from_dict({"messages": [TALK[:1], TALK]})
    sequences, report = to_sequences(documents, tokenizer, DataArguments(text_column="text"))
    assert len(sequences) == 1
    assert report.startswith("1 sequences of at most 4,096 tokens from 2 documents, ")


@pytest.mark.parametrize(("how", "lengths"), [("split", [3, 8, 8, 6]), ("drop", [3])])
def test_what_became_of_long_documents_is_reported(tokenizer, how, lengths):
    documents = Dataset.from_dict({"text": ["x", "z" * 20]})
    args = DataArguments(max_length=8, long_sequences=how)
    sequences, report = to_sequences(documents, tokenizer, args)
    assert sequences["length"][:] == lengths
    assert sequences.column_names == ["input_ids", "labels", "length"]
    word = {"split": "split", "drop": "dropped"}[how]
    assert report == (
        f"{len(lengths)} sequences of at most 8 tokens from 2 documents (1 longer ones {word}), "
        f"{sum(lengths)} tokens"
    )


def test_long_documents_need_a_decision(tokenizer):
    documents = Dataset.from_dict({"text": ["x", "z" * 20]})
    with pytest.raises(
        ValueError,
        match="1 of 2 documents are longer than max_length=8 tokens: set long_sequences",
    ):
        to_sequences(documents, tokenizer, DataArguments(max_length=8))


def test_nothing_left_is_an_error(tokenizer):
    documents = Dataset.from_dict({"text": ["z" * 20]})
    with pytest.raises(ValueError, match="no sequence is left of 1 documents"):
        to_sequences(documents, tokenizer, DataArguments(max_length=8, long_sequences="drop"))
