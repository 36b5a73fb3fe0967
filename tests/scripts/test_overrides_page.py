"""The page of what a user may override or register, against the classes that it is about."""

import inspect
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "scripts/overrides_page.py"))


def test_the_page_is_what_the_rules_say(page):
    written = (ROOT / "docs/overrides.md").read_text(encoding="utf-8")
    assert page["page_text"]() == written, "run python scripts/overrides_page.py"


def test_every_place_where_a_user_can_put_code_has_an_entry(page):
    arguments = set(inspect.signature(Trainer.__init__).parameters)
    assert set(page["ARGUMENTS"]) == arguments - {"self", "model", "args"}
    of_modules = {name for name in dir(nn.Module) if name.startswith("register_")}
    of_tensors = {name for name in dir(torch.Tensor) if name.startswith("register_")}
    assert set(page["HOOKS"]) == of_modules | of_tensors
    events = {name for name in dir(TrainerCallback) if name.startswith("on_")}
    assert set(page["EVENTS"]) == events


def test_every_method_of_the_trainers_is_on_the_page(page):
    written = (ROOT / "docs/overrides.md").read_text(encoding="utf-8")
    for name in vars(Trainer):
        if callable(getattr(Trainer, name)) and not name.startswith("__"):
            assert f"`{name}`" in written, name


def test_the_page_of_refusals_is_what_the_tables_say():
    refusals = runpy.run_path(str(ROOT / "scripts/refusals_page.py"))
    written = (ROOT / "docs/refusals.md").read_text(encoding="utf-8")
    assert refusals["page_text"]() == written, "run python scripts/refusals_page.py"
