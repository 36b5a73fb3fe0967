"""Drawn albums: what pictures show, how many an album has, and what becomes of them."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
import yaml

from albums import (
    CELL,
    COLOURS,
    IGNORED,
    NUMBERS,
    SIDES,
    AlbumArguments,
    Albums,
    draw_picture,
    padded,
    pictures_of_album,
    right_answers,
)
from tests.programs import ROOT
from vision_model import VisionModelArguments, load_processors, new_config


@pytest.fixture(scope="module")
def albums():
    options = yaml.safe_load((ROOT / "recipes/quickstart/vlm.yaml").read_text())
    args = VisionModelArguments(model_config=options["model_config"])
    tokenizer, image_processor = load_processors(args)
    config = new_config(args, tokenizer)
    return Albums(60, 0, tokenizer=tokenizer, image_processor=image_processor, config=config)


def test_a_picture_shows_what_is_answered():
    rng = random.Random(0)
    for _ in range(200):
        image, (number, colour, place) = draw_picture(rng)
        pixels = np.asarray(image)  # [height, width, 3]
        shown = (pixels == COLOURS[colour]).all(axis=-1)
        assert (shown | (pixels == 255).all(axis=-1)).all()
        assert shown.sum() == (NUMBERS.index(number) + 1) * (CELL - 2) ** 2
        height, width = shown.shape
        rows = slice(0, height // 2) if place.startswith("north") else slice(height // 2, height)
        columns = slice(0, width // 2) if place.endswith("west") else slice(width // 2, width)
        assert shown[rows, columns].sum() == shown.sum()


def test_most_albums_have_one_picture_and_some_have_twenty():
    rng = random.Random(0)
    counts = Counter(pictures_of_album(rng) for _ in range(2000))
    assert counts.most_common(1)[0][0] == 1
    assert counts[0] > 100
    assert counts[20] > 10
    assert max(counts) == 20


def test_an_album_is_the_same_on_all_ranks_and_only_answers_have_labels(albums):
    kinds = set()
    for index in range(len(albums)):
        example, again = albums[index], albums[index]
        assert example["input_ids"] == again["input_ids"]
        pairs = zip(example["input_ids"], example["labels"], strict=True)
        said = albums._tokenizer.decode([token for token, label in pairs if label != IGNORED])
        tokens = sum(example["mm_token_type_ids"])
        kinds.add("pixel_values" in example)
        if "pixel_values" not in example:
            assert (tokens, said in NUMBERS) == (0, True)
            continue
        torch.testing.assert_close(example["pixel_values"], again["pixel_values"])
        grids = example["image_grid_thw"]
        assert tokens == grids.prod(dim=1).sum() / 4
        assert len(example["pixel_values"]) == grids.prod(dim=1).sum()
        assert set((grids[:, 1:] * 8).flatten().tolist()) <= set(SIDES)
        assert len(said.split()) == 3 * len(grids)  # a number, a colour, a place
    assert kinds == {True, False}


def test_a_padded_batch_has_all_images(albums):
    examples = [albums[index] for index in range(12)]
    batch = padded(examples, padding=0)
    lengths = [len(example["input_ids"]) for example in examples]
    assert batch["input_ids"].shape == (12, max(lengths))
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths
    images = sum(len(example.get("image_grid_thw", ())) for example in examples)
    assert len(batch["image_grid_thw"]) == images
    assert len(batch["pixel_values"]) == batch["image_grid_thw"].prod(dim=1).sum()


def test_an_answer_is_right_word_for_word():
    example = {"labels": [IGNORED, IGNORED, 3, IGNORED, 1, 2]}
    said = torch.tensor([0, 3, 0, 1, 2, 0])  # after each token
    for wrong, right in ((None, 2), (1, 1), (3, 1), (4, 1), (2, 2)):
        logits = torch.nn.functional.one_hot(said, 5).float()
        if wrong is not None:
            logits[wrong] = torch.nn.functional.one_hot(torch.tensor(4), 5).float()
        assert right_answers(example, logits) == (right, 2)


def test_albums_that_are_not_drawn_are_refused():
    with pytest.raises(ValueError, match="held_out_albums=0: give 1 or more"):
        AlbumArguments(held_out_albums=0)
