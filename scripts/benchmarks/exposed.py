"""Measured: where the time of the quickstart's step goes that is not forward, backward or
optimizer, part by part, on two CPU processes.

    python scripts/benchmarks/exposed.py
    python scripts/benchmarks/exposed.py --against ../other      beside another checkout's package

A run is the quickstart for some steps, in which every call of a part's functions is timed on rank
0, without the parts that are called inside: by the wall clock, and by the time of the training
thread on the processor, in which neither other work on the machine shows nor waiting for the other
rank. `the rest` is what no part has: the Trainer's own loop. With `--against` the runs of both
checkouts take turns; the recipe and its data are this checkout's.
"""

import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, load_average, machine, table, write_record

RESULT = "FLEXSEQ_EXPOSED"  # names the file that rank 0 of a run writes

# (module, class or None, function): those that one of two checkouts lacks are left out
Function = tuple[str, str | None, str]
HIDDEN: dict[str, list[Function]] = {
    "forward": [("transformers", "Trainer", "compute_loss")],
    "backward": [("accelerate", "Accelerator", "backward")],
    "optimizer": [
        ("accelerate.optimizer", "AcceleratedOptimizer", "step"),
        ("torch.nn", "Module", "zero_grad"),
        ("transformers", "Trainer", "_clip_grad_norm"),
    ],
}
PARTS: dict[str, list[Function]] = {
    "planning, exposed": [("hf_flexseq.steps.lookahead", "Lookahead", "_plan")],
    "drawing batches": [("hf_flexseq.steps.lookahead", "Lookahead", "_draw")],
    "gather of lengths": [("hf_flexseq.distributed.process_groups", "GlooHost", "gather_ints")],
    "exchange of tokens": [
        ("hf_flexseq.hf.executors", None, "shards_of"),
        ("hf_flexseq.steps.exchange", "RowExchange", "__call__"),
    ],
    "contexts": [("hf_flexseq.steps.inputs", None, "_inputs_of")],
    "flags of gradients": [
        ("hf_flexseq.hf.engine", None, "gradients_of"),
        ("hf_flexseq.steps.nonfinite", "NonfiniteWatch", "take"),
    ],
    "trace and figures": [("hf_flexseq.hf.engine", "FlexSeqEngine", "finish")],
    "log": [("hf_flexseq.hf.trainer", "FlexSeqMixin", "log")],
}
REST = "the rest"
EXPOSED = "exposed, together"

Clocks = tuple[float, float]  # seconds: by the wall clock, and of the thread on the processor
Steps = list[dict[str, Clocks]]  # by part


# ---- a rank of a run


class Parts:
    """Seconds of each part of a step, without those of the parts inside."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self._began = _now()
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inside: list[list[float]] = []  # of each open part: seconds of the parts in it

    def next_step(self) -> None:
        """End a step, and begin the next one."""
        now = _now()
        step = {part: (seconds[0], seconds[1]) for part, seconds in self._sums.items()}
        known = [sum(seconds[clock] for seconds in step.values()) for clock in (0, 1)]
        step[REST] = tuple(now[c] - self._began[c] - known[c] for c in (0, 1))
        self.steps.append(step)
        self._sums.clear()
        self._began = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its calls timed as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            self._inside.append([0.0, 0.0])
            try:
                return function(*args, **kwargs)
            finally:
                inside = self._inside.pop()
                for clock, now in enumerate(_now()):
                    whole = now - began[clock]
                    self._sums[part][clock] += whole - inside[clock]
                    if self._inside:
                        self._inside[-1][clock] += whole

        return call


def _now() -> Clocks:
    return time.perf_counter(), time.thread_time()


def run_rank(arguments: Sequence[str]) -> None:
    """Run the recipe in this process, and write what rank 0 has measured."""
    parts = Parts()
    for part, functions in (HIDDEN | PARTS).items():
        for module_name, class_name, name in functions:
            owner: Any = importlib.import_module(module_name)
            if class_name is not None:
                owner = getattr(owner, class_name)
            setattr(owner, name, parts.timed(part, getattr(owner, name)))

    from transformers.trainer_callback import DefaultFlowCallback

    # the first callback that a Trainer calls at the end of a step
    end_of_step = DefaultFlowCallback.on_step_begin

    def on_step_begin(*args: Any, **kwargs: Any) -> Any:
        parts.next_step()
        return end_of_step(*args, **kwargs)

    DefaultFlowCallback.on_step_begin = on_step_begin
    sys.path.insert(0, str(ROOT / "recipes"))
    sys.argv = ["sft.py", *arguments]
    try:
        runpy.run_path(str(ROOT / "recipes/sft.py"), run_name="__main__")
    finally:
        if os.environ["RANK"] == "0":
            Path(os.environ[RESULT]).write_text(json.dumps(parts.steps))


# ---- the runs


def steps_of(package: Path, steps: int, warmup: int) -> Steps:
    """Run the quickstart with the package of a checkout, and return its steps."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "steps.json"
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--main_process_port", "0"),
            *("--config_file", "recipes/accelerate_configs/cpu.yaml"),
            str(Path(__file__).resolve()),
            *("--config", "recipes/quickstart/small_llama.yaml"),
            *("--output_dir", folder),
            *("--max_steps", str(steps + warmup + 1)),
            *("--eval_on_start", "false"),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(package.resolve()),
            RESULT: str(found),
        }
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        # From one beginning to the next; the first one began before training.
        measured: Steps = json.loads(found.read_text())[1 + warmup :]
        return measured


def medians(steps: Steps) -> dict[str, Clocks]:
    """Return the median seconds of each part, and of all that are exposed."""
    found: dict[str, Clocks] = {}
    for part in [*HIDDEN, *PARTS, REST]:
        seconds = [step.get(part, (0.0, 0.0)) for step in steps]
        found[part] = (
            statistics.median(wall for wall, _ in seconds),
            statistics.median(cpu for _, cpu in seconds),
        )
    totals = []
    for step in steps:
        exposed = [seconds for part, seconds in step.items() if part not in HIDDEN]
        totals.append([sum(seconds[clock] for seconds in exposed) for clock in (0, 1)])
    found[EXPOSED] = (
        statistics.median(wall for wall, _ in totals),
        statistics.median(cpu for _, cpu in totals),
    )
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--runs", type=int, default=1, help="of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    asked = parser.parse_args()
    checkouts = {"here": ROOT}
    if asked.against is not None:
        checkouts["against"] = asked.against
    steps: dict[str, Steps] = {name: [] for name in checkouts}
    for _ in range(asked.runs):
        for name, package in checkouts.items():
            steps[name] += steps_of(package, asked.steps, asked.warmup)

    print(f"{machine('torch', 'transformers')}, one thread, load {load_average()}\n")
    print("median milliseconds of a step on rank 0: wall clock (on the processor)\n")
    found = {name: medians(of_checkout) for name, of_checkout in steps.items()}
    rows = []
    for part in [*HIDDEN, *PARTS, REST, EXPOSED]:
        cells = [part]
        for name in checkouts:
            wall, cpu = found[name][part]
            cells.append(f"{1e3 * wall:.2f} ({1e3 * cpu:.2f})")
        rows.append(cells)
    print(table(("part", *checkouts), rows, numbers=(1, 2)))
    write_record(asked.json, {"steps": steps})


if __name__ == "__main__":
    if RESULT in os.environ:
        run_rank(sys.argv[1:])
    else:
        main()
