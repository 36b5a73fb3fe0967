"""Measured: Seq1F1B over 1F1B in whole training runs, on two CPU stages.

    python scripts/benchmarks/stage_runs.py
    python scripts/benchmarks/stage_runs.py --rounds 5 --json runs.json

A run is `FlexSeqTrainer.train()` of six steps, each of two sequences of 4,096 tokens: a new
process for each rank, 1F1B with whole sequences or Seq1F1B with four chunks of each. The model has
4 layers, 256 wide, and a small vocabulary, so that both stages work alike. The schedules take
turns. Ratios are 1F1B's median over rounds over Seq1F1B's:

    runs     of `train_runtime`, which also holds drawing, planning, exchanging tokens, clipping,
             the optimizer, logs, and all that the first step does once
    steps    of a run's median step, from its first action to its last

Both by the wall clock, which needs two idle cores: on busy ones an idle stage's core does other
work, and the bubble costs less than it would.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a second thread hides the bubble

import argparse
import json
import random
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from forked import main_or_rank, start_ranks
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer

STAGES = 2
VOCABULARY = 1024
TIMEOUT_S = 600  # of every exchange
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_schedule": "1f1b"},
    "seq1f1b": {"pipeline_schedule": "seq1f1b"},
}
# name of a figure, and what it is
FIGURES = {"run_s": "run", "step_s": "its median step"}
COLUMNS = ("seconds", *SCHEDULES, "1f1b over seq1f1b")


# ---- a rank


def train(schedule: str, asked: argparse.Namespace, folder: Path, rank: int) -> None:
    """Do the work of a rank, and write down its seconds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=asked.hidden,
        intermediate_size=11 * asked.hidden // 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.hidden // 64,
        num_key_value_heads=asked.hidden // 128,
        vocab_size=VOCABULARY,
    )
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        max_steps=asked.steps,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        pipeline_parallel_size=STAGES,
        **SCHEDULES[schedule],
    )
    trainer = FlexSeqTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=sequences(STAGES * asked.steps, asked.tokens),
    )
    output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "run_s": output.metrics["train_runtime"],
        "steps_s": [entry["flexseq/measured_s"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def sequences(count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Return examples of `tokens` tokens each, the same every time."""
    draw = random.Random(0)
    examples = []
    for _ in range(count):
        ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        examples.append({"input_ids": ids, "labels": ids})
    return examples


# ---- runs


def one_run(schedule: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run. Raises RuntimeError for one that fails."""
    folder = Path(tempfile.mkdtemp(prefix="stage_runs_"))
    pids = start_ranks(STAGES, partial(train, schedule, asked, folder), folder, TIMEOUT_S)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise RuntimeError(f"a run failed: see {folder}/rank*.log")
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(STAGES)]
    shutil.rmtree(folder)
    step_s = statistics.median(ranks[0]["steps_s"])
    return ranks[0] | {"step_s": step_s, "load": os.getloadavg()}


def print_figures(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print one row for each figure: medians over rounds, and their ratio."""
    print()
    print(table_head(COLUMNS, numbers=(1, 2, 3)))
    for name, meaning in FIGURES.items():
        medians = [statistics.median(run[name] for run in runs[key]) for key in SCHEDULES]
        cells = [f"{figure:.3f}" for figure in (*medians, medians[0] / medians[1])]
        print(table_row((meaning, *cells)))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    asked = parser.parse_args()
    if asked.hidden < 128 or asked.hidden % 128:
        parser.error(f"--hidden {asked.hidden}: give a multiple of 128, two heads that share keys")
    print(f"on {machine('torch', 'transformers')}; load average {load_average()}")
    print(
        f"{asked.layers} layers, {asked.hidden} wide, float32; {asked.steps} steps of {STAGES} "
        f"sequences of {asked.tokens:,} tokens; {asked.rounds} rounds",
        flush=True,
    )
    runs: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
    for number in range(1, asked.rounds + 1):
        for schedule in SCHEDULES:
            run = one_run(schedule, asked)
            runs[schedule].append(run)
            seconds = ", ".join(f"{name} {run[name]:.2f}" for name in FIGURES)
            print(f"round {number}, {schedule}: {seconds}; load {load_average()}", flush=True)
    print_figures(runs)
    write_record(asked.json, {"runs": runs})


if __name__ == "__main__":
    main_or_rank(main)
