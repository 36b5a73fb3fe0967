"""Tokens per second of preference tuning on two emulated nodes, beside TRL's own trainer.

    python scripts/benchmarks/pairs.py
    python scripts/benchmarks/pairs.py --tokens 8192 --rounds 5

Two nodes of one rank with 133 Mbit/s between them (see scripts/emulated_cluster.py; it needs
root). DPO on pairs of two sequences of 4,096 tokens each, one pair a rank and step
(peers/pairs.py). flexseq may hold half of a sequence on a rank, so that its ranks share every one;
stock has no cap, and never sends a token. Methods take turns, and ratios are taken within rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import HERE, ROOT, argument_parser, machine, table, write_record

CLUSTER = ROOT / "scripts/emulated_cluster.py"
METHODS = ("flexseq", "plain")


def tokens_per_s(method: str, tokens: int, steps: int, inter: str, folder: Path) -> float:
    """Train with one method, and return its tokens per second."""
    result = folder / f"{method}.json"
    cluster = [sys.executable, str(CLUSTER), "--nodes", "2", "--inter", inter]
    rank = [
        *(sys.executable, str(HERE / "peers/pairs.py"), method),
        *("--tokens", str(tokens), "--steps", str(1 + steps), "--out", str(result)),
    ]
    log = folder / f"{method}.log"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    with log.open("w") as file:
        done = subprocess.run(
            [*cluster, "--ranks-per-node", "1", "--", *rank],
            env=environment,
            stdout=file,
            stderr=file,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{method} failed: see {log}")
    return json.loads(result.read_text())["tokens_per_s"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each side of a pair")
    parser.add_argument("--steps", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--inter", default="133mbit", help="link between the nodes")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"on {machine('trl')}, load {os.getloadavg()[0]:.1f}; {asked.inter}\n")
    folder = Path(tempfile.mkdtemp(prefix="pairs_"))
    rounds = []
    for number in range(asked.rounds):
        found = {}
        for method in METHODS:
            found[method] = tokens_per_s(method, asked.tokens, asked.steps, asked.inter, folder)
        rounds.append(found)
        print(f"round {number + 1}: {found}", file=sys.stderr, flush=True)
    rows = []
    for method in METHODS:
        speed = statistics.median(found[method] for found in rounds)
        ratio = statistics.median(found["flexseq"] / found[method] for found in rounds)
        rows.append([method, f"{speed:,.0f}", f"{ratio:.2f}"])
    print(table(("method", "tokens/s, median", "flexseq over it, median of ratios"), rows))
    write_record(asked.json, {"tokens_per_s": rounds})


if __name__ == "__main__":
    main()
