"""Pairs of answers, and what becomes of long ones."""

import pytest
from datasets import Dataset

from arguments import PreferenceArguments
from corpus import load_documents
from pairs import to_pairs


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
