"""scripts/benchmarks/reach.py: what it knows of published checkpoints, and what the page on models
says. The census itself takes minutes."""

import importlib
import inspect
import re
import sys

import pytest
import torch
import transformers

from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.layer_kinds import layer_kinds
from tests.programs import ROOT

FOLDER = ROOT / "scripts/benchmarks"
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
TABLE = (ROOT / "scripts/pages/families.csv").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def census():
    """The modules (reach_models, reach) of the benchmarks."""
    sys.modules.pop("common", None)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("reach_models"), importlib.import_module("reach")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("reach_models", "reach", "common"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_checkpoint_has_a_family_a_source_and_options_that_say_something(census):
    families, _ = census
    known = {family.name: family for family in families.families()}
    assert [name for name in known if f"\n`{name}`," not in TABLE] == []
    for name, rows in families.checkpoints().items():
        kind = known[name].kind
        source = ""  # of the configuration and of the model, which read the options
        for cls in (kind.config_class, kind):
            source += inspect.getsource(sys.modules[cls.__module__])
        for row in rows:
            assert row.source.startswith("https://")
            for option in row.options:
                assert option in source, (row.checkpoint, option)


def test_checkpoints_have_the_windows_that_are_known_of_them(census):
    families, _ = census
    known = {family.name: family for family in families.families()}
    wanted = {
        "openai/gpt-oss-120b": (36, 18, {128}),
        "google/gemma-2-27b": (46, 23, {4096}),
        "google/gemma-3-27b (text)": (62, 52, {1024}),
    }
    for row in (row for rows in families.checkpoints().values() for row in rows):
        if row.checkpoint in wanted:
            kinds = layer_kinds(families.checkpoint_config(known[row.family], row))
            near = [kind.reach.window for kind in kinds if not kind.reach.is_full]
            assert (len(kinds), len(near), set(near)) == wanted.pop(row.checkpoint)
    assert not wanted


def test_a_refusal_is_put_into_a_group(census):
    _, reach = census
    why = "A counts positions itself, in b"
    answer = reach.Answer("a", "A", None, None, reach.REFUSED, why, ())
    assert "count positions" in reach.group_of(answer)


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
