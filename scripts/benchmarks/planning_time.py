"""Measured: seconds of the planning call as the planning process makes it.

    python scripts/benchmarks/planning_time.py
    python scripts/benchmarks/planning_time.py --batches 20 --large 1 --json times.json
    python scripts/benchmarks/planning_time.py --preset llama-3.1-8b-h200
    python scripts/benchmarks/planning_time.py --against ../older

    64 ranks          the sets of planners.py that have 64 ranks, `--batches` steps of each
    1,024 ranks       4,096 sequences
    4,096 ranks       16,384 sequences
    first call        in a fresh process, imports apart: what a run's first step waits for

The call is `make_plan` with the default options of a run. Times are CPU time of the one thread
that planning takes, so that other programs on the machine count little. With `--against` another
checkout of this repository plans every step, too, in turns with this one, by its own constants of
the preset; a table shows the ratios.

"over bound" is above the lower bound of the plan (`hf_flexseq/planner/bound.py`).
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import (
    HERE,
    argument_parser,
    load_average,
    machine,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.cost.presets import PRESETS
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
RATIO_COLUMNS = ("ranks", "there: ms, p50", "p99", "ratio: p50", "means", "seconds of plans, most")
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
    """One step as a checkout planned it."""

    milliseconds: float
    """CPU time of the planning call."""
    objective_s: float
    lower_bound_s: float
    sequences: int


class Timer:
    """A process that plans steps with the code of one checkout."""

    def __init__(self, checkout: Path, preset: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        self._preset = preset
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "plan_timer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def timed(self, chosen: LengthSet, seed: int) -> Planned:
        """Plan one step of a set."""
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        lengths = chosen.draw(seed)
        cap = chosen.tokens_per_rank(lengths)
        step = {
            "lengths": lengths,
            "nodes": chosen.nodes,
            "ranks_per_node": chosen.ranks,
            "cap": cap,
            "preset": self._preset,
        }
        self._process.stdin.write(json.dumps(step) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return Planned(**answer, sequences=len(lengths))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def first_call_ms(preset: str) -> float:
    """Return milliseconds of the first planning call of a process, imports apart."""
    timer = Timer(HERE.parent.parent, preset)
    first = timer.timed(SETS["wikipedia"], 0)
    timer.close()
    return first.milliseconds


def timed_in_turns(timers: list[Timer], steps: list[tuple[LengthSet, int]]) -> list[list[Planned]]:
    """Plan every step by every timer, the first of them first in every other step; return
    [timer][step]."""
    found: list[list[Planned]] = [[] for _ in timers]
    for timer in timers:
        timer.timed(*steps[0])  # tables that a process makes once
    for index, step in enumerate(steps):
        order = list(range(len(timers)))
        if index % 2:
            order.reverse()
        for which in order:
            found[which].append(timers[which].timed(*step))
    return found


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


def ratios_row(ranks: int, here: list[Planned], there: list[Planned]) -> str:
    """Return the row that compares the same steps by two checkouts."""
    ms_here = np.array([one.milliseconds for one in here])
    ms_there = np.array([one.milliseconds for one in there])
    pairs = zip(here, there, strict=True)
    plans = [one.objective_s / other.objective_s for one, other in pairs]
    return table_row(
        [
            f"{ranks:,}",
            f"{np.percentile(ms_there, 50):.0f}",
            f"{np.percentile(ms_there, 99):.0f}",
            f"{np.percentile(ms_here, 50) / np.percentile(ms_there, 50):.2f}",
            f"{ms_here.mean() / ms_there.mean():.2f}",
            f"{max(plans):.4f}",
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


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=10, help="steps of each set of 64 ranks")
    parser.add_argument("--large", type=int, default=3, help="steps of each larger cluster")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="flexsp-gpt-7b-a100", help="cost model"
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="time this checkout's calls, too"
    )
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"planning_time.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}; {asked.preset}, at most {CAP:,} tokens per rank\n")
    print(table_head(COLUMNS))
    timers = [Timer(HERE.parent.parent, asked.preset)]
    if asked.against is not None:
        timers.append(Timer(asked.against, asked.preset))
    figures: dict[str, Any] = {"preset": asked.preset}
    ratio_rows = []
    for ranks, steps in all_steps(asked.batches, asked.large).items():
        here, *others = timed_in_turns(timers, steps)
        print(times_row(ranks, here), flush=True)
        figures[str(ranks)] = [one._asdict() for one in here]
        for there in others:
            ratio_rows.append(ratios_row(ranks, here, there))
            figures[f"{ranks}, the other checkout"] = [one._asdict() for one in there]
    for timer in timers:
        timer.close()
    first_ms = [first_call_ms(asked.preset) for _ in range(3)]
    print(f"\nfirst call of a process: {min(first_ms):.0f} to {max(first_ms):.0f} ms")
    if ratio_rows:
        print("\nthis checkout beside the other one, in turns:\n")
        print("\n".join([table_head(RATIO_COLUMNS), *ratio_rows]))
    write_record(asked.json, figures | {"first_call_ms": first_ms})


if __name__ == "__main__":
    main()
