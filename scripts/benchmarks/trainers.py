"""Tokens per second against the trainers that a HuggingFace user has today.

    python scripts/benchmarks/trainers.py --ranks-per-node 1
    python scripts/benchmarks/trainers.py --ranks-per-node 2 --methods flexseq alst plain
    python scripts/benchmarks/trainers.py --model windows --methods flexseq plain
    python scripts/benchmarks/trainers.py --model hybrid --methods flexseq plain
    python scripts/benchmarks/trainers.py --model pairs --methods flexseq plain

Two emulated nodes with 133 Mbit/s between them (see scripts/emulated_cluster.py; it needs root).
Every run is a fresh process per rank, one thread each. All methods (see peers/train.py) train the
same 4-layer, 256-wide Llama, a Gemma 3 of windows or a Qwen3.5 of recurrent layers, on the same
sequences per optimizer step; with `--model pairs` the Llama learns by DPO from pairs of 4,096
tokens a side, one a rank and step, where flexseq may hold half of a sequence on a rank.
Methods take turns within a round, and ratios are taken within rounds, so that a machine that
others use as well is as busy for the one as for the other. `static` is tried at every degree; its
best counts.

DeepSpeed is an extra: pip install deepspeed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import HERE, ROOT, argument_parser, machine, table, write_record
from peers.corpus import write_steps

CLUSTER = ROOT / "scripts/emulated_cluster.py"
MODELS = ("llama", "windows", "hybrid", "pairs")
METHODS = ("flexseq", "static1", "static2", "static4", "plain", "alst")
COLUMNS = ("method", "tokens/s, median", "flexseq over it, median of ratios", "rounds")
Round = dict[str, float | None]  # tokens per second by method; None: it cannot hold a sequence


def tokens_per_s(
    method: str, asked: argparse.Namespace, steps: Path, folder: Path
) -> float | None:
    """Train with one method; return its tokens per second, None where a sequence does not fit.

    steps: file with the sequences of each optimizer step. folder: for the result and the log.
    """
    result = folder / f"{method}.json"
    result.unlink(missing_ok=True)
    log_file = folder / f"{method}.log"
    cluster = [
        *(sys.executable, str(CLUSTER)),
        *("--nodes", "2"),
        *("--inter", asked.inter),
        *("--ranks-per-node", str(asked.ranks_per_node)),
        "--",
    ]
    rank = [
        *(sys.executable, str(HERE / "peers/train.py"), method),
        *("--model", asked.model),
        *("--steps", str(steps)),
        *("--out", str(result)),
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    with log_file.open("w") as log:
        done = subprocess.run(
            [*cluster, *rank], env=environment, stdout=log, stderr=log, check=False
        )
    if done.returncode == 0:
        return json.loads(result.read_text())["tokens_per_s"]
    if "PlanInfeasible" in log_file.read_text():
        return None
    raise RuntimeError(f"{method} failed: see {log_file}")


def row(method: str, rounds: list[Round]) -> list[str]:
    """Return the medians of a method's tokens per second and of flexseq's ratio to it."""
    speeds, ratios = [], []
    for found in rounds:
        if found[method] is not None:
            speeds.append(found[method])
            ratios.append(found["flexseq"] / found[method])
    if not speeds:
        return [method, "does not fit", "-", "0"]
    speed = f"{statistics.median(speeds):,.0f}"
    return [method, speed, f"{statistics.median(ratios):.2f}", f"{len(speeds)}"]


def possible(method: str, ranks: int) -> bool:
    """Return whether so many ranks can run a method: a degree cannot exceed them."""
    if not method.startswith("static"):
        return True
    return int(method.removeprefix("static")) <= ranks


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--inter", default="133mbit", help="link between the nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=2, help="optimizer steps that count, after one that does not"
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    asked = parser.parse_args()
    if asked.model == "pairs" and not {"flexseq", "plain"}.issuperset(asked.methods):
        parser.error("--model pairs compares --methods flexseq plain")
    methods = [method for method in asked.methods if possible(method, 2 * asked.ranks_per_node)]
    print(f"trainers.py {' '.join(sys.argv[1:])}")
    print(f"on {machine('numpy')}, load {os.getloadavg()[0]:.1f}; {asked.inter}\n")
    folder = Path(tempfile.mkdtemp(prefix="trainers_"))
    rounds: list[Round] = []
    for number in range(asked.rounds):
        steps = folder / "steps.json"
        write_steps(steps, 1 + asked.steps, seed=number)
        rounds.append({method: tokens_per_s(method, asked, steps, folder) for method in methods})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    print(table(COLUMNS, [row(method, rounds) for method in methods]))
    write_record(asked.json, {"tokens_per_s": rounds})


if __name__ == "__main__":
    main()
