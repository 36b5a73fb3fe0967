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

Two clocks:

    wall     it needs two idle cores: on busy ones an idle stage's core does other work
    path     what an idle machine would take: for every step the longest path through the actions
             that were run, each as long as its thread was on the processor, and for a run the
             steps' paths and the training thread's other seconds on the processor, of the rank
             that has more of them. Transfers and waiting for the planner are left out
    least    the path where every action takes the least seconds of all steps and rounds, which a
             noisy machine disturbs less; for a run with the least of what else it takes: the other
             seconds, the first step's over the median step's, waiting for the planner
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a second thread hides the bubble

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from forked import main_or_rank, start_ranks
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.pipeline import executor as executor_module
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.schedule.pipeline.walk import walk

STAGES = 2
TRACE = "plan_trace.jsonl"
VOCABULARY = 1024
TIMEOUT_S = 600  # of every exchange
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_schedule": "1f1b"},
    "seq1f1b": {"pipeline_schedule": "seq1f1b", "pipeline_chunks": 4},
}
# name of a figure, and what it is
FIGURES = {
    "run_s": "run, wall",
    "step_s": "its median step, wall",
    "outside_s": "run but its steps, wall",
    "first_s": "first step over the median, wall",
    "planning_s": "of that the planner waited for, wall",
    "run_path_s": "run, path",
    "step_path_s": "its median step, path",
}
COLUMNS = ("seconds", *SCHEDULES, "1f1b over seq1f1b")


# ---- a rank


class Clock(TrainerCallback):
    """Notes when training begins and ends, on the processor."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ended = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.thread_time()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended = time.thread_time()


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
        plan_trace=str(folder / TRACE),
        pipeline_parallel_size=STAGES,
        **SCHEDULES[schedule],
    )
    clock = Clock()
    trainer = FlexSeqTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=sequences(STAGES * asked.steps, asked.tokens),
        callbacks=[clock],
    )
    steps: list[dict[str, Any]] = []
    with mock.patch.object(PipelineExecutor, "train", noting(steps, PipelineExecutor.train)):
        output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "run_s": output.metrics["train_runtime"],
        "steps_s": [entry["flexseq/measured_s"] for entry in logs],
        "processor_s": clock.ended - clock.began,
        "steps": steps,
        "losses": [entry["loss"] for entry in logs],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def noting(steps: list[dict[str, Any]], run: Any) -> Any:
    """Return `PipelineExecutor.train` with a note of every step's plan and seconds by action."""

    def noted(executor: Any, plan: PipelinePlan, *args: Any, **kwargs: Any) -> torch.Tensor:
        with timed_actions() as seconds:
            loss: torch.Tensor = run(executor, plan, *args, **kwargs)
        steps.append({"plan": plan.to_record(), "actions_s": list(seconds)})
        return loss

    return noted


@contextmanager
def timed_actions() -> Iterator[list[float]]:
    """Collect the seconds that every action inside the block was on the processor.

    A thread that waits is not on the processor.
    """
    seconds: list[float] = []
    obey = executor_module._Step.obey

    def timed(step: Any, action: Any) -> None:
        began = time.thread_time()
        obey(step, action)
        seconds.append(time.thread_time() - began)

    with mock.patch.object(executor_module._Step, "obey", timed):
        yield seconds


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
    lines = (folder / TRACE).read_text().splitlines()
    shutil.rmtree(folder)
    return figures_of(ranks, planning_s=sum(json.loads(line)["waited_s"] for line in lines))


def figures_of(ranks: Sequence[dict[str, Any]], *, planning_s: float) -> dict[str, Any]:
    """Return the figures of a run, from what each rank wrote down. planning_s: seconds that the
    steps waited for their plans."""
    first = ranks[0]
    # 1. the wall clock
    steps_s = first["steps_s"]
    step_s = statistics.median(steps_s)
    wall = {
        "run_s": first["run_s"],
        "step_s": step_s,
        "outside_s": first["run_s"] - sum(steps_s),
        "first_s": steps_s[0] - step_s,
        "planning_s": planning_s,
    }
    # 2. the longest path
    paths = []
    for notes in zip(*(rank["steps"] for rank in ranks), strict=True):
        plan = PipelinePlan.from_record(notes[0]["plan"])
        paths.append(path_s(plan, [note["actions_s"] for note in notes]))
    others = []
    for rank in ranks:
        in_actions = sum(sum(note["actions_s"]) for note in rank["steps"])
        others.append(rank["processor_s"] - in_actions)
    path = {
        "run_path_s": sum(paths) + max(others),
        "step_path_s": statistics.median(paths),
        "step_paths_s": paths,
        "other_processor_s": max(others),
    }
    # 3. what both are made of
    made_of = {
        "steps_s": steps_s,
        "plan": first["steps"][0]["plan"],
        "actions_s": [[note["actions_s"] for note in rank["steps"]] for rank in ranks],
        "losses": first["losses"],
        "load": os.getloadavg(),
    }
    return wall | path | made_of


def path_s(plan: PipelinePlan, seconds: Sequence[Sequence[float]]) -> float:
    """Return the step's length if every action took these seconds and transfers took none.

    seconds: by rank, in the order of its actions.
    """
    free_at = [0.0] * plan.ranks
    remaining = [iter(rank_seconds) for rank_seconds in seconds]
    # when the input of (direction, stage, unit, chunk) is there
    arrived: dict[tuple[str, int, int, int], float] = {}
    for rank, action in walk(plan):
        direction = "F" if action.kind == "F" else "B"
        input_at = arrived.get((direction, action.stage, action.unit, action.chunk), 0.0)
        free_at[rank] = max(free_at[rank], input_at) + next(remaining[rank])
        if action.kind == "W":  # a weight gradient goes nowhere
            continue
        next_stage = action.stage + 1 if direction == "F" else action.stage - 1
        arrived[direction, next_stage, action.unit, action.chunk] = free_at[rank]
    return max(free_at)


def least_s(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return (seconds of a run, of a step) with the least seconds of every action and of what else
    a run takes."""
    by_rank = []
    for rank in range(STAGES):
        # [steps of all runs][actions] -> [actions]
        steps = [step for run in runs for step in run["actions_s"][rank]]
        by_rank.append([min(seconds) for seconds in zip(*steps, strict=True)])
    step_s = path_s(PipelinePlan.from_record(runs[0]["plan"]), by_rank)
    others_s = min(run["other_processor_s"] for run in runs)
    first_s = min(run["step_paths_s"][0] - run["step_path_s"] for run in runs)
    planning_s = min(run["planning_s"] for run in runs)
    steps_in_run = len(runs[0]["steps_s"])
    return steps_in_run * step_s + max(first_s, 0.0) + others_s + planning_s, step_s


def print_figures(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print one row for each figure: medians over rounds, and their ratio."""
    print()
    print(table_head(COLUMNS, numbers=(1, 2, 3)))
    for name, meaning in FIGURES.items():
        medians = [statistics.median(run[name] for run in runs[key]) for key in SCHEDULES]
        is_ratio = name in ("run_s", "step_s", "run_path_s", "step_path_s")
        ratio = f"{medians[0] / medians[1]:.3f}" if is_ratio else ""
        print(table_row((meaning, *(f"{median:.3f}" for median in medians), ratio)))
    whole = least_s(runs["1f1b"])
    cut = least_s(runs["seq1f1b"])
    for index, meaning in enumerate(("run, least", "its step, least")):
        ratio = f"{whole[index] / cut[index]:.3f}"
        print(table_row((meaning, f"{whole[index]:.3f}", f"{cut[index]:.3f}", ratio)))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    asked = parser.parse_args()
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
