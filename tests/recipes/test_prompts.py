"""Prompts: those that are made, and what becomes of long ones."""

import pytest
from datasets import Dataset

from arguments import PromptArguments
from bpe import train_bpe
from characters import character_tokenizer
from corpus import load_documents
from prompts import MADE, PLACES, counting_prompts, texts_of, to_prompts, tokens_of
from rewards import counts_on

CHAT = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>"
CHAT += "{% endif %}"


def test_made_prompts_are_digits_and_always_the_same():
    rows = list(counting_prompts(50))
    assert rows == list(counting_prompts(50))
    for row in rows:
        assert row["prompt"].isdecimal()
        last = int(row["prompt"][-1])
        said = "".join(str((last + i) % 10) for i in range(1, PLACES + 1))
        assert counts_on([row["prompt"]], [said], [row["places"]]) == [1.0]


def test_made_prompts_have_a_long_tail():
    lengths = sorted(len(row["prompt"]) for row in counting_prompts(400))
    assert lengths[200] < 24
    assert lengths[-1] > 150


def test_made_prompts_are_loaded_by_name():
    train, held_out = load_documents(PromptArguments(held_out_fraction=0.1), MADE)
    assert set(train["prompt"]).isdisjoint(held_out["prompt"])
    assert len(character_tokenizer(texts_of(train))) == 10 + 3


def test_long_prompts_are_refused_or_dropped(tokenizer):
    prompts = Dataset.from_list([{"prompt": "x" * n, "answer": str(n)} for n in (1, 2, 90)])
    with pytest.raises(
        ValueError, match="1 of 3 prompts are longer than max_prompt_length=20 tokens: set"
    ):
        to_prompts(prompts, tokenizer, PromptArguments(max_prompt_length=20))
    dropping = PromptArguments(max_prompt_length=20, long_prompts="drop")
    kept, report = to_prompts(prompts, tokenizer, dropping)
    assert kept["answer"][:] == ["1", "2"]
    assert report == "2 prompts of at most 20 tokens (1 longer ones dropped)"
    with pytest.raises(ValueError, match="no prompt is left of 1"):
        to_prompts(prompts.select([2]), tokenizer, dropping)


def test_conversations_go_through_the_chat_template():
    tokenizer = train_bpe(["x"], vocab_size=258)
    tokenizer.chat_template = CHAT
    prompt = [{"role": "user", "content": "ab"}]
    assert tokens_of(prompt, tokenizer) == 1 + 2 + 1
    assert tokens_of("ab", tokenizer) == 1 + 2
    assert texts_of(Dataset.from_list([{"prompt": prompt}])) is None


def test_other_columns_are_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match="has no column 'prompt': its columns are question"):
        load_documents(PromptArguments(dataset=str(tmp_path / "a.jsonl")))
