"""How much of a run waits for its plans: the quickstart with planners and lookaheads, on two CPU
processes.

    python scripts/bench_lookahead.py [--steps 12]

Exposed is what rank 0 waits for a plan that is not ready, and for the other ranks to receive it.
Its share is of the seconds of all steps but the first, whose plan nothing can hide.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_planner import machine

ROOT = Path(__file__).parents[1]
EXPOSED = "flexseq/planning_ms_exposed"
CASES = (("auto", 4), ("auto", 0), ("flexsp", 4), ("flexsp", 0))  # planner, lookahead


def exposed(planner: str, lookahead: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The log entries of a run's steps."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", "recipes/accelerate_configs/cpu.yaml"]
    command += [
        "recipes/sft.py",
        "--config",
        "recipes/quickstart/small_llama.yaml",
        "--output_dir",
        str(folder),
    ]
    command += ["--planner", planner, "--lookahead", str(lookahead), "--max_steps", str(steps)]
    command += ["--eval_on_start", "false", "--save_strategy", "steps", "--save_steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    state = json.loads((folder / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if EXPOSED in entry]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    print(
        f"bench_lookahead.py --steps {asked.steps}\non {machine()}, load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| planner | lookahead | exposed ms, first step | later steps, mean | most | share of "
        "their seconds |"
    )
    print("|---|---|---|---|---|---|")
    for planner, lookahead in CASES:
        with tempfile.TemporaryDirectory() as folder:
            log = exposed(planner, lookahead, asked.steps, Path(folder))
        first, *later = (entry[EXPOSED] for entry in log)
        share = sum(later) / 1e3 / sum(entry["flexseq/measured_s"] for entry in log[1:])
        cells = " | ".join(f"{ms:.1f}" for ms in (first, statistics.mean(later), max(later)))
        print(f"| {planner} | {lookahead} | {cells} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
