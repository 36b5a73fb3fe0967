"""Documents to sequences, and pairs of answers to pairs of tokens."""

import pytest
from datasets import Dataset

from arguments import DataArguments, PreferenceArguments
from corpus import load_documents
from data import conversation_parts, fit, to_sequences, tokenize
from hf_flexseq.config import IGNORE_INDEX
from pairs import to_pairs

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
WORDS = ("1 + 1?", "2", "2 + 2?", "4")
TALK = [
    {"role": role, "content": content}
    for role, content in zip(("user", "assistant") * 2, WORDS, strict=True)
]


def rows_of(*lengths):
    ids = [list(range(n)) for n in lengths]
    return {"input_ids": ids, "labels": ids}


def test_long_sequences_are_split_with_every_token_in_order_or_dropped():
    pieces = fit(rows_of(10, 3), max_length=4, how="split")
    assert pieces["input_ids"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2]]
    assert pieces["labels"] == pieces["input_ids"]
    assert pieces["length"] == [4, 4, 2, 3]
    assert fit(rows_of(10, 3, 4, 5), max_length=4, how="drop")["length"] == [3, 4]


def test_pieces_without_a_target_are_left_out():
    for lengths, left in (((9,), [4, 4]), ((0, 1), [])):  # a single token predicts nothing
        assert fit(rows_of(*lengths), max_length=4, how="split")["length"] == left
    prompt_first = {"input_ids": [[1] * 6], "labels": [[IGNORE_INDEX] * 5 + [1]]}
    labels = fit(prompt_first, max_length=3, how="split")["labels"]
    assert labels == [[IGNORE_INDEX, IGNORE_INDEX, 1]]


@pytest.mark.parametrize(
    ("row", "text", "learned"),
    [
        ({"text": "return x"}, "<s>return x</s>", "<s>return x</s>"),
        ({"prompt": "import", "completion": " os"}, "<s>import os</s>", " os</s>"),
        (
            {"messages": TALK},
            "<s>user: 1 + 1?</s><s>assistant: 2</s><s>user: 2 + 2?</s><s>assistant: 4</s>",
            "2</s>4</s>",
        ),
    ],
    ids=["text", "completion", "assistant"],
)
def test_text_is_opened_and_closed_and_only_answers_are_learned(
    row, text, learned, tokenizer, monkeypatch
):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    made = tokenize({name: [value] for name, value in row.items()}, tokenizer, tuple(row))
    ids, labels = made["input_ids"][0], made["labels"][0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([i for i in labels if i != IGNORE_INDEX]) == learned
    assert made["length"] == [len(ids)] == [len(labels)]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(ValueError, match="writes earlier turns differently"):
        conversation_parts(TALK, tokenizer)


def test_a_conversation_without_an_assistant_teaches_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    documents = Dataset.from_dict({"messages": [TALK[:1], TALK]})
    sequences, report = to_sequences(documents, tokenizer, DataArguments(text_column="text"))
    assert len(sequences) == 1
    assert report.startswith("1 sequences of at most 4,096 tokens from 2 documents, ")


@pytest.mark.parametrize(
    ("how", "lengths", "word"), [("split", [3, 8, 8, 6], "split"), ("drop", [3], "dropped")]
)
def test_what_became_of_long_documents_is_reported(tokenizer, how, lengths, word):
    documents = Dataset.from_dict({"text": ["x", "z" * 20]})
    args = DataArguments(max_length=8, long_sequences=how)
    sequences, report = to_sequences(documents, tokenizer, args)
    assert sequences["length"][:] == lengths
    assert sequences.column_names == ["input_ids", "labels", "length"]
    assert report == (
        f"{len(lengths)} sequences of at most 8 tokens from 2 documents (1 longer ones {word}), "
        f"{sum(lengths)} tokens"
    )


def test_long_documents_need_a_decision_and_something_left(tokenizer):
    for texts, options, said in (
        (["x", "z" * 20], {}, "1 of 2 documents are longer than max_length=8 tokens: set long_"),
        (["z" * 20], {"long_sequences": "drop"}, "no sequence is left of 1 documents"),
    ):
        args = DataArguments(max_length=8, **options)
        with pytest.raises(ValueError, match=said):
            to_sequences(Dataset.from_dict({"text": texts}), tokenizer, args)


# ---- pairs


def test_all_pairs_of_a_prompt_are_on_one_side(tmp_path):
    rows = [
        {"prompt": f"p{i // 3}", "chosen": f"{i // 3} {i % 3}", "rejected": "r"}
        for i in range(180)
    ]
    Dataset.from_list(rows).to_json(tmp_path / "pairs.jsonl")
    train, held_out = load_documents(
        PreferenceArguments(dataset=str(tmp_path / "pairs.jsonl"), held_out_fraction=0.3)
    )
    assert len(train) + len(held_out) == 180
    assert set(train["prompt"]).isdisjoint(held_out["prompt"])
    assert len(held_out)


def rows(*lengths, prompt="import os"):
    return Dataset.from_list(
        [{"prompt": prompt, "chosen": "x" * n, "rejected": "x"} for n in lengths]
    )


def test_long_pairs_are_refused_truncated_or_dropped(tokenizer):
    def fitted(pairs, **options):
        return to_pairs(pairs, tokenizer, PreferenceArguments(max_length=20, **options))

    pairs = rows(1, 2, 40, 50)
    with pytest.raises(ValueError, match="2 of 4 pairs are longer than max_length=20 tokens: set"):
        fitted(pairs)
    for how, count, said in (
        ("drop", 2, "(0 longer ones truncated, 2 left out)"),
        ("truncate", 4, "(2 longer ones truncated, 0 left out)"),
    ):
        kept, report = fitted(pairs, long_pairs=how)
        assert len(kept) == count
        assert report == f"{count} pairs of at most 20 tokens an answer {said}"
    # a prompt that fills the context leaves nothing of its answers
    with pytest.raises(ValueError, match="no pair is left of 1"):
        fitted(rows(1, prompt="import os" + "y" * 30), long_pairs="truncate")
