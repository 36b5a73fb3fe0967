"""Pairs of answers: those that are made, and what becomes of long ones."""

import random

import pytest
from datasets import Dataset

from arguments import PreferenceArguments
from bpe import train_bpe
from corpus import load_documents
from pairs import measure, misindented, pairs_of, stdlib_pairs, texts_of, to_pairs, tokens_of

FUNCTION = "def f{}(x):\n    if x:\n        return {}\n    return x\n\n"
SOURCE = "".join(FUNCTION.format(i, i) for i in range(90))
CHAT = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def made(text: str = SOURCE, seed: int = 0) -> list[dict[str, str]]:
    return list(pairs_of(text, random.Random(seed)))


def lines_of(text: str) -> tuple[list[str], list[str]]:
    """The indentations of a text, sorted, and its lines without them."""
    lines = [line for line in text.split("\n") if line.strip()]
    return sorted(line[: len(line) - len(line.lstrip())] for line in lines), [
        line.strip() for line in lines
    ]


def test_a_rejected_answer_has_the_same_lines_and_the_same_indentations():
    for pair in made():
        assert pair["rejected"] != pair["chosen"]
        assert len(pair["rejected"]) == len(pair["chosen"])
        assert lines_of(pair["rejected"]) == lines_of(pair["chosen"])


def test_a_chosen_answer_is_how_the_text_goes_on():
    pairs = made()
    assert len(pairs) > 5
    for pair in pairs:
        gaps = ("", "\n")  # an empty line between them is in neither
        assert any(pair["prompt"] + gap + pair["chosen"] in SOURCE for gap in gaps)


def test_pairs_depend_on_nothing_but_text_and_seed(tmp_path):
    assert made() == made()
    assert made(seed=1) != made()
    (tmp_path / "a.py").write_text(SOURCE)
    alone = list(stdlib_pairs(str(tmp_path), "3.x"))
    (tmp_path / "0.py").write_text(SOURCE)
    assert [row for row in stdlib_pairs(str(tmp_path), "3.x") if row["path"] == "a.py"] == alone


def test_lengths_have_a_long_tail():
    counts = sorted(pair["chosen"].count("\n") for pair in made(SOURCE * 20))
    assert counts[len(counts) // 2] < 12
    assert counts[-1] > 60


def test_a_prompt_ends_at_a_border_of_tokens(tokenizer):
    for pair in made():
        alone = tokenizer(pair["prompt"]).input_ids
        for answer in ("chosen", "rejected"):
            whole = tokenizer(pair["prompt"] + pair[answer]).input_ids
            assert whole[: len(alone)] == alone


def test_text_without_indentation_makes_no_pairs():
    assert made("import os\nimport sys\n" * 30) == []
    assert misindented("\na\n  b\n", random.Random(0)).count("  ") == 1


def test_all_pairs_of_a_prompt_are_on_one_side(tmp_path):
    rows = [
        {"prompt": f"p{i}", "chosen": f"{i} {j}", "rejected": "r"}
        for i in range(60)
        for j in range(3)
    ]
    Dataset.from_list(rows).to_json(tmp_path / "pairs.jsonl")
    train, held_out = load_documents(
        PreferenceArguments(dataset=str(tmp_path / "pairs.jsonl"), held_out_fraction=0.3)
    )
    assert len(train) + len(held_out) == 180
    assert set(train["prompt"]).isdisjoint(held_out["prompt"])
    assert len(held_out)


def test_other_columns_are_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"chosen": "x", "worse": "y"}\n')
    with pytest.raises(
        ValueError,
        match="neither prompt, chosen and rejected, nor chosen and rejected: its columns are",
    ):
        load_documents(PreferenceArguments(dataset=str(tmp_path / "a.jsonl")))


def rows(*lengths: int, prompt: str = "import os") -> Dataset:
    return Dataset.from_list(
        [{"prompt": prompt, "chosen": "x" * n, "rejected": "x"} for n in lengths]
    )


def test_long_pairs_are_refused_truncated_or_dropped(tokenizer):
    pairs = rows(1, 2, 40, 50)
    with pytest.raises(ValueError, match="2 of 4 pairs are longer than max_length=20 tokens: set"):
        to_pairs(pairs, tokenizer, PreferenceArguments(max_length=20))
    kept, report = to_pairs(
        pairs, tokenizer, PreferenceArguments(max_length=20, long_pairs="drop")
    )
    assert (len(kept), report) == (
        2,
        "2 pairs of at most 20 tokens an answer (0 longer ones truncated, 2 left out)",
    )
    kept, report = to_pairs(
        pairs, tokenizer, PreferenceArguments(max_length=20, long_pairs="truncate")
    )
    assert (len(kept), "2 longer ones truncated, 0 left out" in report) == (4, True)


def test_a_prompt_that_fills_the_context_leaves_nothing_of_its_answers(tokenizer):
    pairs = rows(1, prompt="import os" + "y" * 30)
    with pytest.raises(ValueError, match="no pair is left of 1"):
        to_pairs(pairs, tokenizer, PreferenceArguments(max_length=20, long_pairs="truncate"))


def test_a_pair_is_measured_as_trl_tokenizes_it(tokenizer):
    pair = {"prompt": ["import os"], "chosen": ["xx"], "rejected": ["x"]}
    alone = len(tokenizer("import os").input_ids)
    both = len(tokenizer("import osxx").input_ids)
    assert measure(pair, tokenizer) == {"prompt_length": [alone], "length": [both + 1]}
    del pair["prompt"]
    whole = len(tokenizer("xx").input_ids) + 1
    assert measure(pair, tokenizer) == {"prompt_length": [0], "length": [whole]}


def test_conversations_go_through_the_chat_template():
    tokenizer = train_bpe(["x"], vocab_size=258)
    tokenizer.chat_template = CHAT
    prompt = [{"role": "user", "content": "ab"}]
    answer = [{"role": "assistant", "content": "abc"}]
    assert tokens_of(prompt, None, tokenizer) == 1 + 2 + 1 + 1
    assert tokens_of(prompt, answer, tokenizer) == (1 + 2 + 1) + (1 + 3 + 1)
    assert texts_of(Dataset.from_list([{"chosen": answer, "rejected": prompt}])) is None
    assert list(texts_of(rows(1))) == ["import os", "x"]
