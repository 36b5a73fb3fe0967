"""All planners on one cost model: how close to the lower bound, against each other, and how long
they take.

    python scripts/bench_planner.py                                    every set, every planner but
                                                                       flexsp, 100 batches
    python scripts/bench_planner.py --flexsp 12 --sets wikipedia       FlexSP's plans of the first
                                                                       12 batches, too
    python scripts/bench_planner.py --sets "1024 ranks" --batches 9 --planners auto
    python scripts/bench_planner.py --sync free --planners auto static batch-ada
    PYTHONPATH=tests python scripts/bench_exact.py --cases 1000        the default planner against
                                                                       the optimum

Lengths are drawn from the quantile tables in data/ (log-linear between quantiles) and from a
log-normal fitted to CommonCrawl; longer ones than the context are drawn again. Costs are those of
the preset flexsp-gpt-7b-a100, without remapping, which only one of the compared systems knows: all
seconds of the plans are modelled, and only the planning time is measured, as CPU time of the one
thread it takes.
"""

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.published.milp import CHECKPOINTS, GAP, NODES
from hf_flexseq.planner.static import static_degrees
from hf_flexseq.topology import Topology

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results" / "flexsp_figures.json"
COST = load_cost_model("flexsp-gpt-7b-a100")
PLANNERS = ("auto", "zeppelin", "megatron", "batch-ada", "static", "batch-rebalance")
K = 1024
Draw = Callable[[random.Random], int]


def quantile_table(name: str) -> Draw:
    """Draws lengths from the (probability, length) pairs of a file."""
    probabilities, lengths = zip(
        *json.loads((DATA / f"{name}.json").read_text())["quantiles"], strict=True
    )

    def draw(rng: random.Random) -> int:
        p = rng.random()
        at = max(1, bisect_left(probabilities, p))
        low, high = probabilities[at - 1], probabilities[at]
        share = (p - low) / (high - low) if high > low else 1.0
        return max(1, round(lengths[at - 1] * (lengths[at] / lengths[at - 1]) ** share))

    return draw


def common_crawl_like(rng: random.Random) -> int:
    return max(1, int(rng.lognormvariate(math.log(950), 1.75)))


WIKIPEDIA, DOCUMENTS = quantile_table("wikipedia"), quantile_table("documents")


def batch(draw: Draw, context: int, count: int, seed: int) -> list[int]:
    """`count` lengths of at most `context` tokens."""
    rng, lengths = random.Random(seed), []
    while len(lengths) < count:
        length = draw(rng)
        if length <= context:
            lengths.append(length)
    return lengths


@dataclass(frozen=True, kw_only=True)
class LengthSet:
    """Batches of one kind. draw: lengths of a seed. cap: tokens per rank for them; None takes the
    cost model's."""

    name: str
    draw: Callable[[int], list[int]]
    context: int
    nodes: int = 8
    ranks: int = 8
    cap: Callable[[list[int]], int] | None = None

    @property
    def topology(self) -> Topology:
        return Topology(nodes=self.nodes, ranks_per_node=self.ranks)

    def tokens_per_rank(self, lengths: list[int]) -> int:
        return COST.max_tokens_per_rank(64) if self.cap is None else self.cap(lengths)


def plain(name: str, draw: Draw, context: int) -> LengthSet:
    return LengthSet(name=name, draw=lambda seed: batch(draw, context, 512, seed), context=context)


def odd_world(nodes: int, ranks: int) -> LengthSet:
    world = nodes * ranks
    context = min(192 * K, world * COST.max_tokens_per_rank(64))
    return LengthSet(
        name=f"{nodes}x{ranks} ranks",
        draw=lambda seed: batch(DOCUMENTS, context, 8 * world, seed),
        context=context,
        nodes=nodes,
        ranks=ranks,
    )


LIMIT = 64 * COST.max_tokens_per_rank(64)  # the longest sequence that 64 ranks hold, 372K
SETS = {
    s.name: s
    for s in (
        plain("wikipedia", WIKIPEDIA, 192 * K),
        plain("documents", DOCUMENTS, 192 * K),
        plain("cc-like", common_crawl_like, LIMIT),
        LengthSet(
            name="one at the limit",
            draw=lambda seed: [LIMIT, *batch(WIKIPEDIA, 192 * K, 511, seed)],
            context=LIMIT,
        ),
        LengthSet(
            name="all equal",
            draw=lambda seed: [int(256 * 64 ** random.Random(seed).random())] * 512,
            context=16 * K,
        ),
        LengthSet(
            name="fewer than ranks",
            draw=lambda seed: batch(DOCUMENTS, 192 * K, 24, seed),
            context=192 * K,
        ),
        replace(
            plain("fill 0.95", WIKIPEDIA, 192 * K),
            cap=lambda lengths: max(
                math.ceil(sum(lengths) / 64 / 3 / 0.95), math.ceil(max(lengths) / 64)
            ),
        ),
        odd_world(1, 6),
        odd_world(2, 6),
        odd_world(6, 8),
        LengthSet(
            name="1024 ranks",
            draw=lambda seed: batch(
                (WIKIPEDIA, DOCUMENTS, common_crawl_like)[seed % 3], 192 * K, 4096, seed
            ),
            context=192 * K,
            nodes=128,
        ),
    )
}


FIGURES = ("seconds", "bounds", "milliseconds")


@dataclass
class Column:
    """One planner on the batches of a set; None where it has no plan. seconds, bounds: modelled,
    of the step."""

    seconds: list[float | None] = field(default_factory=list)
    bounds: list[float | None] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def add(self, lengths: list[int], chosen: LengthSet, **options: str | int) -> None:
        # planning has one thread, and other processes should not count
        began = time.process_time()
        try:
            cap = chosen.tokens_per_rank(lengths)
            plan = make_plan(
                lengths, chosen.topology, COST, max_tokens_per_rank=cap, remap="off", **options
            )
        except PlanInfeasible:
            self.seconds.append(None)
            self.bounds.append(None)
            return
        self.milliseconds.append(1e3 * (time.process_time() - began))
        self.seconds.append(plan.objective_s)
        self.bounds.append(plan.lower_bound_s)

    def solved(self, kept: dict[str, list[float]], count: int, lengths: LengthSet) -> None:
        """FlexSP on `count` batches: those of `kept` (seconds, bounds and milliseconds) as they
        are, the rest now."""
        self.seconds, self.bounds, self.milliseconds = (
            kept.setdefault(name, []) for name in FIGURES
        )
        for seed in range(len(self.seconds), count):
            self.add(lengths.draw(seed), lengths, planner="flexsp")

    def over(self, other: list[float | None]) -> list[float]:
        pairs = zip(self.seconds, other, strict=False)
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def static_degree(chosen: LengthSet, lengths: list[int]) -> int:
    """The narrowest degree that holds the context: what a run with one degree has to take."""
    context = min(chosen.context, chosen.tokens_per_rank(lengths) * chosen.topology.world_size)
    return next(
        d
        for d in static_degrees(chosen.topology)
        if -(-context // d) <= chosen.tokens_per_rank(lengths)
    )


def measured(chosen: LengthSet, asked: argparse.Namespace) -> dict[str, Column]:
    """Every planner's column."""
    columns = {planner: Column() for planner in asked.planners}
    for seed in range(asked.batches):
        lengths = chosen.draw(seed)
        for planner, column in columns.items():
            more = {"sp_degree": static_degree(chosen, lengths)} if planner == "static" else {}
            column.add(lengths, chosen, planner=planner, sync=asked.sync, **more)
    return columns


def with_flexsp(
    columns: dict[str, Column], chosen: LengthSet, asked: argparse.Namespace
) -> dict[str, Column]:
    """The same and FlexSP's, whose figures are kept in a file: solving again would only take
    hours. It has no plans for free ranks."""
    if asked.sync == "free" or not asked.flexsp:
        return columns
    kept = json.loads(asked.flexsp_results.read_text()) if asked.flexsp_results.exists() else {}
    columns["flexsp"] = Column()
    columns["flexsp"].solved(kept.setdefault(chosen.name, {}), asked.flexsp, chosen)
    asked.flexsp_results.write_text(json.dumps(kept) + "\n")
    return columns


def of(ratios: list[float]) -> str:
    return f"{np.mean(ratios):.3f} | {max(ratios):.3f}" if ratios else "- | -"


HEADER = """
| lengths | planner | batches | over FlexSP, mean | worst | over bound, mean | worst | \
over megatron, mean | worst | CPU ms, p50 | p99 |
|---|---|---|---|---|---|---|---|---|---|---|"""


def rows(name: str, columns: dict[str, Column]) -> None:
    for planner, column in columns.items():
        against = [
            column.over(columns[other].seconds) if other in columns else []
            for other in ("flexsp", "megatron")
        ]
        cells = [of(against[0]), of(column.over(column.bounds)), of(against[1])]
        times = [
            f"{np.percentile(column.milliseconds, q):.0f}" if column.milliseconds else "-"
            for q in (50, 99)
        ]
        print(
            "|",
            " | ".join([name, planner, str(len(column.milliseconds)), *cells, *times]),
            "|",
            flush=True,
        )


def machine() -> str:
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    cpu = models[0] if models else platform.machine()
    python, numpy = platform.python_version(), np.__version__
    return f"{cpu}, {os.cpu_count()} cores, Python {python}, NumPy {numpy}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=[name for name in SETS if name != "1024 ranks"]
    )
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=PLANNERS)
    parser.add_argument("--batches", type=int, default=100, help="per length set")
    parser.add_argument(
        "--flexsp",
        type=int,
        default=0,
        metavar="BATCHES",
        help="solve at least so many with flexsp",
    )
    parser.add_argument(
        "--flexsp-results", type=Path, default=RESULTS, help="where flexsp's figures are kept"
    )
    parser.add_argument("--sync", choices=("lockstep", "free"), default="lockstep")
    asked = parser.parse_args()
    print(f"bench_planner.py {' '.join(sys.argv[1:])}\non {machine()}")
    print(f"MILPs end at a gap of {GAP}, {NODES} nodes or {CHECKPOINTS} checkpoints")
    print(HEADER)
    for name in asked.sets:
        rows(name, with_flexsp(measured(SETS[name], asked), SETS[name], asked))


if __name__ == "__main__":
    main()
