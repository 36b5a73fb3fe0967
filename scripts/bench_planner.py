"""How close the default planner comes to the lower bound, and how long it takes.

    python scripts/bench_planner.py                                    64 ranks, 512 sequences, lockstep
    python scripts/bench_planner.py --sync free
    python scripts/bench_planner.py --nodes 128 --sequences 4096 --batches 3

Lengths are drawn from the quantile tables in data/ (log-linear between quantiles) and from a log-normal fitted to
CommonCrawl; longer ones than the context are drawn again. Costs are those of the preset flexsp-gpt-7b-a100, so all
seconds of the plans are modelled; only the planning time is measured.
"""

import argparse
import json
import math
import os
import platform
import random
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hf_flexseq.planner import make_plan
from hf_flexseq.presets import load_cost_model
from hf_flexseq.topology import Topology

DATA = Path(__file__).parent / "data"
Draw = Callable[[random.Random], int]


def quantile_table(name: str) -> Draw:
    """Draws lengths from the (probability, length) pairs of a file."""
    probabilities, lengths = zip(*json.loads((DATA / f"{name}.json").read_text())["quantiles"], strict=True)

    def draw(rng: random.Random) -> int:
        p = rng.random()
        at = max(1, bisect_left(probabilities, p))
        low, high = probabilities[at - 1], probabilities[at]
        share = (p - low) / (high - low) if high > low else 1.0
        return max(1, round(lengths[at - 1] * (lengths[at] / lengths[at - 1]) ** share))

    return draw


def common_crawl_like(rng: random.Random) -> int:
    return max(1, int(rng.lognormvariate(math.log(950), 1.75)))


SETS: dict[str, tuple[Draw, int]] = {
    "wikipedia 192K": (quantile_table("wikipedia"), 192 * 1024),
    "documents 192K": (quantile_table("documents"), 192 * 1024),
    "cc-like 384K": (common_crawl_like, 384 * 1024),
}


def batch(draw: Draw, context: int, count: int, seed: int) -> list[int]:
    """`count` lengths of at most `context` tokens."""
    rng, lengths = random.Random(seed), []
    while len(lengths) < count:
        length = draw(rng)
        if length <= context:
            lengths.append(length)
    return lengths


def row(name: str, ratios: list[float], milliseconds: list[float]) -> str:
    times = np.percentile(milliseconds, [50, 99])
    return f"| {name} | {np.mean(ratios):.3f} | {max(ratios):.3f} | {times[0]:.0f} | {times[1]:.0f} |"


def machine() -> str:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    cpu = models[0] if models else platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="nodes of 8 ranks")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--batches", type=int, default=10, help="per length set")
    parser.add_argument("--sync", choices=("lockstep", "free"), default="lockstep")
    chosen = parser.parse_args()
    topology, cost = Topology(nodes=chosen.nodes, ranks_per_node=8), load_cost_model("flexsp-gpt-7b-a100")
    print(
        f"{topology.world_size} ranks, {chosen.sequences} sequences, {chosen.batches} batches per set, {chosen.sync}"
    )
    print(f"on {machine()}\n")
    print("| lengths | objective / bound, mean | worst | planning CPU ms, p50 | p99 |\n|---|---|---|---|---|")
    ratios, milliseconds = [], []
    for name, (draw, context) in SETS.items():
        for seed in range(chosen.batches):
            lengths = batch(draw, context, chosen.sequences, seed)
            began = time.process_time()  # planning has one thread, and other processes should not count
            plan = make_plan(lengths, topology, cost, sync=chosen.sync)
            milliseconds.append(1e3 * (time.process_time() - began))
            ratios.append(plan.objective_s / plan.lower_bound_s)
        print(row(name, ratios[-chosen.batches :], milliseconds[-chosen.batches :]))
    print(row("all", ratios, milliseconds))


if __name__ == "__main__":
    main()
