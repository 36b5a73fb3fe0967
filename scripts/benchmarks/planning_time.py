"""Measured: seconds of the planning call as the planning process makes it, remapping included.

    python scripts/benchmarks/planning_time.py
    python scripts/benchmarks/planning_time.py --batches 20 --large 1 --json times.json

    64 ranks          the sets of planners.py that have 64 ranks, `--batches` steps of each
    1,024 ranks       4,096 sequences
    4,096 ranks       16,384 sequences
    first call        in a fresh process, imports apart: what a run's first step waits for

The call is `make_plan` with the default options of a run, the notes on routing left out, as for
all steps but a run's first. Times are CPU time of the one thread that planning takes, so that
other programs on the machine count little. Costs are those of the preset flexsp-gpt-7b-a100.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from hf_flexseq.planner import make_plan
from lengths import DOCUMENTS, WIKIPEDIA, K, batch, common_crawl_like
from planners import CAP, COST, SETS, LengthSet, drawn

COLUMNS = ("ranks", "sequences", "steps", "ms, p50", "p99", "worst", "over bound, mean")
LARGE = (
    SETS["1024 ranks"],
    replace(
        drawn("4096 ranks", common_crawl_like, 192 * K),
        draw=lambda seed: batch(
            (WIKIPEDIA, DOCUMENTS, common_crawl_like)[seed % 3], 192 * K, 16384, seed
        ),
        nodes=512,
    ),
)


def timed_plan(chosen: LengthSet, seed: int) -> tuple[float, float, int]:
    """Return milliseconds of planning one step, its seconds over the bound, and its sequences."""
    lengths = chosen.draw(seed)
    cap = chosen.tokens_per_rank(lengths)
    began = time.thread_time()
    plan = make_plan(lengths, chosen.topology, COST, max_tokens_per_rank=cap)
    milliseconds = 1e3 * (time.thread_time() - began)
    return milliseconds, plan.objective_s / plan.lower_bound_s, len(lengths)


def first_call_ms() -> float:
    """Return milliseconds of the first planning call of a process, imports apart."""
    command = [sys.executable, __file__, "--first-call"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def print_row(ranks: int, found: list[tuple[float, float, int]]) -> None:
    """Print the figures of some steps: (milliseconds, over bound, sequences) each."""
    milliseconds = [figures[0] for figures in found]
    cells = [
        f"{ranks:,}",
        f"{max(figures[2] for figures in found):,}",
        str(len(found)),
        f"{np.percentile(milliseconds, 50):.0f}",
        f"{np.percentile(milliseconds, 99):.0f}",
        f"{max(milliseconds):.0f}",
        f"{np.mean([figures[1] for figures in found]):.3f}",
    ]
    print(table_row(cells), flush=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=10, help="steps of each set of 64 ranks")
    parser.add_argument("--large", type=int, default=3, help="steps of each larger cluster")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.first_call:
        print(timed_plan(SETS["wikipedia"], 0)[0])
        return
    print(f"planning_time.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}; at most {CAP:,} tokens per rank\n")
    print(table_head(COLUMNS))
    figures = {}
    of_64 = []
    for chosen in SETS.values():
        if chosen.topology.world_size == 64:
            of_64 += [timed_plan(chosen, seed) for seed in range(asked.batches)]
    print_row(64, of_64)
    figures["64"] = of_64
    for chosen in LARGE:
        found = [timed_plan(chosen, seed) for seed in range(asked.large)]
        print_row(chosen.topology.world_size, found)
        figures[str(chosen.topology.world_size)] = found
    first_ms = [first_call_ms() for _ in range(3)]
    print(f"\nfirst call of a process: {min(first_ms):.0f} to {max(first_ms):.0f} ms")
    write_record(asked.json, {"steps": figures, "first_call_ms": first_ms})


if __name__ == "__main__":
    main()
