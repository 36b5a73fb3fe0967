"""The stacks of who_is_exact.py with a command of their own: ms-swift and axolotl.

Each pins versions, so that it runs in an environment of its own, with the newest version that pip
finds. It gets the row's model, tokenizer and documents as files, and its checkpoint is read with
the row's own class.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from exact_peers.situations import (
    BETA,
    EAGER,
    EVAL_BATCHES,
    IGNORED,
    RANKS,
    ROUTER_COEFFICIENT,
    ROWS,
    documents,
    make_model,
    pairs,
    rate,
    text,
    tokenizer,
    trained_weights,
)

ENVIRONMENTS = Path(__file__).resolve().parents[3] / "build/exact_peers"
PACKAGES = {"ms_swift": ("ms-swift", "qwen-vl-utils"), "axolotl": ("axolotl",)}
SAVED_AT = 2  # step of the checkpoint from which a run resumes
MODEL_TYPES = {  # ms-swift's names
    "Llama": "llama",
    "Gemma3": "gemma3_text",
    "GptOss": "gpt_oss",
    "Qwen3_5": "qwen3_5",
    "Mixtral": "mixtral",
}
ALIKE = """--model model --template dummy --dataset data.jsonl --split_dataset_ratio 0
    --dataset_shuffle False --train_dataloader_shuffle False --dataset_num_proc 1
    --dataloader_num_workers 0 --torch_dtype float32 --gradient_checkpointing False --optim sgd
    --warmup_ratio 0 --weight_decay 0 --max_grad_norm 0 --use_cpu True --ddp_backend gloo
    --report_to none --check_model False --add_version False --output_dir run"""
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?(?:[\w.]+\.)?(\w+Error): (.+)$", re.MULTILINE)
_OF_PYDANTIC = re.compile(r"^ +Value error, (.+?)(?: \[type=|$)", re.MULTILINE)


class Failed(Exception):
    """A command ended with an error. kind: name of its class. line: the first of its message."""

    def __init__(self, kind: str, line: str) -> None:
        super().__init__(f"{kind}: {line}")
        self.kind, self.line = kind, line


def python(stack: str) -> str:
    """Return the Python of a stack's environment, which is made if it is missing."""
    folder = ENVIRONMENTS / stack
    program = str(folder / "bin/python")
    if not folder.exists():
        wanted = (f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES[stack])
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([program, "-m", "pip", "install", "-q", *wanted], check=True)
    return program


def trained(stack: str, row: str, folder: Path, seconds: float) -> tuple[Any, list[float]]:
    """Train by a stack's command on two processes; return weights and losses of evaluations.

    Raises Failed, or subprocess.TimeoutExpired after so many seconds of a command.
    """
    model = make_model(row)
    if row == "lora":
        model.save_pretrained(folder / "adapter")
        model = model.unload()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    if stack == "axolotl":
        run(axolotl(row, folder), folder, seconds)
        return read(row, folder / "run"), []
    with (folder / "data.jsonl").open("w") as file:
        for line in conversations(row):
            print(json.dumps(line), file=file)
    losses = []
    for batch in EVAL_BATCHES if row == "eval" else (None,):
        run(swift(row, evaluated=batch), folder, seconds)
        if batch is not None:
            lines = (folder / "run/logging.jsonl").read_text().splitlines()
            found = [
                entry["eval_loss"] for entry in map(json.loads, lines) if "eval_loss" in entry
            ]
            losses.append(found[0])
            (folder / "run").rename(folder / f"run{batch}")
    if row == "eval":
        return {}, losses
    if row == "resume":
        run(swift(row, resumes=True), folder, seconds)
    return read(row, folder / f"run/checkpoint-{ROWS[row].steps}"), losses


def run(command: list[str], folder: Path, seconds: float) -> None:
    """Run a command in a folder. Raises Failed with the first error that it prints."""
    environment = {"NPROC_PER_NODE": str(RANKS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"USE_HF": "1", "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONPATH": ""}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
        process.wait()
        raise
    if process.returncode == 0:
        return
    pydantic = _OF_PYDANTIC.search(said)
    if pydantic is not None:
        raise Failed("ValueError", pydantic[1])
    found = _ERROR.search(said)
    if found is None:
        raise Failed("RuntimeError", said.strip().splitlines()[-1])
    raise Failed(found[1], found[2])


def read(row: str, checkpoint: Path) -> dict[str, Any]:
    """Return the weights of a checkpoint that learn, by the names of the row's own model."""
    model = make_model(row)
    if row == "lora":
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model.unload(), checkpoint, is_trainable=True)
        return trained_weights(loaded)
    return trained_weights(type(model).from_pretrained(checkpoint, dtype=torch.float32))


def conversations(row: str) -> list[dict[str, Any]]:
    """Return a row's documents as messages: a prompt, if labels are masked, and an answer.

    ms-swift adds the token at the end.
    """
    if row == "dpo":
        return [
            {
                "messages": [
                    {"role": "user", "content": pair["prompt"].strip()},
                    {"role": "assistant", "content": pair["chosen"]},
                ],
                "rejected_response": pair["rejected"],
            }
            for pair in pairs()
        ]
    made = []
    for document in documents(row):
        ids, labels = document["input_ids"][:-1], document["labels"]
        first = labels.count(IGNORED) if ROWS[row].masked else 0
        messages = [{"role": "assistant", "content": text(ids[first:])}]
        if first:
            messages.insert(0, {"role": "user", "content": text(ids[:first])})
        made.append({"messages": messages})
    return made


def swift(row: str, *, resumes: bool = False, evaluated: int | None = None) -> list[str]:
    """Return ms-swift's command of a row. evaluated: documents of an evaluation's batch."""
    situation = ROWS[row]
    options: dict[str, Any] = {
        "model_type": MODEL_TYPES[situation.family],
        "tuner_type": "lora" if row == "lora" else "full",
        "attn_impl": "eager" if situation.family in EAGER else "sdpa",
        "sequence_parallel_size": RANKS,
        "per_device_train_batch_size": situation.batch,
        "gradient_accumulation_steps": situation.accumulation * RANKS,
        "max_steps": situation.steps,
        "save_steps": SAVED_AT if row == "resume" else situation.steps,
        "learning_rate": rate(row),
        "lr_scheduler_type": "linear" if row == "resume" else "constant",
    }
    if row == "gqa":
        options["padding_free"] = True  # as ms-swift's own error asks for
    if row == "packed":
        options |= {"packing": True, "packing_length": sum(situation.lengths)}
    if row == "router":
        options["router_aux_loss_coef"] = ROUTER_COEFFICIENT
    if row == "lora":
        options["adapters"] = "adapter"
    if row == "dpo":
        options |= {"rlhf_type": "dpo", "beta": BETA}
    if evaluated is not None:
        options |= {"val_dataset": "data.jsonl", "eval_strategy": "steps", "eval_steps": 1}
        options["per_device_eval_batch_size"] = evaluated
    if resumes:
        options["resume_from_checkpoint"] = f"run/checkpoint-{SAVED_AT}"
    program = python("ms_swift")
    main = subprocess.run(
        [program, "-c", "from importlib.util import find_spec; print(find_spec('swift').origin)"],
        capture_output=True,
        text=True,
        check=True,
    )
    script = Path(main.stdout.strip()).parent / "cli/main.py"
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [program, str(script), "rlhf" if row == "dpo" else "sft", *ALIKE.split(), *words]


def axolotl(row: str, folder: Path) -> list[str]:
    """Write axolotl's file of a row, and return its command."""
    situation = ROWS[row]
    data = folder / "text.jsonl"
    texts = [text(document["input_ids"][:-1]) for document in documents(row)]
    data.write_text("\n".join(json.dumps({"text": one}) for one in texts))
    options = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(data), "type": "completion"}],
        "sequence_len": max(len(one.split()) for one in texts) + 1,
        "sample_packing": row == "packed",
        "micro_batch_size": situation.batch,
        "gradient_accumulation_steps": situation.accumulation * RANKS,
        "max_steps": situation.steps,
        "optimizer": "sgd",
        "learning_rate": rate(row),
        "lr_scheduler": "constant",
        "attn_implementation": "sdpa",
        "bf16": False,
        "tf32": False,
        "context_parallel_size": RANKS,
        "output_dir": str(folder / "run"),
    }
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(options))
    program = [python("axolotl"), "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
    return [*program, "-m", "axolotl.cli.train", "axolotl.yaml"]
