"""The tokenizer with a token for each character."""

import pytest
from transformers import AutoTokenizer

from characters import character_tokenizer

TEXTS = ["1+1=2\n", "a b"]


@pytest.fixture(scope="module")
def characters():
    return character_tokenizer(TEXTS)


def test_each_character_is_a_token_behind_a_bos(characters):
    text = "a+b\n=1 2"
    ids = characters(text).input_ids
    assert len(ids) == len(text) + 1
    assert ids[0] == characters.bos_token_id
    assert characters.decode(ids, skip_special_tokens=True) == text


def test_the_vocabulary_is_that_of_the_texts_and_three_more(characters):
    assert len(characters) == len(set("".join(TEXTS))) + 3


def test_other_characters_are_unknown(characters):
    assert characters("1é").input_ids[2] == characters.unk_token_id


def test_an_eos_in_a_text_is_one_token(characters):
    assert characters("2</s>").input_ids[-1] == characters.eos_token_id


def test_it_is_the_same_after_saving(characters, tmp_path):
    characters.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("a+b\n=").input_ids == characters("a+b\n=").input_ids
