"""Measured: Seq1F1B over 1F1B in whole training runs, on two CPU stages.

    torchrun --nproc_per_node 2 scripts/benchmarks/stage_runs.py

A run is `FlexSeqTrainer.train()` of six steps, each of two sequences of 4,096 tokens: 1F1B with
whole sequences, or Seq1F1B with four chunks of each. The model has 4 layers, 256 wide, and a small
vocabulary, so that both stages work alike. The schedules take turns, after a run that warms up.
Ratios are 1F1B's seconds over Seq1F1B's, of neighbouring runs:

    run      `train_runtime`, which also holds drawing, planning, exchanging tokens, clipping, the
             optimizer, logs, and all that the first step does once
    step     the median step, from its first action to its last

Both by the wall clock, which needs two idle cores: on busy ones an idle stage's core does other
work, and the bubble costs less than it would.
"""

import os
import random
import statistics
import tempfile
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, set_seed

from common import argument_parser, load_average, machine, ratios, spread, table, write_record
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer

STAGES = 2
TOKENS = 4096  # of a sequence
VOCABULARY = 1024
SCHEDULES = ("1f1b", "seq1f1b")


class Run(NamedTuple):
    """Seconds of a training, and its losses."""

    run_s: float
    step_s: float
    losses: list[float]


def train(schedule: str, steps: int) -> Run:
    """Train a new model. Collective over the world."""
    set_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    draw = random.Random(0)
    rows = [draw.choices(range(VOCABULARY), k=TOKENS) for _ in range(STAGES * steps)]
    with tempfile.TemporaryDirectory() as folder:
        args = FlexSeqConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=steps,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            pipeline_parallel_size=STAGES,
            pipeline_schedule=schedule,
        )
        trainer = FlexSeqTrainer(
            model=LlamaForCausalLM(config),
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.remove_callback(PrinterCallback)
        run_s = trainer.train().metrics["train_runtime"]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    step_s = statistics.median(entry["flexseq/measured_s"] for entry in logs)
    return Run(run_s, step_s, [entry["loss"] for entry in logs])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a second thread of a stage hides the bubble
    before = load_average()
    train(SCHEDULES[0], steps=2)
    runs: dict[str, list[Run]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(asked.rounds):
        for schedule in SCHEDULES:
            runs[schedule].append(train(schedule, asked.steps))
    if os.environ["RANK"] != "0":
        return
    for whole, chunks in zip(*runs.values(), strict=True):
        assert torch.allclose(*map(torch.tensor, (whole.losses, chunks.losses)), rtol=1e-4)
    rows = []
    for name in ("run_s", "step_s"):
        whole, chunks = ([getattr(run, name) for run in runs[one]] for one in SCHEDULES)
        medians = [f"{statistics.median(seconds):.3f}" for seconds in (whole, chunks)]
        rows.append([name.removesuffix("_s"), *medians, spread(ratios(whole, chunks))])
    print(table(("seconds", *SCHEDULES, "1f1b over seq1f1b"), rows, numbers=(1, 2, 3)))
    print(f"\n{machine('torch', 'transformers')}; load before {before}; after {load_average()}")
    write_record(asked.json, {key: [run._asdict() for run in runs[key]] for key in runs})


if __name__ == "__main__":
    main()
