"""axolotl's runs on planned steps: what its configuration refuses, how its trainer is taken, and,
where axolotl is installed, its own command on two CPU processes against one without hf_flexseq."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from pydantic import BaseModel, ValidationError, model_validator
from safetensors.numpy import load_file

from hf_flexseq import FlexSeqArguments
from hf_flexseq.base import versions
from tests.hf.objectives import words_of
from tests.hf.tiny import refused, tiny_llama
from tests.hf.trainers import distance, word_tokenizer

PLUGIN = "hf_flexseq.integrations.axolotl.FlexSeqPlugin"
MODULE = "hf_flexseq.integrations.axolotl"


class Configuration(BaseModel):
    """Stands for axolotl's configuration, with the keys that the plugin looks at."""

    plugins: list[str] | None = None
    sample_packing: bool | None = None
    eval_sample_packing: bool | None = None
    context_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    sequence_parallel_degree: int | None = None
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool | str | None = None
    activation_offloading: bool | str | None = None
    tiled_mlp: bool | None = None
    attn_implementation: str | None = None
    rl: str | None = None
    chunked_cross_entropy: bool | None = None

    @model_validator(mode="after")
    def check_context_parallel_size(self):
        """As axolotl's own check where the package is missing."""
        if (self.context_parallel_size or self.sequence_parallel_degree or 1) > 1:
            raise ImportError("ring_flash_attn is not installed")
        return self


@pytest.fixture
def module(monkeypatch):
    """The plugin's module, beside axolotl or a stand-in for its base class."""
    if find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(
            sys.modules["axolotl.integrations.base"],
            "BasePlugin",
            type("BasePlugin", (), {}),
            raising=False,
        )
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def read(module):
    """Reads a configuration, as axolotl does: its own class before that of the plugin."""
    merged = type("Merged", (Configuration, module.FlexSeqInput), {})
    return lambda **keys: merged(**keys)


# ---- the configuration


def test_the_plugin_names_a_class_that_can_be_imported_by_its_path(module):
    package, _, name = module.FlexSeqPlugin().get_input_args().rpartition(".")
    assert getattr(importlib.import_module(package), name) is module.FlexSeqInput
    assert module.PATH == PLUGIN


def test_options_are_those_of_flexseq_arguments(read, module):
    block = {"max_tokens_per_rank": 256, "cost_model": "estimate"}
    assert read(flexseq=block).model_dump(exclude_none=True)["flexseq"] == block
    assert module.options_in(block, "axolotl").max_tokens_per_rank == 256
    assert module.options_in(None, "axolotl") == FlexSeqArguments()
    read(flexseq=None)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"max_token_per_rank": 3},
            "no option 'max_token_per_rank', did you mean 'max_tokens_per_rank'",
        ),
        ({"planner": "nobody"}, "planner"),
        ({"pipeline_parallel_size": 2}, "axolotl loads the whole model on every rank"),
    ],
)
def test_wrong_options_are_refused_when_the_file_is_read(read, block, message):
    with pytest.raises(ValidationError, match=message):
        read(flexseq=block)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sample_packing": True}, "sample_packing: true: its sampler"),
        ({"eval_sample_packing": True}, "eval_sample_packing: true"),
        ({"context_parallel_size": 2}, "context_parallel_size=2: plans choose the ranks"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"activation_offloading": "legacy"}, "activation_offloading: legacy"),
        ({"sequence_parallel_degree": 2}, "sequence_parallel_degree=2: plans choose the ranks"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing='offload': it bypasses"),
        ({"tiled_mlp": True}, "tiled_mlp: true"),
        ({"attn_implementation": "sage"}, "attn_implementation: sage"),
        ({"chunked_cross_entropy": True}, "chunked_cross_entropy: true"),
        ({"rl": "orpo"}, "rl: orpo"),
        (
            {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
            "the plugin axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin: it computes",
        ),
    ],
)
def test_settings_that_contradict_plans_are_refused_when_the_file_is_read(read, keys, message):
    with pytest.raises(ValidationError, match=message) as raised:
        read(flexseq={}, **keys)
    assert len(raised.value.errors()) == 1


CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LONG_CONTEXT = {
    "plugins": [PLUGIN, CUT],
    "sample_packing": True,
    "eval_sample_packing": True,
    "sequence_parallel_degree": 4,
    "tiled_mlp": True,
    "activation_offloading": "legacy",
    "gradient_accumulation_steps": 8,
}


def test_all_that_a_file_has_to_change_is_said_at_once(read):
    with pytest.raises(ValidationError) as raised:
        read(flexseq={"planner": "nobody"}, **LONG_CONTEXT)
    (error,) = raised.value.errors()
    head, *lines = error["msg"].splitlines()
    assert head.endswith("6 reasons to refuse this:")
    wanted = [
        "planner must be one of",
        "sample_packing: true, eval_sample_packing: true: .*sequence_len / the mean tokens",
        "sequence_parallel_degree=4: .*a batch or accumulation divided by 4 keeps the tokens",
        f"the plugin {CUT}: .*; leave the plugin out",
        "tiled_mlp: true: .*; leave it out",
        "activation_offloading: legacy: .*; leave it out",
    ]
    for line, message in zip(lines, wanted, strict=True):
        assert re.search(message, line), line


def test_the_batch_that_keeps_the_tokens_of_a_step(read):
    with pytest.raises(ValidationError, match=r"micro_batch_size=1 and .*_steps=2 keep the tok"):
        read(context_parallel_size=4, gradient_accumulation_steps=8)


def test_objectives_name_the_version_of_trl_that_they_need(read, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "1.9.0")
    with pytest.raises(ValidationError, match=r"rl: dpo .it needs trl 1.15, and 1.9.0 is"):
        read(rl="dpo")


def test_settings_that_go_together_are_taken(read):
    read(
        flexseq={},
        sample_packing=False,
        context_parallel_size=1,
        activation_offloading=False,
        attn_implementation="flash_attention_2",
        plugins=[PLUGIN, "axolotl.integrations.spectrum.SpectrumPlugin"],
    )


# ---- the trainer


def made(name, **attributes):
    """A trainer of a class of axolotl's by that name, with a loss of its own."""
    cls = type(name, (), {"__module__": "axolotl.core.trainers", "compute_loss": None})
    trainer = cls()
    vars(trainer).update(attributes)
    return trainer


def test_other_trainers_of_axolotl_are_refused_by_name(module):
    with refused("AxolotlKDTrainer of axolotl: its loss was not tried"):
        module.check_trainer_class(made("AxolotlKDTrainer"))
    with refused("the loss function that axolotl gives to AxolotlTrainer: it reads logits"):
        module.check_trainer_class(made("AxolotlTrainer", compute_loss_func=print))
    module.check_trainer_class(made("AxolotlTrainer", compute_loss_func=None))


def test_a_trainer_plans_its_steps_after_axolotl_has_made_it(module, tmp_path):
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from hf_flexseq import DataCollatorForFlexSeq, FlexSeqMixin

    given = module.FlexSeqPlugin().get_training_args(SimpleNamespace())
    assert given == {"average_tokens_across_devices": True}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
    collator = DataCollatorForSeq2Seq(word_tokenizer())
    trainer = Trainer(tiny_llama(), arguments, collator, [{"input_ids": [1], "labels": [1]}])
    trainer.eval_data_collator = collator
    cfg = {"flexseq": {"cost_model": "estimate", "lookahead": 0}}
    (callback,) = module.FlexSeqPlugin().add_callbacks_post_trainer(cfg, trainer)
    assert isinstance(trainer, FlexSeqMixin)
    assert trainer.flexseq.args.lookahead == 0
    # evaluations of axolotl's trainer do not use data_collator
    assert isinstance(trainer.eval_data_collator, DataCollatorForFlexSeq)
    trainer.add_callback(callback)


# ---- axolotl's own command

STEPS = 20
TRAINING = """\
base_model: {folder}/model
datasets: [{{path: {folder}/data.jsonl, ds_type: json, type: completion}}]
val_set_size: 0
sequence_len: 512
micro_batch_size: {batch}
gradient_accumulation_steps: {accumulation}
max_steps: 20
num_epochs: 1
optimizer: {optimizer}
learning_rate: {rate}
lr_scheduler: constant
attn_implementation: sdpa
bf16: false
tf32: false
save_strategy: "no"
logging_steps: 1
output_dir: {folder}/{name}
dataset_prepared_path: {folder}/prepared
dataset_num_proc: 1
"""
PLANNED = f"plugins: [{PLUGIN}]\nflexseq: {{max_tokens_per_rank: 256, cost_model: estimate}}\n"
# axolotl gives each of several processes a GPU's number as its device, on a CPU as well.
COMMAND = """\
import sys
import axolotl.cli.config as config
stock = config.normalize_config
def normalize_config(cfg):
    stock(cfg)
    cfg.device_map = None
config.normalize_config = normalize_config
if __name__ == "__main__":  # processes that tokenize import this file
    from axolotl.cli.train import do_cli
    do_cli(config=sys.argv[1])
"""


def command(folder, name, ranks, text):
    """Run axolotl's training command; return the weights that it has saved."""
    (folder / f"{name}.yaml").write_text(text)
    (folder / "command.py").write_text(COMMAND)
    launched = [sys.executable]
    if ranks > 1:
        launched += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    found = subprocess.run(
        [*launched, str(folder / "command.py"), str(folder / f"{name}.yaml")],
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "AXOLOTL_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert ("flexseq/" in found.stdout + found.stderr) is (ranks > 1)  # it has planned, or not
    return load_file(folder / name / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(900)  # importing axolotl takes most of it
@pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
def test_two_processes_train_as_axolotl_does_on_one(tmp_path):
    """By SGD: AdamW divides by the root of small squares, which magnifies rounding."""
    import torch

    rng = random.Random(0)
    tokenizer = word_tokenizer()
    rows = [
        {"text": words_of(rng, min(400, int(rng.lognormvariate(3.2, 1.0)) + 2))}
        for _ in range(400)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    same = {"folder": tmp_path, "optimizer": "sgd", "rate": 0.5}
    plain = TRAINING.format(**same, name="plain", batch=16, accumulation=1)
    planned = TRAINING.format(**same, name="planned", batch=4, accumulation=2)
    assert yaml.safe_load(planned)["max_steps"] == STEPS
    wanted = command(tmp_path, "plain", 1, plain)
    found = command(tmp_path, "planned", 2, planned + PLANNED)
    assert distance(found, wanted) / distance(wanted, before) < 1e-6
