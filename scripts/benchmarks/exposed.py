"""Measured: where the time of the quickstart's step goes that is not forward, backward or
optimizer, part by part, on two CPU processes.

    python scripts/benchmarks/exposed.py
    python scripts/benchmarks/exposed.py --against ../other      beside another checkout's package
    python scripts/benchmarks/exposed.py --max-length 192        so few tokens that most of a step
                                                                 is the host's own work

A run is the quickstart for some steps, in which every call of a part's functions is timed on rank
0, without the parts that are called inside: by the wall clock, and by the time of the training
thread on the processor, in which neither other work on the machine shows nor waiting for the other
rank. `the rest` is what no part has: the Trainer's own loop.

A third figure counts only what happens between the optimizer and the next forward, by the wall
clock. There a device that works behind the host, as a GPU does, has nothing left to do: what
stands elsewhere it does not notice.

`a step, whole` has forward and backward in it, where attention's own host work is. It moves from
there to `contexts` when it is done ahead, so that neither row alone tells if there is less of it.

With `--against` the runs of both checkouts take turns; recipe and data are this checkout's.
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
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, load_average, machine, table, write_record

RESULT = "FLEXSEQ_EXPOSED"  # names the file that rank 0 of a run writes

Function = tuple[str, str | None, str]  # module, class or None, function
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
        ("hf_flexseq.hf.whole_model", None, "shards_of"),
        ("hf_flexseq.steps.exchange", "RowExchange", "__call__"),
    ],
    "contexts": [("hf_flexseq.steps.inputs", None, "inputs_of")],
    "flags of gradients": [
        ("hf_flexseq.hf.engine", None, "gradients_of"),
        ("hf_flexseq.steps.nonfinite", "NonfiniteWatch", "take"),
    ],
    "trace and figures": [("hf_flexseq.hf.engine", "FlexSeqEngine", "finish")],
    "log": [("hf_flexseq.hf.trainer", "FlexSeqMixin", "log")],
}
# What they were in older checkouts, which `--against` may name.
FORMER: dict[str, list[Function]] = {
    "exchange of tokens": [("hf_flexseq.hf.executors", None, "shards_of")],
    "contexts": [("hf_flexseq.steps.inputs", None, "_inputs_of")],
}
REST = "the rest"
EXPOSED = "exposed, together"
WHOLE = "a step, whole"

# seconds: by the wall clock, of the thread on the processor, and of the wall clock's what lies
# between optimizer and forward
Clocks = tuple[float, float, float]
Steps = list[dict[str, Clocks]]  # by part


# ---- a rank of a run


class Parts:
    """Seconds of each part of a step, without those of the parts inside."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        self._inside: list[list[float]] = []  # of each open part: seconds of the parts in it
        # The third clock runs between the optimizer and the next forward alone.
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self._began = self._now()

    def next_step(self) -> None:
        """End a step, and begin the next one."""
        now = self._now()
        step = {part: tuple(seconds) for part, seconds in self._sums.items()}
        known = [sum(clocks) for clocks in zip(*step.values(), strict=True)] or [0.0] * 3
        step[REST] = tuple(
            end - begin - of_parts
            for end, begin, of_parts in zip(now, self._began, known, strict=True)
        )
        self.steps.append(step)
        self._sums.clear()
        self._began = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its calls timed as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if part == "forward":
                self._stop_idle()
            began = self._now()
            self._inside.append([0.0] * 3)
            try:
                return function(*args, **kwargs)
            finally:
                inside = self._inside.pop()
                for clock, now in enumerate(self._now()):
                    whole = now - began[clock]
                    self._sums[part][clock] += whole - inside[clock]
                    if self._inside:
                        self._inside[-1][clock] += whole
                if part == "optimizer" and function.__name__ == "step":
                    self._idle_since = time.perf_counter()

        return call

    def _stop_idle(self) -> None:
        """Stop the third clock."""
        if self._idle_since is not None:
            self._idle_s += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _now(self) -> Clocks:
        """Return what the clocks show."""
        wall = time.perf_counter()
        idle = self._idle_s
        if self._idle_since is not None:
            idle += wall - self._idle_since
        return wall, time.thread_time(), idle


def run_rank(arguments: Sequence[str]) -> None:
    """Run the recipe in this process, and write what rank 0 has measured."""
    parts = Parts()
    for part, functions in (HIDDEN | PARTS).items():
        found = 0
        for module_name, class_name, name in functions + FORMER.get(part, []):
            try:
                owner: Any = importlib.import_module(module_name)
            except ModuleNotFoundError:  # of another checkout
                continue
            if class_name is not None:
                owner = getattr(owner, class_name)
            if hasattr(owner, name):
                setattr(owner, name, parts.timed(part, getattr(owner, name)))
                found += 1
        assert found, f"nothing is left of {part!r}: {functions}"

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


def steps_of(package: Path, steps: int, warmup: int, max_length: int | None) -> Steps:
    """Run the quickstart with the package of a checkout, and return its steps.

    max_length: tokens of the longest documents, None for the quickstart's own; a rank takes 5/6 of
        that, as there.
    """
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
        if max_length is not None:
            command += ["--max_length", str(max_length)]
            command += ["--max_tokens_per_rank", str(max_length * 5 // 6)]
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
        found[part] = _median([step.get(part, (0.0, 0.0, 0.0)) for step in steps])
    found[EXPOSED] = _median([_sum(step, without=HIDDEN) for step in steps])
    found[WHOLE] = _median([_sum(step) for step in steps])
    return found


def _sum(step: dict[str, Clocks], without: Container[str] = ()) -> Clocks:
    """Return the seconds of a step's parts together."""
    counted = [seconds for part, seconds in step.items() if part not in without]
    wall, processor, idle = (sum(clock) for clock in zip(*counted, strict=True))
    return wall, processor, idle


def _median(steps: Sequence[Clocks]) -> Clocks:
    """Return the median of each clock over some steps."""
    wall, processor, idle = (statistics.median(clock) for clock in zip(*steps, strict=True))
    return wall, processor, idle


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--runs", type=int, default=1, help="of each checkout")
    parser.add_argument("--max-length", type=int, help="tokens of the longest documents")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    asked = parser.parse_args()
    checkouts = {"here": ROOT}
    if asked.against is not None:
        checkouts["against"] = asked.against
    steps: dict[str, Steps] = {name: [] for name in checkouts}
    for _ in range(asked.runs):
        for name, package in checkouts.items():
            steps[name] += steps_of(package, asked.steps, asked.warmup, asked.max_length)

    print(f"{machine('torch', 'transformers')}, one thread, load {load_average()}\n")
    print(
        "median milliseconds of a step on rank 0: wall clock / on the processor / between the "
        "optimizer and the next forward\n"
    )
    found = {name: medians(of_checkout) for name, of_checkout in steps.items()}
    rows = []
    for part in [*HIDDEN, *PARTS, REST, EXPOSED, WHOLE]:
        cells = [part]
        for name in checkouts:
            milliseconds = [f"{1e3 * seconds:.2f}" for seconds in found[name][part]]
            cells.append(" / ".join(milliseconds))
        rows.append(cells)
    print(table(("part", *checkouts), rows, numbers=(1, 2)))
    write_record(asked.json, {"steps": steps})


if __name__ == "__main__":
    if RESULT in os.environ:
        run_rank(sys.argv[1:])
    else:
        main()
