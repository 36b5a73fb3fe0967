"""The tokenizer of runs that download nothing."""

import pytest
from transformers import AutoTokenizer

from bpe import cached_bpe, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "tabs\tand ünïcödé \U0001f600\n"]


@pytest.mark.parametrize("text", [*TEXTS, "never seen: \x00 中文"])
def test_any_text_comes_back_after_a_bos(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]


def test_training_is_deterministic():
    first, second = (train_bpe(TEXTS, vocab_size=280) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 280


def test_the_cache_is_keyed_by_text_and_size_and_holds_whole_folders_only(tmp_path):
    first = cached_bpe(TEXTS, 280, tmp_path)
    again = cached_bpe(iter(TEXTS), 280, tmp_path)
    assert first.get_vocab() == again.get_vocab()
    assert len(list(tmp_path.iterdir())) == 1
    cached_bpe(TEXTS, 290, tmp_path)
    cached_bpe(TEXTS[:1], 280, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert all(folder.name.startswith("bpe-") for folder in tmp_path.iterdir())


def test_stock_transformers_loads_it(tmp_path):
    cached_bpe(TEXTS, 280, tmp_path)
    (folder,) = tmp_path.iterdir()
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.eos_token == "</s>"
    assert loaded(TEXTS[0]).input_ids == cached_bpe(TEXTS, 280, tmp_path)(TEXTS[0]).input_ids


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="need 258"):
        train_bpe(TEXTS, vocab_size=200)
