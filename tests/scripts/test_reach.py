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


def test_every_checkpoint_has_a_family_a_source_and_options_that_say_something(census):
    families, _ = census
    known = {family.name: family for family in families.families()}
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
    windows = {}
    for rows in families.checkpoints().values():
        for row in rows:
            if row.family in ("gpt_oss", "gemma2", "gemma3_text"):
                kinds = layer_kinds(families.checkpoint_config(known[row.family], row))
                near = [kind.reach.window for kind in kinds if not kind.reach.is_full]
                windows[row.checkpoint] = (len(kinds), len(near), set(near))
    assert windows["openai/gpt-oss-120b"] == (36, 18, {128})
    assert windows["google/gemma-2-27b"] == (46, 23, {4096})
    assert windows["google/gemma-3-27b (text)"] == (62, 52, {1024})


def test_a_refusal_is_put_into_a_group(census):
    _, reach = census
    answer = reach.Answer(
        "a", "A", None, None, reach.REFUSED, "A counts positions itself, in b", ()
    )
    assert "count positions" in reach.group_of(answer)


def test_the_page_on_models_names_every_family(census):
    families, _ = census
    page = (ROOT / "docs/models.md").read_text()
    missing = [f.name for f in families.families() if f"| `{f.name}` |" not in page]
    assert missing == []


SMALL_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


@pytest.mark.parametrize("name", ["Qwen3_5", "Gemma4"])
def test_the_text_of_a_model_with_towers_is_loaded_as_the_page_says(tmp_path, name):
    page = (ROOT / "docs/models.md").read_text()
    if name == "Qwen3_5":
        text = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
        text |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
        tower = {**TOWER, "depth": 1, "out_hidden_size": 32}
        call = re.search(r"= (AutoModelForCausalLM)\.from_pretrained\(.*?(\))", page)
    else:
        text = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        tower = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        call = re.search(r"= (\w+)\.from_pretrained\(\s*\S+, (key_mapping=.*)\n\)", page)
    config = getattr(transformers, f"{name}Config")(
        text_config=SMALL_TEXT | text, vision_config=tower
    )
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.save_pretrained(tmp_path)
    options = eval(f"dict({call[2].removesuffix(')')})")
    found, info = getattr(transformers, call[1]).from_pretrained(
        tmp_path, output_loading_info=True, **options
    )
    assert type(found).__name__ == f"{name}ForCausalLM"
    assert not info["missing_keys"]
    layer, wanted = found.model.layers[0], whole.model.language_model.layers[0]
    assert torch.equal(layer.mlp.up_proj.weight, wanted.mlp.up_proj.weight)
    check_model(found)
