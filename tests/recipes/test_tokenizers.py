"""The tokenizers of runs that download nothing: of pairs of bytes, and of characters."""

import pytest
from transformers import AutoTokenizer

from bpe import cached_bpe, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "tabs\tand ünïcödé \U0001f600\n"]


def test_the_cache_is_keyed_by_text_and_size_and_holds_whole_folders_only(tmp_path):
    first, again = cached_bpe(TEXTS, 280, tmp_path), cached_bpe(iter(TEXTS), 280, tmp_path)
    assert first.get_vocab() == again.get_vocab() == train_bpe(TEXTS, vocab_size=280).get_vocab()
    assert len(first) == 280
    (folder,) = tmp_path.iterdir()
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.eos_token == "</s>"
    assert loaded(TEXTS[0]).input_ids == first(TEXTS[0]).input_ids
    cached_bpe(TEXTS, 290, tmp_path)
    cached_bpe(TEXTS[:1], 280, tmp_path)
    assert len(list(tmp_path.glob("bpe-*"))) == len(list(tmp_path.iterdir())) == 3


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="need 258"):
        train_bpe(TEXTS, vocab_size=200)
