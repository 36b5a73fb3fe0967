"""Questions about Python, and the topics of its help as their answers."""

import sys

import pytest

from arguments import DataArguments, PreferenceArguments
from corpus import load_documents
from pairs import MADE as PAIRS
from topics import EVASION, TOPICS, load_topics, questions


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
