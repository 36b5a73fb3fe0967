"""One method's training run on one rank; rank 0 writes its tokens per second as JSON.

    flexseq   FlexSeqTrainer with the default planner
    static    FlexSeqTrainer with one degree for the run
    alst      the Trainer with DeepSpeed ALST (Ulysses over all ranks, sdpa), one sequence per
              micro-batch
    plain     the Trainer, one sequence per micro-batch on each rank, dealt so that the ranks'
              costs even out

All train the same small model on the same sequences per optimizer step: a Llama, a Gemma 3 in
which five layers of six read a window of 512 tokens, or a Qwen3.5 in which three layers of four
are recurrent (Gated DeltaNet). With `--model pairs` flexseq and plain train the Llama by DPO on
pairs (peers/pairs.py). The clock starts when the first step, which warms up, is over on
all ranks, and stops when the last one is.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from common import alst_options
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.config import IGNORE_INDEX
from peers.corpus import LONGEST, PER_STEP, VOCABULARY, read_steps
from peers.pairs import SIDE_TOKENS, dpo_trainer

CAP = 4096  # tokens per rank and micro-batch, for flexseq and static
Rows = list[dict[str, list[int]]]
COMMON = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "learning_rate": 1e-3,
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
}


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
}


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(num_hidden_layers=4, **SIZES)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def small_windows() -> Gemma3ForCausalLM:
    kinds = 5 * ["sliding_attention"] + ["full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=512, head_dim=32, **SIZES
    )
    return Gemma3ForCausalLM._from_config(config, attn_implementation="sdpa")


def small_hybrid() -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **SIZES,
    )
    return Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa")


MODELS = {
    "llama": small_llama,
    "windows": small_windows,
    "hybrid": small_hybrid,
    "pairs": small_llama,
}


def row(ids: list[int]) -> dict[str, list[int]]:
    """Return a sequence as an example that learns all of its tokens."""
    return {"input_ids": ids, "labels": ids}


def cost(ids: list[int]) -> float:
    """Return a sequence's cost in tokens; attention equals the rest at about 3,000 of them."""
    return len(ids) * (1 + len(ids) / 3000)


def dealt(sequences: list[list[int]], world: int) -> list[list[int]]:
    """Return the sequences in the order in which ranks draw them one by one.

    Each rank gets as many, and their costs are evened out.
    """
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for ids in sorted(sequences, key=len, reverse=True):
        open_ranks = [r for r in ranks if len(r) < len(sequences) // world]
        min(open_ranks, key=lambda r: sum(map(cost, r))).append(ids)
    interleaved = []
    for index in range(len(sequences) // world):
        for rank in range(world):
            interleaved.append(ranks[rank][index])
    return interleaved


class InOrder:
    """A mixin that puts the dataset's own order in place of the Trainer's random one."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class InOrderTrainer(InOrder, Trainer):
    pass


class InOrderFlexSeqTrainer(InOrder, FlexSeqTrainer):
    pass


def collate_one(rows: Rows) -> dict[str, torch.Tensor]:
    """Return a batch of one sequence; every column is [1, tokens]."""
    (only,) = rows
    columns = only | {"position_ids": list(range(len(only["input_ids"])))}
    return {name: torch.tensor([values]) for name, values in columns.items()}


def padded_alike(step: list[list[int]], world: int) -> Rows:
    """Return rows of which each `world` consecutive ones have one length, a multiple of `world`.

    ALST's loader, which gathers the ranks' batches, needs that. Neighbours in length stand
    together, so that padding is short.
    """
    ordered = sorted(step, key=len)
    rows = []
    for first in range(0, len(ordered), world):
        together = ordered[first : first + world]
        length = -(-len(together[-1]) // world) * world  # rounded up
        for ids in together:
            padding = length - len(ids)
            rows.append(
                {
                    "input_ids": [*ids, *[0] * padding],
                    "labels": [*ids, *[IGNORE_INDEX] * padding],
                }
            )
    return rows


class Clock(TrainerCallback):
    """A clock that runs from the end of the first optimizer step to the end of the last."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.ends[0]


def flexseq_trainer(
    model: PreTrainedModel, steps: list[list[list[int]]], world: int, out: str, **plan: Any
) -> Trainer:
    args = FlexSeqConfig(
        output_dir=out,
        max_steps=len(steps),
        per_device_train_batch_size=PER_STEP // world,
        max_tokens_per_rank=CAP,
        **plan,
        **COMMON,
    )
    rows = [row(ids) for step in steps for ids in step]
    return InOrderFlexSeqTrainer(
        model=model, args=args, train_dataset=rows, data_collator=DataCollatorForFlexSeq()
    )


def plain_trainer(
    model: PreTrainedModel, steps: list[list[list[int]]], world: int, out: str
) -> Trainer:
    args = TrainingArguments(
        output_dir=out,
        max_steps=len(steps),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=PER_STEP // world,
        **COMMON,
    )
    rows = [row(ids) for step in steps for ids in dealt(step, world)]
    return InOrderTrainer(model=model, args=args, train_dataset=rows, data_collator=collate_one)


def alst_trainer(
    model: PreTrainedModel, steps: list[list[list[int]]], world: int, out: str
) -> Trainer:
    args = TrainingArguments(
        output_dir=out,
        max_steps=len(steps),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=PER_STEP,
        **alst_options(world, "sdpa"),
        **COMMON,
    )
    rows = [padded for step in steps for padded in padded_alike(step, world)]
    return InOrderTrainer(model=model, args=args, train_dataset=rows, data_collator=collate_one)


def make_trainer(
    method: str, model: PreTrainedModel, steps: list[list[list[int]]], world: int, out: str
) -> Trainer:
    if method == "alst":
        return alst_trainer(model, steps, world, out)
    if method == "plain":
        return plain_trainer(model, steps, world, out)
    if method.startswith("static"):
        degree = int(method.removeprefix("static"))
        return flexseq_trainer(model, steps, world, out, planner="static", sp_degree=degree)
    return flexseq_trainer(model, steps, world, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--steps", type=Path, required=True, help="file written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its figure")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    steps = read_steps(asked.steps)
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = MODELS[asked.model]()
    run = str(asked.out.parent / "run")
    if asked.model == "pairs":
        trainer = dpo_trainer(asked.method, model, small_llama(), world, len(steps), run, **COMMON)
        tokens = 2 * SIDE_TOKENS * world * (len(steps) - 1)
    else:
        trainer = make_trainer(asked.method, model, steps, world, run)
        tokens = sum(len(ids) for step in steps[1:] for ids in step)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    if dist.get_rank() == 0:
        asked.out.write_text(
            json.dumps({"tokens_per_s": tokens / clock.seconds, "seconds": clock.seconds})
        )
    dist.barrier()
    time.sleep(0.5)  # gloo drops its last tensors before the group goes
    os._exit(0)


if __name__ == "__main__":
    main()
