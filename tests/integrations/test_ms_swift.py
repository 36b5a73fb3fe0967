"""ms-swift's `swift sft` and `swift pt` on planned steps, where ms-swift is installed."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from bpe import train_bpe
from tests.programs import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(600)]
swift = pytest.importorskip("swift", reason="ms-swift is not installed")

STEPS = 20
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
PLUGIN = """
from hf_flexseq.integrations.ms_swift import register
register(cost_model="estimate", max_tokens_per_rank=300, plan_trace="plans.jsonl")
"""
OPTIONS = {
    "model": "model",
    "model_type": "qwen2",
    "template": "qwen2_5",
    "dataset": "data.jsonl",
    "split_dataset_ratio": 0.1,
    "tuner_type": "full",
    "torch_dtype": "float32",
    "attn_impl": "sdpa",
    "optim": "sgd",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_steps": STEPS,
    "eval_steps": STEPS,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "use_cpu": True,
    "report_to": "none",
    "check_model": False,
    "add_version": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, its tokenizer, data of very different lengths, and the plugin."""
    folder = tmp_path_factory.mktemp("swift")
    rng = random.Random(0)

    def words(count):
        return " ".join(rng.choice(WORDS) for _ in range(count))

    tokenizer = train_bpe([words(200) for _ in range(20)], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(64):
            answer = words(1 + int(4 * rng.paretovariate(1.0)) % 200)
            question = {"role": "user", "content": words(1 + rng.randrange(10))}
            messages = [question, {"role": "assistant", "content": answer}]
            print(json.dumps({"messages": messages}), file=file)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder


def run(folder, output, ranks, **options):
    """What a run of `swift sft` says. ranks: processes; None without the plugin, in one."""
    options = {**OPTIONS, "output_dir": output, **options}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "USE_HF": "1"}
    if ranks is not None:
        options |= {"external_plugins": "plugin.py", "ddp_backend": "gloo"}
        environment["NPROC_PER_NODE"] = str(ranks)
    batch = 8 // (ranks or 1)
    options |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    script = f"{next(iter(swift.__path__))}/cli/main.py"
    done = subprocess.run(
        [sys.executable, script, "sft", *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def logged(folder, output):
    state = json.loads((folder / output / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if {"loss", "eval_loss"} & entry.keys()]


def test_two_processes_end_with_the_weights_of_ms_swift_in_one(folder):
    for output, ranks in (("stock", None), ("planned", 2)):
        code, said = run(folder, output, ranks)
        assert code == 0, said[-3000:]
    files = ("model", f"stock/checkpoint-{STEPS}", f"planned/checkpoint-{STEPS}")
    before, wanted, found = (load_file(folder / file / "model.safetensors") for file in files)
    apart = sum(float((wanted[n] - found[n]).double().square().sum()) for n in wanted)
    update = sum(float((wanted[n] - before[n]).double().square().sum()) for n in wanted)
    assert (apart / update) ** 0.5 < 1e-6
    for one, other in zip(logged(folder, "stock"), logged(folder, "planned"), strict=True):
        named = {name for name in ("loss", "eval_loss", "grad_norm") if name in one}
        assert named <= other.keys()
        for name in named:
            assert one[name] == pytest.approx(other[name], rel=1e-4)
    assert len((folder / "plans.jsonl").read_text().splitlines()) == STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": "react"}, "does not support loss_scale='react'"),
        ({"enable_dft_loss": True}, "does not support enable_dft_loss=True"),
        ({"padding_free": True, "attn_impl": "flash_attention_2"}, "padding_free=True"),
        ({"task_type": "seq_cls", "num_labels": 2}, "does not support task_type='seq_cls'"),
    ],
)
def test_what_ms_swift_alone_can_compute_is_refused(folder, options, message):
    code, said = run(folder, "refused", 1, **options)
    assert code != 0
    assert message in said, said[-2000:]
