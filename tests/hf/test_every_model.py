"""Every model of transformers is taken or refused as the tables of the page on models say, and a
small one of each family that is taken equals one process (`-m nightly`): its outputs and gradients
on four ranks that are threads, and the outputs that change when one token does."""

import inspect
import re
import sys
from dataclasses import fields

import pytest
import torch
import transformers

from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.probe import probe_model
from hf_flexseq.hf.model.small import small_model
from tests.hf.model_families import (
    SETTING,
    TAKEN,
    checkpoints,
    families,
    family_row,
    image_families,
    image_row,
    options_of,
    rows_of,
)
from tests.programs import ROOT
from tests.versions import pinned_transformers

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
ROWS = {row[0].strip("`"): row for row in rows_of("families.csv")}
IMAGE_ROWS = {row[0].split("`")[1]: row for row in rows_of("image_families.csv")}
# By default, or by a checkpoint of theirs.
ARE_TAKEN = [
    name
    for name, (_, default, published, _) in ROWS.items()
    if default.startswith((TAKEN, SETTING)) or f"): {TAKEN}" in published
]
CHANGES = ((0, 19), (2, 1))  # (sequence, token) that is changed
AGAIN = "run python -m tests.hf.model_families"


# Their configurations must have a layer of full attention.
NEED_FULL = ("olmo_hybrid",)


def without_full_attention(cls, options):
    """The options of the same model without its layers of full attention; None if these are all,
    or layers share keys."""
    whole = cls(**options)
    base = whole.get_text_config()
    types = getattr(base, "layer_types", None) or []
    near = [index for index, kind in enumerate(types) if kind != "full_attention"]
    shares_keys = getattr(base, "num_kv_shared_layers", 0)
    if base.model_type in NEED_FULL or shares_keys or len(near) in (0, len(types)):
        return None
    few = {"num_hidden_layers": len(near)}
    for field in fields(base):
        value = vars(base).get(field.name)
        if isinstance(value, list) and len(value) == len(types):
            few[field.name] = [value[index] for index in near]
    if base is not whole:
        few = {"text_config": options.get("text_config", {}) | few}
    return options | few


def nightly(test):
    return pinned_transformers(pytest.mark.nightly(test))


@nightly
def test_the_tables_have_every_model():
    assert list(ROWS) == list(families()), AGAIN
    assert list(IMAGE_ROWS) == list(image_families()), AGAIN


@nightly
@pytest.mark.parametrize("name", ROWS)
def test_a_model_is_taken_or_refused_as_its_row_says(name):
    assert family_row(families()[name]) == ROWS[name], AGAIN


@nightly
@pytest.mark.parametrize("name", IMAGE_ROWS)
def test_images_of_a_model_are_taken_or_refused_as_its_row_says(name):
    assert image_row(image_families()[name]) == IMAGE_ROWS[name], AGAIN


@nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ARE_TAKEN)
def test_a_model_that_is_taken_equals_one_process(name):
    """One of all kinds of its layers, and one without full attention, whose changes end where
    windows and chunks do."""
    family = families()[name]
    for checkpoint in (None, *checkpoints().get(name, ())):
        options = options_of(family, checkpoint)
        model = small_model(family.kind, options)
        assert probe_model(model, changes=CHANGES) == [], checkpoint
        near = without_full_attention(family.kind.config_class, options)
        if near is not None:
            assert (
                probe_model(small_model(family.kind, near), changes=CHANGES, gradients=False) == []
            ), checkpoint


@pytest.mark.slow
def test_every_checkpoint_has_a_row_a_source_and_options_that_say_something():
    known = families()
    for name, rows in checkpoints().items():
        kind = known[name].kind
        source = ""  # of the configuration and of the model, which read the options
        for cls in (kind.config_class, kind):
            source += inspect.getsource(sys.modules[cls.__module__])
        for row in rows:
            assert f"[{row.checkpoint}]({row.source})" in ROWS[name][2]
            assert row.source.startswith("https://")
            for option in row.options:
                assert option in source, (row.checkpoint, option)


# How the page loads the text of a model with towers, and further options of a tiny one.
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "call", "text", "tower"),
    [
        (
            "Qwen3_5",
            r"= (AutoModelForCausalLM)\.from_pretrained\(.*?(\))",
            LINEAR,
            {"depth": 1, "out_hidden_size": 32},
        ),
        (
            "Gemma4",
            r"= (\w+)\.from_pretrained\(\s*\S+, (key_mapping=.*)\n\)",
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
        ),
    ],
    ids=["Qwen3_5", "Gemma4"],
)
def test_the_text_of_a_model_with_towers_is_loaded_as_the_page_says(
    tmp_path, name, call, text, tower
):
    config = getattr(transformers, f"{name}Config")(
        text_config=SIZES | HEADS | text, vision_config=TOWER | tower
    )
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.save_pretrained(tmp_path)
    loader, options = re.search(call, PAGE).groups()
    options = eval(f"dict({options.removesuffix(')')})")
    found, info = getattr(transformers, loader).from_pretrained(
        tmp_path, output_loading_info=True, **options
    )
    assert type(found).__name__ == f"{name}ForCausalLM"
    assert not info["missing_keys"]
    layer, wanted = found.model.layers[0], whole.model.language_model.layers[0]
    assert torch.equal(layer.mlp.up_proj.weight, wanted.mlp.up_proj.weight)
    check_model(found)
