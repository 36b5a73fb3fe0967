"""docs/options.md has every option of transformers and TRL, with its true effect."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import trl
from accelerate.utils import DynamoBackend, ParallelismConfig
from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

from hf_flexseq import FlexSeqArguments
from hf_flexseq.base.refusals import refuse
from hf_flexseq.hf.refusals import trainer as refusals
from hf_flexseq.hf.refusals.accelerator import ACCELERATOR, Setup
from hf_flexseq.hf.refusals.predictions import PREDICTIONS, Predicting
from hf_flexseq.hf.refusals.trainer import MODEL, ON_SAMPLES, TRAINER, TrainerOfModel
from tests.hf.test_checks import OwnLoss, fresh_accelerate, make_trainer  # noqa: F401
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


# ---- refusals, each by a setting that meets it

SETTINGS = {  # by Refusal.setting: what a FlexSeqConfig has
    "optimizers that update weights in the backward (lomo, adalomo, layerwise)": {"optim": "lomo"},
    "average_tokens_across_devices=False": {"average_tokens_across_devices": False},
    "torch.compile with CUDA graphs (reduce-overhead, max-autotune)": {
        "torch_compile_mode": "reduce-overhead"
    },
    "fused_linear_cross_entropy and cross_entropy in liger_kernel_config": {
        "use_liger_kernel": True,
        "liger_kernel_config": {"cross_entropy": True},
    },
    "dispatch_batches=True": {"accelerator_config": {"dispatch_batches": True}},
    "split_batches=True": {"accelerator_config": {"split_batches": True}},
    "ddp_timeout of 0 and less": {"ddp_timeout": 0},
    "ddp_static_graph=True": {"ddp_static_graph": True},
}


def fake(**args):
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
        model=tiny_llama(),
        is_model_parallel=False,
        is_distributed_loading_by_transformers=False,
        get_tp_size=lambda: 1,
        aux_loss_enabled=False,
    )


def with_own_loss():
    model = tiny_llama()
    model.loss_function = lambda **given: None
    return TrainerOfModel(fake(label_smoothing_factor=0.1), model)


def predicting_with_own_loss(**args):
    model = tiny_llama()
    model.loss_function = lambda **given: None
    trainer = SimpleNamespace(**vars(fake(**args)) | {"model": model})
    trainer.accelerator = SimpleNamespace(even_batches=True)
    return Predicting(trainer, model, 1)


def loaders(**settings):
    usual = {"dispatch_batches": None, "split_batches": False, "use_stateful_dataloader": False}
    accelerator = SimpleNamespace(
        num_processes=1,
        distributed_type=SimpleNamespace(value="NO"),
        gradient_accumulation_steps=1,
        parallelism_config=settings.pop("parallelism_config", None),
        state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)),
        ddp_handler=None,
        mixed_precision="no",
        dataloader_config=SimpleNamespace(**usual | settings),
    )
    return Setup(accelerator, FlexSeqArguments())


CASES = {  # by Refusal.setting: the table, and a case in it
    "include_for_metrics=['loss'] with a model's own loss_function or router loss": lambda: (
        PREDICTIONS,
        predicting_with_own_loss(include_for_metrics=["loss"]),
    ),
    "enable_jit_checkpoint=True on several ranks": lambda: (
        TRAINER,
        fake(enable_jit_checkpoint=True, world_size=2),
    ),
    "activation_offloading=True of TRL with offload=True of activation checkpointing": lambda: (
        TRAINER,
        fake(
            activation_offloading=True,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"offload": True, "use_reentrant": False},
        ),
    ),
    "activation_offloading=True with an objective or a loss of your own": lambda: (
        ON_SAMPLES,
        fake(activation_offloading=True),
    ),
    "a model on several devices (device_map)": lambda: (
        TRAINER,
        SimpleNamespace(**vars(fake()) | {"is_model_parallel": True}),
    ),
    "save_on_each_node=True with a model that DistributedConfig has sharded": lambda: (
        TRAINER,
        SimpleNamespace(
            **vars(fake(save_on_each_node=True, save_strategy="steps"))
            | {"is_distributed_loading_by_transformers": True}
        ),
    ),
    "label_smoothing_factor with a model that keeps its own loss": lambda: (
        MODEL,
        with_own_loss(),
    ),
    "cp_size, sp_size and tp_size of parallelism_config": lambda: (
        ACCELERATOR,
        loaders(parallelism_config=ParallelismConfig(tp_size=2)),
    ),
    "use_stateful_dataloader=True with a lookahead": lambda: (
        ACCELERATOR,
        loaders(use_stateful_dataloader=True),
    ),
}


def met(row):
    return [(one.setting, one) for one in RENDER["refusals_of"](row)]


REFUSALS = dict(pair for *_, row in ROWS for pair in met(row))
OF_SFT = "label_smoothing_factor of SFTTrainer"  # tests/hf/test_label_smoothing.py makes one


@pytest.mark.parametrize("setting", sorted(REFUSALS.keys() - {OF_SFT}))
def test_a_setting_that_is_said_to_be_refused_is(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(refusals, "is_liger_kernel_available", lambda: True)
    refusal = REFUSALS[setting]

    def meet():
        if setting in SETTINGS:
            make_trainer(tmp_path, **SETTINGS[setting])
        else:
            refuse(*CASES[setting]())

    with pytest.raises(refusal.error, match=re.escape(f"{refusal.why}; {refusal.instead}")):
        meet()
