"""scripts/benchmarks/dropin.py and its plugin, on tests written for it: each outcome, on two
ranks."""

import json
import runpy
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program

BENCHMARKS = ROOT / "scripts/benchmarks"

SAMPLE = """
import os
import unittest

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import gone_since


def make_trainer(folder, **options):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    args = TrainingArguments(str(folder), report_to="none", max_steps=1, **options)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 32
    return Trainer(model=model, args=args, train_dataset=data)


def test_trains_on_all_ranks_into_one_folder(tmp_path):
    trainer = make_trainer(tmp_path)
    assert trainer.args.world_size == 2
    assert "flexseq" in vars(trainer)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    assert (tmp_path / "model.safetensors").exists()


class TestsInAClass(unittest.TestCase):
    def test_is_refused(self):
        make_trainer("unused", ddp_static_graph=True)


def test_fails(tmp_path):
    make_trainer(tmp_path)
    raise ValueError("not one of hf_flexseq's")


def test_fails_on_a_rank():
    assert os.environ["RANK"] == "0"


def test_makes_no_trainer():
    pass


def test_asks_for_what_is_gone():
    gone_since()


@pytest.mark.skipif(True, reason="as for a missing package")
def test_is_skipped():
    pass
"""

OUTCOMES = {
    "test_trains_on_all_ranks_into_one_folder": ("passed", ""),
    "TestsInAClass::test_is_refused": ("refused", "ddp_static_graph=True"),
    "test_fails": ("failed", "ValueError: not one"),
    "test_fails_on_a_rank": ("failed", "rank 0 unused:  | rank 1 failed: AssertionError"),
    "test_makes_no_trainer": ("unused", ""),
    "test_asks_for_what_is_gone": ("failed", "gone_since is not in the installed version"),
    "test_is_skipped": ("skipped", "as for a missing package"),
}


@pytest.mark.nightly
@pytest.mark.processes
def test_each_outcome_of_a_test_with_the_class_exchanged(tmp_path, monkeypatch):
    """pytest runs in a fork of this process, as the program that `python -m pytest` is."""
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    outcomes = tmp_path / "outcomes.jsonl"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    words = [
        *("-p", "exchange.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("--exchange", "--ranks", 2, "--outcomes", outcomes, "--rootdir", tmp_path, tmp_path),
    ]
    with pytest.raises(AssertionError, match="SystemExit"):  # with the number of tests: none ran
        run_program(Path(pytest.__file__).parent.parent / "pytest/__main__.py", *words)
    records = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = {one["test"].partition("::")[2]: (one["outcome"], one["why"]) for one in records}
    assert found.keys() == OUTCOMES.keys()
    for name, (outcome, why) in OUTCOMES.items():
        assert found[name][0] == outcome, (name, found[name])
        assert why in found[name][1]


@pytest.mark.processes
def test_without_sources_it_says_what_it_leaves_out():
    printed = run_program(BENCHMARKS / "dropin.py")
    assert "trl: left out; --trl FOLDER" in printed
    assert "transformers: left out; --transformers FOLDER" in printed
    assert "|" not in printed


def test_the_page_counts_and_names(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = runpy.run_path(str(BENCHMARKS / "dropin.py"))["page"]
    outcomes = [
        ("tests/a.py::a", "passed", ""),
        ("tests/a.py::b", "refused", "ValueError: example 3 has no labels: it has"),
        ("tests/a.py::c", "refused", "ValueError: example 0 has no labels: it has"),
        ("tests/b.py::d", "failed", "AssertionError: 1 | 2"),
        ("tests/b.py::e", "unused", ""),
    ]
    ours = [dict(zip(("test", "outcome", "why"), one, strict=True)) for one in outcomes]
    left_out = [{"test": "f", "outcome": "skipped", "why": "skipped: needs an accelerator"}]
    result = {"library": "trl", "ranks": 2, "stock": {}, "left_out": left_out, "ours": ours}
    printed = page([result])
    assert "| trl | 2 | a.py | 3 | 1 | 2 | 0 |" in printed
    assert "| trl | 2 | b.py | 1 | 0 | 0 | 1 |" in printed
    assert "| trl | 2 | skipped | needs an accelerator | 1 |" in printed
    assert "| trl | 2 | an example has no labels | 2 |" in printed
    assert "| trl | 2 | tests/b.py::d | AssertionError: 1 / 2 |" in printed
