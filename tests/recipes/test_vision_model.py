"""Which parts of a vision-language model are trained, and its processors from a checkpoint."""

import pytest
import yaml

from tests.programs import ROOT
from vision_model import VisionModelArguments, load_model, load_processors


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
