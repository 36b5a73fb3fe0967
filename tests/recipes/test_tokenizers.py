"""The tokenizers of runs that download nothing: of pairs of bytes, and of characters."""

import pytest
from transformers import AutoTokenizer

from bpe import cached_bpe, train_bpe
from characters import character_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n" * 3, "tabs\tand ünïcödé \U0001f600\n"]


@pytest.mark.parametrize("text", [*TEXTS, "never seen: \x00 中文"])
def test_any_text_comes_back_after_a_bos(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]


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


def test_each_character_is_a_token_behind_a_bos(tmp_path):
    characters = character_tokenizer(["1+1=2\n", "a b"])
    assert len(characters) == len(set("1+1=2\na b")) + 3
    text = "a+b\n=1 2"
    ids = characters(text).input_ids
    assert len(ids) == len(text) + 1
    assert ids[0] == characters.bos_token_id
    assert characters.decode(ids, skip_special_tokens=True) == text
    assert characters("1é").input_ids[2] == characters.unk_token_id
    assert characters("2</s>").input_ids[-1] == characters.eos_token_id
    characters.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == ids
