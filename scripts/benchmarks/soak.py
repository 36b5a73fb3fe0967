"""Whether a long run keeps its memory, descriptors and threads.

    python scripts/benchmarks/soak.py [--steps 2000]

Trains a tiny model on two ranks, with four steps planned ahead and a plan trace, and looks at both
ranks and at the planner about twice a second. For each of them a table has the first figure after
the warm-up, the last one, and the slope of a straight line through all of them. Exits with 1 where
descriptors or threads of a process are more in the last quarter of the steps than in the first one
after the warm-up.
"""

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from common import argument_parser, load_average, machine, table, write_record
from forked import children, main_or_rank, start_ranks
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tiny import documents, tiny_llama_config

RANKS = 2
TIMEOUT_S = 120
PERIOD_S = 0.5  # between two looks
WARM_UP = 0.2  # of the steps: allocators and caches fill
MOST_TOKENS = 200  # of a document
FIGURES = ("memory, MiB", "descriptors", "threads")
COLUMNS = ("process", "figure", "first", "last", "slope per 1,000 steps")


# ---- a rank


def train(rank: int, *, steps: int, folder: Path) -> None:
    """Train on one rank."""
    torch.manual_seed(0)
    args = FlexSeqConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=2,
        max_steps=steps,
        lookahead=4,
        plan_trace=str(trace_of(folder)),
        max_tokens_per_rank=MOST_TOKENS,
        cost_model="estimate",
        logging_steps=100,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(tiny_llama_config())
    FlexSeqTrainer(model=model, args=args, train_dataset=documents(1000, MOST_TOKENS)).train()


def trace_of(folder: Path) -> Path:
    """Return the plan trace of a run, which has a line for each step that is over."""
    return folder / "plans.jsonl"


# ---- what is seen of it


def look_at(pid: int) -> dict[str, float] | None:
    """Return the figures of a process; None where it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        descriptors = len(list((folder / "fd").iterdir()))
        threads = len(list((folder / "task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return dict(zip(FIGURES, (memory, descriptors, threads), strict=True))


def watch(pids: list[int], trace: Path) -> list[dict[str, Any]]:
    """Return what was seen until all ranks had ended: step, process, figures."""
    seen = []
    living = set(pids)
    while living:
        for pid in list(living):
            if os.waitpid(pid, os.WNOHANG)[0]:
                living.discard(pid)
        steps = trace.read_bytes().count(b"\n") if trace.exists() else 0
        processes = {f"rank {rank}": pid for rank, pid in enumerate(pids)}
        for pid, command in children(pids[0]).items():
            if "planner" in command:
                processes["planner"] = pid
        for name, pid in processes.items():
            figures = look_at(pid) if steps else None
            if figures is not None:
                seen.append({"step": steps, "process": name, **figures})
        time.sleep(PERIOD_S)
    return seen


def series(seen: list[dict[str, Any]], process: str, name: str, steps: int) -> list[Any]:
    """Return the (step, figure) pairs of a process after the warm-up."""
    found = []
    for look in seen:
        if look["process"] == process and WARM_UP * steps <= look["step"] < steps:
            found.append((look["step"], look[name]))
    return found


def grew(pairs: list[Any]) -> bool:
    """Tell if the most in the last quarter is more than the most in the first one."""
    quarter = max(len(pairs) // 4, 1)
    first = max(figure for _, figure in pairs[:quarter])
    last = max(figure for _, figure in pairs[-quarter:])
    return last > first


def slope(pairs: list[Any]) -> float:
    """Return what a straight line through the pairs gains in 1,000 steps."""
    numbers, figures = zip(*pairs, strict=True)
    return 1000 * statistics.linear_regression(numbers, figures).slope


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    print(f"on {machine('torch', 'transformers')}, load {load_average()}\n")
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    began = time.perf_counter()
    pids = start_ranks(RANKS, partial(train, steps=asked.steps, folder=folder), folder, TIMEOUT_S)
    try:
        seen = watch(pids, trace_of(folder))
    except KeyboardInterrupt:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise
    seconds = time.perf_counter() - began
    done = trace_of(folder).read_bytes().count(b"\n")
    if done != asked.steps:
        sys.exit(f"{done} of {asked.steps} steps were run: see {folder}/rank0.log")
    rows = []
    growing = []
    for process in ("rank 0", "rank 1", "planner"):
        for name in FIGURES:
            pairs = series(seen, process, name, asked.steps)
            first, last = pairs[0][1], pairs[-1][1]
            rows.append([process, name, f"{first:.0f}", f"{last:.0f}", f"{slope(pairs):+.2f}"])
            if name != FIGURES[0] and grew(pairs):
                growing.append(f"{name} of {process}")
    print(table(COLUMNS, rows, numbers=(2, 3, 4)))
    print(f"\n{asked.steps} steps in {seconds:.0f} s, {len(seen)} looks")
    write_record(asked.json, {"steps": asked.steps, "seconds": seconds, "seen": seen})
    shutil.rmtree(folder)
    if growing:
        sys.exit(f"these grew: {', '.join(growing)}")


if __name__ == "__main__":
    main_or_rank(main)
