"""The stacks of who_is_exact.py with a command of their own: ms-swift and axolotl.

Each pins versions, so that it runs in an environment of its own, with the newest version that pip
finds. It gets the row's model, tokenizer and documents as files, and its checkpoint is read with
the row's own class.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from exact_peers.situations import (
    BETA,
    EVAL_BATCHES,
    RANKS,
    ROUTER_COEFFICIENT,
    ROWS,
    SAVED_AT,
    Failed,
    Weights,
    make_model,
    texts,
    tokenizer,
    trained_weights,
)

ENVIRONMENTS = Path(__file__).resolve().parents[3] / "build/exact_peers"
PACKAGES = {"ms_swift": ("ms-swift", "qwen-vl-utils"), "axolotl": ("axolotl",)}
MODEL_TYPES = {"Gemma3": "gemma3_text", "GptOss": "gpt_oss"}  # others are lower case for ms-swift
ALIKE = """--model model --template dummy --dataset data.jsonl --split_dataset_ratio 0
    --dataset_shuffle False --train_dataloader_shuffle False --dataset_num_proc 1
    --dataloader_num_workers 0 --torch_dtype float32 --gradient_checkpointing False
    --warmup_ratio 0 --ddp_backend gloo --check_model False --add_version False --output_dir run"""
SETTINGS = {"NPROC_PER_NODE": str(RANKS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SETTINGS |= {"USE_HF": "1", "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONPATH": ""}
_OF_PYDANTIC = re.compile(r"^ +Value error, (.+?)(?: \[type=|$)", re.MULTILINE)


def program(stack: str, name: str) -> str:
    """Return a program of a stack's environment, which is made if it is missing."""
    folder = ENVIRONMENTS / stack
    if not folder.exists():
        wanted = (f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES[stack])
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *wanted]
        subprocess.run(install, check=True)
    return str(folder / "bin" / name)


def trained(stack: str, row: str, folder: Path, seconds: float) -> tuple[Weights, list[float]]:
    """Train by a stack's command on two processes; return weights and losses of evaluations.

    Raises Failed, or subprocess.TimeoutExpired after so many seconds of a command.
    """
    model = make_model(row)
    if row == "lora":
        model.save_pretrained(folder / "adapter")
        model = model.unload()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    lines = [of_stack(stack, parts) for parts in texts(row)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if stack == "axolotl":
        run(axolotl(row, folder), folder, seconds)
        return read(row, folder / "run"), []
    losses = []
    for batch in EVAL_BATCHES if row == "eval" else ():
        options = {"val_dataset": "data.jsonl", "eval_strategy": "steps", "eval_steps": 1}
        run(swift(row, **options, per_device_eval_batch_size=batch), folder, seconds)
        logged = map(json.loads, (folder / "run/logging.jsonl").read_text().splitlines())
        losses.append(next(entry["eval_loss"] for entry in logged if "eval_loss" in entry))
        (folder / "run").rename(folder / f"run{batch}")
    if row == "eval":
        return {}, losses
    run(swift(row), folder, seconds)
    if row == "resume":
        checkpoint = f"run/checkpoint-{SAVED_AT}"
        run(swift(row, resume_from_checkpoint=checkpoint), folder, seconds)
    return read(row, folder / f"run/checkpoint-{ROWS[row].steps}"), []


def run(command: list[str], folder: Path, seconds: float) -> None:
    """Run a command in a folder. Raises Failed with the first error that it prints."""
    done = subprocess.run(
        ["timeout", "--kill-after=10", str(seconds), *command],  # ends its ranks, too
        cwd=folder,
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == 124:
        raise subprocess.TimeoutExpired(command, seconds)
    if done.returncode:
        if found := _OF_PYDANTIC.search(done.stdout):
            raise Failed("ValueError", found[1])
        raise Failed.says(done.stdout, 0)


def read(row: str, checkpoint: Path) -> Weights:
    """Return the weights of a checkpoint that learn, by the names of the row's own model."""
    model = make_model(row)
    if row == "lora":
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model.unload(), checkpoint, is_trainable=True)
        return trained_weights(loaded)
    return trained_weights(type(model).from_pretrained(checkpoint, dtype=torch.float32))


def of_stack(stack: str, parts: dict[str, str]) -> dict[str, Any]:
    """Return a text, a prompt and its completion, or a pair as a stack takes it."""
    if stack == "axolotl":
        return {"text": "".join(parts.values())}
    answer = parts.get("text") or parts.get("completion") or parts["chosen"]
    made: dict[str, Any] = {"messages": [{"role": "assistant", "content": answer}]}
    if "prompt" in parts:
        prompt = parts["prompt"].strip() if "chosen" in parts else parts["prompt"]
        made["messages"].insert(0, {"role": "user", "content": prompt})
    if "rejected" in parts:
        made["rejected_response"] = parts["rejected"]
    return made


def swift(row: str, **more: Any) -> list[str]:
    """Return ms-swift's command of a row. more: options."""
    situation = ROWS[row]
    options: dict[str, Any] = {
        "model_type": MODEL_TYPES.get(situation.family, situation.family.lower()),
        "tuner_type": "lora" if row == "lora" else "full",
        "attn_impl": situation.attention,
        "sequence_parallel_size": RANKS,
        **situation.settings(RANKS),
    }
    of_rows = {
        "gqa": {"padding_free": True},  # as ms-swift's own error asks for
        "packed": {"packing": True, "packing_length": sum(situation.lengths)},
        "router": {"router_aux_loss_coef": ROUTER_COEFFICIENT},
        "lora": {"adapters": "adapter"},
        "dpo": {"rlhf_type": "dpo", "beta": BETA},
    }
    options |= of_rows.get(row, {}) | more
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    kind = "rlhf" if row == "dpo" else "sft"
    return [program("ms_swift", "swift"), kind, *ALIKE.split(), *words]


def axolotl(row: str, folder: Path) -> list[str]:
    """Write axolotl's file of a row, and return its command."""
    situation = ROWS[row]
    options = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "completion"}],
        "sequence_len": sum(situation.lengths) if row == "packed" else max(situation.lengths),
        "sample_packing": row == "packed",
        "micro_batch_size": situation.batch,
        "gradient_accumulation_steps": situation.accumulation * RANKS,
        "max_steps": situation.steps,
        "optimizer": "sgd",
        "learning_rate": situation.rate,
        "lr_scheduler": "constant",
        "attn_implementation": "sdpa",
        "bf16": False,
        "tf32": False,
        "context_parallel_size": RANKS,
        "output_dir": str(folder / "run"),
    }
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(options))
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
    return [program("axolotl", "python"), *launch, "-m", "axolotl.cli.train", "axolotl.yaml"]
