"""Whether preference tuning and reinforcement learning learn: their quickstarts, several seeds.

    python scripts/benchmarks/learning.py                  three seeds of each
    python scripts/benchmarks/learning.py --recipes grpo --seeds 1

Each row is a run of a recipe on two CPU processes, by the command that the recipe's own head has:

    dpo      the share of 200 held-out pairs whose chosen answer gained more over the reference
             than the rejected one did: 0.5 is chance, at least 0.75 is wanted
    grpo     the mean reward of the first ten steps and of the last ten, at least twice as high,
             and that of held-out prompts before training and after

The seed is that of the weights, of the order of the data and of what is sampled. Seconds are those
of the training loop, evaluations at its start included.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import ROOT, argument_parser, load_average, machine, table, write_record

RECIPES = ("dpo", "grpo")
ENDS = 10  # steps at both ends of a run whose rewards are compared
WANTED_ACCURACY = 0.75
WANTED_RATIO = 2.0

Logs = list[dict[str, Any]]


def run_recipe(recipe: str, seed: int, folder: Path) -> Logs:
    """Run a recipe's quickstart, and return what it logged, step by step."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--main_process_port", "0"),
        *("--config_file", "recipes/accelerate_configs/cpu.yaml"),
        f"recipes/{recipe}.py",
        *("--config", f"recipes/quickstart/{recipe}.yaml"),
        *("--output_dir", str(folder)),
        *("--seed", str(seed)),
        *("--disable_tqdm", "true"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{recipe}.py with seed {seed} failed:\n{done.stderr[-4000:]}")
    logs: Logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return logs


def of_preferences(logs: Logs) -> dict[str, Any]:
    """Return what a run of dpo.py came to."""
    accuracies = values(logs, "rewards/accuracies")
    held_out = values(logs, "eval_rewards/accuracies")[-1]
    return {
        "steps": len(accuracies),
        "first": mean(accuracies[:ENDS]),
        "last": mean(accuracies[-ENDS:]),
        "held_out": held_out,
        "learned": held_out >= WANTED_ACCURACY,
        "curve": accuracies,
    }


def of_rewards(logs: Logs) -> dict[str, Any]:
    """Return what a run of grpo.py came to."""
    rewards = values(logs, "reward")
    first, last = mean(rewards[:ENDS]), mean(rewards[-ENDS:])
    return {
        "steps": len(rewards),
        "first": first,
        "last": last,
        "held_out": values(logs, "eval_reward")[-1],
        "learned": last >= WANTED_RATIO * first,
        "curve": rewards,
    }


def values(logs: Logs, name: str) -> list[float]:
    """Return the values that were logged under a name, in order."""
    return [entry[name] for entry in logs if name in entry]


OUTCOMES = {"dpo": of_preferences, "grpo": of_rewards}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    asked = parser.parse_args()
    print(f"on {machine('torch', 'transformers', 'trl')}, load {load_average()}\n")
    figures = []
    for recipe in asked.recipes:
        for seed in range(asked.seeds):
            with tempfile.TemporaryDirectory() as folder:
                logs = run_recipe(recipe, seed, Path(folder))
            seconds = values(logs, "train_runtime")[-1]
            figures.append(
                {"recipe": recipe, "seed": seed, "seconds": seconds} | OUTCOMES[recipe](logs)
            )
    print(page(figures))
    write_record(asked.json, figures)


def page(figures: list[dict[str, Any]]) -> str:
    """Return the table of all runs: accuracies of dpo, rewards of grpo."""
    ends = f"{ENDS} steps"
    columns = ("recipe", "seed", "steps", "s", f"first {ends}", f"last {ends}", "held out", "")
    rows = []
    for run in figures:
        shares = [f"{run[name]:.3f}" for name in ("first", "last", "held_out")]
        verdict = "learned" if run["learned"] else "NOT LEARNED"
        rows.append(
            [run["recipe"], run["seed"], run["steps"], f"{run['seconds']:.0f}", *shares, verdict]
        )
    return table(columns, rows, numbers=(1, 2, 3, 4, 5, 6))


if __name__ == "__main__":
    main()
