"""How much of a run waits for its plans: the quickstart on two CPU processes.

    python scripts/benchmarks/lookahead.py [--steps 12]

Exposed is the time for which rank 0 waits for a plan that is not ready, and for the other ranks to
receive it. Its share is of the seconds of all steps but the first, whose plan nothing can hide.
Each row is a run of its own with a planner and a number of steps planned ahead.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, argument_parser, machine, table_head, table_row, write_record

MEASURED = "flexseq/measured_s"
# (planner, lookahead)
CASES = (("auto", 4), ("auto", 0), ("flexsp", 4), ("flexsp", 0))
COLUMNS = (
    "planner",
    "lookahead",
    "exposed ms, first step",
    "later steps, mean",
    "most",
    "share of their seconds",
)


def step_seconds(
    planner: str, lookahead: int, steps: int, folder: Path
) -> tuple[list[float], list[float]]:
    """Train the quickstart for some steps; return the seconds that each took, and those that it
    waited for its plan."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--main_process_port", "0"),
        *("--config_file", "recipes/accelerate_configs/cpu.yaml"),
        "recipes/sft.py",
        *("--config", "recipes/quickstart/small_llama.yaml"),
        *("--output_dir", str(folder)),
        *("--planner", planner),
        *("--lookahead", str(lookahead)),
        *("--max_steps", str(steps)),
        *("--eval_on_start", "false"),
        *("--save_strategy", "steps"),
        *("--save_steps", str(steps)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    state = json.loads((folder / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    measured = [entry[MEASURED] for entry in state["log_history"] if MEASURED in entry]
    lines = (folder / "plan_trace.jsonl").read_text().splitlines()
    return measured, [json.loads(line)["waited_s"] for line in lines]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    asked = parser.parse_args()
    print(f"lookahead.py --steps {asked.steps}")
    print(f"on {machine('numpy')}, load {os.getloadavg()[0]:.1f}\n")
    print(table_head(COLUMNS))
    figures = []
    for planner, lookahead in CASES:
        with tempfile.TemporaryDirectory() as folder:
            step_s, waited_s = step_seconds(planner, lookahead, asked.steps, Path(folder))
        exposed_ms = [1e3 * seconds for seconds in waited_s]
        first, later = exposed_ms[0], exposed_ms[1:]
        share = sum(later) / 1e3 / sum(step_s[1:])
        milliseconds = [f"{ms:.1f}" for ms in (first, statistics.mean(later), max(later))]
        print(table_row([planner, lookahead, *milliseconds, f"{share:.2%}"]), flush=True)
        figures.append(
            {
                "planner": planner,
                "lookahead": lookahead,
                "exposed_ms": exposed_ms,
                "step_s": step_s,
            }
        )
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
