"""Which parts of a vision-language model are trained, its processors from a checkpoint, and the
albums that it is trained on."""

import pytest
import torch
import yaml

from albums import (
    IGNORED,
    NUMBERS,
    SIDES,
    AlbumArguments,
    Albums,
)
from tests.programs import ROOT
from vision_model import VisionModelArguments, load_model, load_processors, new_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    options = yaml.safe_load((ROOT / "recipes/quickstart/vlm.yaml").read_text())
    args = VisionModelArguments(model_config=options["model_config"])
    tokenizer, image_processor = load_processors(args)
    load_model(args, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    return folder


def parts_trained(checkpoint, **options):
    """Whether parameters of the tower, and of the text model, get gradients."""
    args = VisionModelArguments(model_name_or_path=str(checkpoint), **options)
    tokenizer, _ = load_processors(args)
    model = load_model(args, tokenizer)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in names) == ("lora_r" in options)
    of_tower = [".visual." in name for name in names]
    return any(of_tower), not all(of_tower)


@pytest.mark.parametrize("lora", [{}, {"lora_r": 2}])
def test_what_is_frozen_is_not_trained_and_gets_no_adapters(checkpoint, lora):
    assert parts_trained(checkpoint, **lora) == (True, True)
    assert parts_trained(checkpoint, freeze="tower", **lora) == (False, True)
    assert parts_trained(checkpoint, freeze="text", **lora) == (True, False)


def test_processors_of_a_checkpoint_are_those_that_were_saved(checkpoint):
    tokenizer, image_processor = load_processors(
        VisionModelArguments(model_name_or_path=str(checkpoint))
    )
    assert (image_processor.patch_size, image_processor.merge_size) == (8, 2)
    assert tokenizer.decode(tokenizer("which colour ?").input_ids) == "which colour ?"


# ---- drawn albums


@pytest.fixture(scope="module")
def albums():
    options = yaml.safe_load((ROOT / "recipes/quickstart/vlm.yaml").read_text())
    args = VisionModelArguments(model_config=options["model_config"])
    tokenizer, image_processor = load_processors(args)
    config = new_config(args, tokenizer)
    return Albums(60, 0, tokenizer=tokenizer, image_processor=image_processor, config=config)


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


def test_albums_that_are_not_drawn_are_refused():
    with pytest.raises(ValueError, match="held_out_albums=0: give 1 or more"):
        AlbumArguments(held_out_albums=0)
