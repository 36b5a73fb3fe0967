"""Measured: seconds of the planning call as the planning process makes it.

    python scripts/benchmarks/planning_time.py
    python scripts/benchmarks/planning_time.py --batches 20 --large 1 --json times.json
    python scripts/benchmarks/planning_time.py --preset llama-3.1-8b-h200

    64 ranks          the sets of planners.py that have 64 ranks, `--batches` steps of each
    1,024 ranks       4,096 sequences
    4,096 ranks       16,384 sequences
    first call        in a fresh process, imports apart: what a run's first step waits for

The call is `make_plan` with the default options of a run. Times are CPU time of the one thread
that planning takes, so that other programs on the machine count little.

"over bound" is above the lower bound of the plan (`hf_flexseq/planner/lower_bound.py`).
"""

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common import (
    argument_parser,
    load_average,
    machine,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from lengths import DOCUMENTS, WIKIPEDIA, K, batch, common_crawl_like
from planners import CAP, SETS, LengthSet, drawn

COLUMNS = (
    "ranks",
    "sequences",
    "steps",
    "ms, p50",
    "p99",
    "worst",
    "over bound, mean",
)
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


class Planned(NamedTuple):
    """One planned step."""

    milliseconds: float
    """CPU time of the planning call."""
    objective_s: float
    lower_bound_s: float
    sequences: int


def timed(chosen: LengthSet, seed: int, preset: str) -> Planned:
    """Plan one step of a set."""
    lengths = chosen.draw(seed)
    options = PlanOptions(max_tokens_per_rank=chosen.tokens_per_rank(lengths))
    cost = PRESETS[preset]
    began = time.thread_time()
    plan = make_plan(lengths, chosen.topology, cost, options)
    milliseconds = 1e3 * (time.thread_time() - began)
    return Planned(milliseconds, plan.objective_s, plan.lower_bound_s, len(lengths))


def first_call_ms(preset: str) -> float:
    """Return milliseconds of the first planning call of a process, imports apart."""
    command = [sys.executable, __file__, "--preset", preset, "--first-call"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def times_row(ranks: int, found: list[Planned]) -> str:
    """Return the table's row of some steps."""
    milliseconds = [one.milliseconds for one in found]
    return table_row(
        [
            f"{ranks:,}",
            f"{max(one.sequences for one in found):,}",
            str(len(found)),
            f"{np.percentile(milliseconds, 50):.0f}",
            f"{np.percentile(milliseconds, 99):.0f}",
            f"{max(milliseconds):.0f}",
            f"{np.mean([one.objective_s / one.lower_bound_s for one in found]):.3f}",
        ]
    )


def all_steps(batches: int, large: int) -> dict[int, list[tuple[LengthSet, int]]]:
    """Return the steps to plan, (set, seed) each, by ranks."""
    steps: dict[int, list[tuple[LengthSet, int]]] = {64: []}
    for chosen in SETS.values():
        if chosen.topology.world_size == 64:
            steps[64] += [(chosen, seed) for seed in range(batches)]
    for chosen in LARGE:
        steps[chosen.topology.world_size] = [(chosen, seed) for seed in range(large)]
    return steps


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=10, help="steps of each set of 64 ranks")
    parser.add_argument("--large", type=int, default=3, help="steps of each larger cluster")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="flexsp-gpt-7b-a100", help="cost model"
    )
    # the fresh process of `first_call_ms`
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.first_call:
        print(timed(SETS["wikipedia"], 0, asked.preset).milliseconds)
        return
    print(f"planning_time.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}; {asked.preset}, at most {CAP:,} tokens per rank\n")
    print(table_head(COLUMNS))
    figures: dict[str, Any] = {"preset": asked.preset}
    timed(SETS["wikipedia"], 0, asked.preset)  # makes the tables that a process makes once
    for ranks, steps in all_steps(asked.batches, asked.large).items():
        found = [timed(chosen, seed, asked.preset) for chosen, seed in steps]
        print(times_row(ranks, found), flush=True)
        figures[str(ranks)] = [one._asdict() for one in found]
    first_ms = [first_call_ms(asked.preset) for _ in range(3)]
    print(f"\nfirst call of a process: {min(first_ms):.0f} to {max(first_ms):.0f} ms")
    write_record(asked.json, figures | {"first_call_ms": first_ms})


if __name__ == "__main__":
    main()
