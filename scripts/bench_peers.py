"""Tokens per second against the trainers that a HuggingFace user has today, on an emulated
cluster.

    python scripts/bench_peers.py --ranks-per-node 1            two nodes, 133 Mbit/s between them;
                                                                needs root
    python scripts/bench_peers.py --ranks-per-node 2 --methods flexseq alst plain

Every run is a fresh process per rank, one thread each, in network namespaces with shaped links
(see emulated_cluster.py). All methods (see peers/train.py) train the same 4-layer, 256-wide Llama
on the same sequences per optimizer step. Methods take turns within a round, and ratios are taken
within rounds, so that a machine that others use as well is as busy for the one as for the other.
`static` is tried at every degree; its best counts.

Peers are extras: pip install deepspeed.
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
from peers.corpus import write_steps

HERE = Path(__file__).parent
METHODS = ("flexseq", "static1", "static2", "static4", "plain", "alst")


def tokens_per_s(
    method: str, asked: argparse.Namespace, steps: Path, folder: Path
) -> float | None:
    """One run; None where the method cannot hold a sequence."""
    out = folder / f"{method}.json"
    out.unlink(missing_ok=True)
    cluster = [
        sys.executable,
        str(HERE / "emulated_cluster.py"),
        "--nodes",
        "2",
        "--inter",
        asked.inter,
    ]
    cluster += ["--ranks-per-node", str(asked.ranks_per_node), "--"]
    worker = [
        sys.executable,
        str(HERE / "peers/train.py"),
        method,
        "--steps",
        str(steps),
        "--out",
        str(out),
    ]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}"}
    with (folder / f"{method}.log").open("w") as log:
        failed = subprocess.run(
            [*cluster, *worker], env=environment, stdout=log, stderr=log
        ).returncode
    if failed and "PlanInfeasible" not in (folder / f"{method}.log").read_text():
        raise RuntimeError(f"{method} failed: see {folder / f'{method}.log'}")
    return None if failed else json.loads(out.read_text())["tokens_per_s"]


def table(rounds: list[dict[str, float | None]]) -> list[str]:
    """Medians of tokens per second and of flexseq's ratio to each method."""
    lines = [
        "| method | tokens/s, median | flexseq over it, median of ratios | rounds |",
        "|---|---|---|---|",
    ]
    for method in rounds[0]:
        pairs = [(r["flexseq"], r[method]) for r in rounds if r[method] is not None]
        if not pairs:
            lines.append(f"| {method} | does not fit | - | 0 |")
            continue
        speed, ratio = (
            statistics.median(b for _, b in pairs),
            statistics.median(a / b for a, b in pairs),
        )
        lines.append(f"| {method} | {speed:,.0f} | {ratio:.2f} | {len(pairs)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--inter", default="133mbit", help="link between the nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=2, help="optimizer steps that count, after one that does not"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    asked = parser.parse_args()
    methods = [
        m
        for m in asked.methods
        if not m.startswith("static") or int(m[6:]) <= 2 * asked.ranks_per_node
    ]
    print(
        f"bench_peers.py {' '.join(sys.argv[1:])}\non {machine()}, load "
        f"{os.getloadavg()[0]:.1f}; {asked.inter}\n"
    )
    folder, rounds = Path(tempfile.mkdtemp(prefix="bench_peers_")), []
    for number in range(asked.rounds):
        steps = folder / "steps.json"
        write_steps(steps, 1 + asked.steps, seed=number)
        rounds.append({method: tokens_per_s(method, asked, steps, folder) for method in methods})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    print("\n".join(table(rounds)))


if __name__ == "__main__":
    main()
