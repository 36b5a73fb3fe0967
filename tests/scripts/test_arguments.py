"""docs/options.md has every option of transformers and TRL, with its true effect."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import trl
from accelerate.utils import DistributedType
from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

from hf_flexseq.base.refusals import refuse
from hf_flexseq.hf.trainer import checks as refusals
from hf_flexseq.hf.trainer.checks import ON_SAMPLES, TRAINER
from tests.hf.tiny import tiny_llama
from tests.versions import since

ROOT = Path(__file__).parents[2]
RENDER = runpy.run_path(str(ROOT / "scripts/pages/render.py"))


def by_option(rows):
    """The row of each option."""
    named = [(name, row) for row in rows for name in row["names"].split()]
    assert len(dict(named)) == len(named), "an option has one row"
    return dict(named)


GROUPS, *OF_TRL = RENDER["data"]("arguments.yaml").items()
OF_TRAINING = by_option(row for rows in GROUPS[1].values() for row in rows)
OF_TRL = {config: by_option(rows) for config, rows in OF_TRL}
ROWS = [
    (config, name, row)
    for config, rows in {"TrainingArguments": OF_TRAINING, **OF_TRL}.items()
    for name, row in rows.items()
]


def names_of(config):
    return {field.name for field in fields(config)}


@since("transformers", "5.23", "options of the page")
@since("trl", "1.16", "options of the page")
def test_every_option_is_on_the_page_and_no_other():
    versions = (transformers.__version__, trl.__version__)
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    is_of_page = all(f"{v.rpartition('.')[0]})" in page for v in versions)
    listed = set(OF_TRAINING)
    of_classes = {TrainingArguments: listed}
    for config in (SFTConfig, DPOConfig, GRPOConfig):
        of_classes[config] = set(OF_TRL[config.__name__]) | listed
    for config, on_page in of_classes.items():
        assert names_of(config) <= on_page, "give it a row in scripts/pages/arguments.yaml"
        if is_of_page:
            assert on_page == names_of(config) | names_of(TrainingArguments)


def test_a_file_that_is_named_as_proof_has_the_option():
    for config, name, row in ROWS:
        if shown := row.get("shown"):
            text = (ROOT / RENDER["SHOWN"].get(shown, shown)).read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", text), f"{shown} has no {name} of {config}"


VERDICTS = ("works", "differs", "partly refused", "refused", "no effect", "untested")


def test_verdicts_are_explained():
    for config, name, row in ROWS:
        verdict = row.get("verdict", "works")
        assert verdict in VERDICTS, (config, name)
        assert "note" in row or "refusals" in row or verdict == "works", (config, name)
        assert ("refusals" in row) == ("refused" in verdict), (config, name)


# ---- refusals that no other test meets


def fake(*, is_model_parallel=False, **args):
    """A trainer with these arguments, and nothing that was refused before."""
    usual = {
        "n_gpu": 1,
        "average_tokens_across_devices": True,
        "ddp_timeout": 1800,
        "label_smoothing_factor": 0.0,
        "use_liger_kernel": False,
        "liger_kernel_config": None,
        "optim": "adamw_torch",
        "world_size": 1,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "save_on_each_node": False,
        "save_only_model": False,
    }
    return SimpleNamespace(
        args=SimpleNamespace(**usual | args),
        accelerator=SimpleNamespace(distributed_type=DistributedType.NO),
        model=tiny_llama(),
        is_model_parallel=is_model_parallel,
        is_distributed_loading_by_transformers=False,
        get_tp_size=lambda: 1,
        aux_loss_enabled=False,
    )


@pytest.mark.parametrize(
    ("setting", "rules", "met"),
    [
        (
            "fused_linear_cross_entropy and cross_entropy in liger_kernel_config",
            TRAINER,
            {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
        ),
        (
            "enable_jit_checkpoint=True on several ranks",
            TRAINER,
            {"enable_jit_checkpoint": True, "world_size": 2},
        ),
        ("a model on several devices (device_map)", TRAINER, {"is_model_parallel": True}),
        (
            "activation_offloading=True with an objective or a loss of your own",
            ON_SAMPLES,
            {"activation_offloading": True},
        ),
    ],
)
def test_a_setting_that_is_said_to_be_refused_is(setting, rules, met, monkeypatch):
    monkeypatch.setattr(refusals, "is_liger_kernel_available", lambda: True)
    (rule,) = (one for one in rules if one.setting == setting)
    with pytest.raises(rule.error, match=re.escape(f"{rule.why}; {rule.instead}")):
        refuse(rules, fake(**met))
