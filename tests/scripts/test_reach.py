"""scripts/benchmarks/reach.py: what it knows of published checkpoints, and what the page on models
says. The census itself takes minutes."""

import importlib
import inspect
import sys

import pytest

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
