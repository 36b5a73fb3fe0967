"""Predicted against measured seconds of steps on two CPU ranks, while the cost model is corrected.

    python scripts/benchmarks/online.py
    python scripts/benchmarks/online.py --models llama experts --steps 25

Each model trains with `cost_model="auto"`, without a cache, and then with "estimate", on the same
steps of long-tailed lengths, by FlexSeqTrainer in two forks with one thread each:

    llama       Llama, full attention
    windows     Gemma 3: five of six layers have a window
    recurrent   Qwen3.5: three of four layers are Gated DeltaNet
    experts     Qwen3-MoE under FSDP2, its experts over both ranks
    images      Qwen3-VL with a trained tower, long-tailed images

Errors of steps from the sixth on are relative to the measured seconds: as the log has them under
"auto", as it has them under "estimate", and by the estimate times one factor, the median of
measured over predicted seconds of the first five steps.
"""

import json
import math
import os
import random
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    set_seed,
)
from transformers.distributed import DistributedConfig

from common import argument_parser, load_average, machine, table, write_record
from forked import main_or_rank, start_ranks
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf.engine import cost_source
from images import images_of_sequence, sequence, small_model

FIRST = 5  # step from which on errors count
PER_RANK = 4  # sequences of a step
MOST_TOKENS = 2048
VOCAB = 2048
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": MOST_TOKENS,
}
LINEAR = {f"linear_num_{name}_heads": heads for name, heads in (("key", 2), ("value", 4))}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "windows": {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512},
    "recurrent": {"model_type": "qwen3_5_text", **LINEAR},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "images": {},
}


def model_of(name: str, folder: Path) -> PreTrainedModel:
    """Return a new model. Collective over the world. folder: for the weights of one whose experts
    lie on both ranks."""
    if name == "images":
        return small_model()
    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | MODELS[name])))
    if name != "experts":
        return model
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "weights")
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, ep_size=2)
    return AutoModelForCausalLM.from_pretrained(folder / "weights", distributed_config=config)


def examples_of(name: str, count: int) -> list[dict[str, Any]]:
    """Return so many sequences, the same every time."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        if name == "images":
            images = images_of_sequence(rng)
            found.append(sequence(rng, generator, images, words=rng.randint(8, 64)))
            continue
        length = min(MOST_TOKENS, max(16, int(rng.lognormvariate(5.5, 1.2))))
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def train(rank: int, name: str, cost_model: str, steps: int, folder: Path) -> None:
    """Train on one rank of two, and leave a plan trace."""
    torch.set_num_threads(1)
    cost_source.HF_HOME = str(folder)
    args = FlexSeqConfig(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=PER_RANK,
        learning_rate=1e-4,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        max_tokens_per_rank=None if name == "images" else MOST_TOKENS * 5 // 8,
        cost_model=cost_model,
        plan_trace=str(folder / "trace.jsonl"),
    )
    trainer = FlexSeqTrainer(
        model=model_of(name, folder),
        args=args,
        train_dataset=examples_of(name, 2 * PER_RANK * steps),
        data_collator=DataCollatorForFlexSeq(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def seconds_of(name: str, cost_model: str, steps: int) -> list[list[float]]:
    """Train in two forks; return predicted and measured seconds of each step."""
    folder = Path(tempfile.mkdtemp())  # which a rank, an exception in a fork, must not remove
    work = partial(train, name=name, cost_model=cost_model, steps=steps, folder=folder)
    for pid in start_ranks(2, work, folder, timeout_s=600):
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError((folder / "rank0.log").read_text()[-2000:])
    lines = [json.loads(line) for line in (folder / "trace.jsonl").open()]
    shutil.rmtree(folder)
    return [[line["learned"]["predicted_s"], sum(line["measured_s"])] for line in lines]


def errors_of(pairs: list[list[float]], factor: float = 1.0) -> list[float]:
    """Return the median and the 90th percentile of the relative errors of late steps."""
    errors = sorted(abs(factor * one / took - 1) for one, took in pairs[FIRST:])
    return [statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1]]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=25)
    asked = parser.parse_args()
    before = load_average()
    rows, figures = [], []
    for name in asked.models:
        auto, estimate = (seconds_of(name, one, asked.steps) for one in ("auto", "estimate"))
        factor = statistics.median(took / one for one, took in estimate[:FIRST])
        errors = [errors_of(auto), errors_of(estimate), errors_of(estimate, factor)]
        took = statistics.median(took for _, took in auto)
        cells = [f"{median:.1%}, {tail:.1%}" for median, tail in errors]
        rows.append([name, f"{took:.2f} s", *cells])
        print(rows[-1], flush=True)
        figures.append({"model": name, "auto": auto, "estimate": estimate, "errors": errors})
    columns = ("model", "a step", "auto: median, p90", "estimate", "estimate, one factor")
    print(table(columns, rows, numbers=range(1, 5)))
    print(f"\n{machine('torch', 'transformers')}; load before {before}; after {load_average()}")
    write_record(asked.json, figures)


if __name__ == "__main__":
    main_or_rank(main)
