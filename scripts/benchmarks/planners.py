"""Modelled: all planners on one cost model, against a lower bound, against each other, and timed.

    python scripts/benchmarks/planners.py                             all but flexsp, 100 batches
    python scripts/benchmarks/planners.py --flexsp 12                 FlexSP on 12 batches, too
    python scripts/benchmarks/planners.py --sets "4096 ranks" --batches 3 --planners auto
    python scripts/benchmarks/planners.py --sync free --planners auto static batch-ada

Lengths are drawn from the quantile tables in data/ and from a log-normal fitted to CommonCrawl
(see lengths.py); longer ones than the context are drawn again. Costs are those of the preset
flexsp-gpt-7b-a100. All seconds of the plans are modelled, and only the planning time is measured,
as CPU time of its one thread. `tests/planner/test_exact.py` compares small cases with the optimum.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from common import HERE, argument_parser, machine, table_head, table_row, write_record
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.published.flexsp.milp import CHECKPOINTS, GAP, NODES
from lengths import DOCUMENTS, WIKIPEDIA, Draw, K, batch, common_crawl_like

RESULTS = HERE / "data" / "flexsp_figures.json"
COST = load_cost_model("flexsp-gpt-7b-a100")
PLANNERS = ("auto", "zeppelin", "megatron", "batch-ada", "static", "batch-rebalance")
CAP = COST.max_tokens_per_rank(64)
LIMIT = 64 * CAP  # the longest sequence that 64 ranks hold, 372K


# ---- sets of lengths


@dataclass(frozen=True, kw_only=True)
class LengthSet:
    """Batches of one kind, and the cluster that trains on them."""

    name: str
    draw: Callable[[int], list[int]]
    """The lengths of a seed's batch."""
    context: int
    """Tokens of the longest sequence that may occur."""
    nodes: int = 8
    ranks: int = 8
    """Ranks per node."""
    cap: Callable[[list[int]], int] | None = None
    """Tokens per rank and micro-batch for a batch; None takes the cost model's."""

    @property
    def topology(self) -> Topology:
        return Topology(nodes=self.nodes, ranks_per_node=self.ranks)

    def tokens_per_rank(self, lengths: list[int]) -> int:
        """Return the most tokens that a rank may hold in a micro-batch of this batch."""
        return CAP if self.cap is None else self.cap(lengths)


def drawn(name: str, draw: Draw, context: int) -> LengthSet:
    """Return the set of batches of 512 independent draws."""
    return LengthSet(name=name, draw=lambda seed: batch(draw, context, 512, seed), context=context)


def odd_world(nodes: int, ranks: int) -> LengthSet:
    """Return the set of batches of documents for a world that is no power of two."""
    world = nodes * ranks
    context = min(192 * K, world * CAP)
    return LengthSet(
        name=f"{nodes}x{ranks} ranks",
        draw=lambda seed: batch(DOCUMENTS, context, 8 * world, seed),
        context=context,
        nodes=nodes,
        ranks=ranks,
    )


def one_at_the_limit(seed: int) -> list[int]:
    """Return a batch with one sequence that needs all ranks' memory."""
    return [LIMIT, *batch(WIKIPEDIA, 192 * K, 511, seed)]


def all_equal(seed: int) -> list[int]:
    """Return 512 times one length between 256 and 16K tokens."""
    return [int(256 * 64 ** random.Random(seed).random())] * 512


def three_micro_batches(lengths: list[int]) -> int:
    """Return the cap at which three micro-batches are 95 % full."""
    three = math.ceil(sum(lengths) / 64 / 3 / 0.95)
    return max(three, math.ceil(max(lengths) / 64))


def large_cluster(nodes: int) -> LengthSet:
    """Return the set of batches of four sequences per rank, of the three distributions in turn."""

    def draw(seed: int) -> list[int]:
        one = (WIKIPEDIA, DOCUMENTS, common_crawl_like)[seed % 3]
        return batch(one, 192 * K, 4 * 8 * nodes, seed)

    return LengthSet(name=f"{8 * nodes} ranks", draw=draw, context=192 * K, nodes=nodes)


LARGE = (large_cluster(128), large_cluster(512))


SMALL = (
    drawn("wikipedia", WIKIPEDIA, 192 * K),
    drawn("documents", DOCUMENTS, 192 * K),
    drawn("cc-like", common_crawl_like, LIMIT),
    LengthSet(name="one at the limit", draw=one_at_the_limit, context=LIMIT),
    LengthSet(name="all equal", draw=all_equal, context=16 * K),
    LengthSet(
        name="fewer than ranks",
        draw=lambda seed: batch(DOCUMENTS, 192 * K, 24, seed),
        context=192 * K,
    ),
    replace(drawn("fill 0.95", WIKIPEDIA, 192 * K), cap=three_micro_batches),
    odd_world(1, 6),
    odd_world(2, 6),
    odd_world(6, 8),
)
SETS = {length_set.name: length_set for length_set in (*SMALL, *LARGE)}


# ---- planners on them


@dataclass
class Column:
    """One planner on the batches of a set, in the order of their seeds."""

    seconds: list[float | None] = field(default_factory=list)
    """Modelled seconds of each step; None where the planner has no plan."""
    bounds: list[float | None] = field(default_factory=list)
    """Lower bound on them; None where the planner has no plan."""
    milliseconds: list[float] = field(default_factory=list)
    """CPU time of planning, of the batches that have a plan."""

    def add(self, lengths: list[int], chosen: LengthSet, **options: str | int) -> None:
        """Plan one more batch."""
        cap = chosen.tokens_per_rank(lengths)
        # planning has one thread, and other programs should not count
        began = time.thread_time()
        try:
            plan = make_plan(
                lengths, chosen.topology, COST, PlanOptions(max_tokens_per_rank=cap, **options)
            )
        except PlanInfeasible:
            self.seconds.append(None)
            self.bounds.append(None)
            return
        self.milliseconds.append(1e3 * (time.thread_time() - began))
        self.seconds.append(plan.objective_s)
        self.bounds.append(plan.lower_bound_s)

    def over(self, other: list[float | None]) -> list[float]:
        """Return this planner's seconds over `other`, of the batches that both have."""
        found = []
        for mine, theirs in zip(self.seconds, other, strict=False):
            if mine is not None and theirs is not None:
                found.append(mine / theirs)
        return found


def static_degree(chosen: LengthSet, lengths: list[int]) -> int:
    """Return the narrowest degree that holds the context: what a run with one degree must take."""
    cap = chosen.tokens_per_rank(lengths)
    context = min(chosen.context, cap * chosen.topology.world_size)
    for degree in chosen.topology.degrees():
        if -(-context // degree) <= cap:
            return degree
    raise ValueError(f"no degree holds a sequence of {context} tokens")


def planned(chosen: LengthSet, asked: argparse.Namespace) -> dict[str, Column]:
    """Return every planner's column on the batches of a set."""
    columns = {planner: Column() for planner in asked.planners}
    for seed in range(asked.batches):
        lengths = chosen.draw(seed)
        for planner, column in columns.items():
            options: dict[str, str | int] = {"planner": planner, "sync": asked.sync}
            if planner == "static":
                options["sp_degree"] = static_degree(chosen, lengths)
            column.add(lengths, chosen, **options)
    return columns


def flexsp_column(chosen: LengthSet, asked: argparse.Namespace) -> Column:
    """Return FlexSP's column on the first `--flexsp` batches of a set.

    Its figures are kept in a file, for solving the same batches again would only take hours:
    batches that the file has are taken from there, others are solved now and added to it.
    """
    kept = {}
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text())
    column = Column(**kept.get(chosen.name, {}))
    for seed in range(len(column.seconds), asked.flexsp):
        column.add(chosen.draw(seed), chosen, planner="flexsp")
    kept[chosen.name] = asdict(column)
    RESULTS.write_text(json.dumps(kept) + "\n")
    return column


# ---- the table

COLUMNS = (
    "lengths",
    "planner",
    "batches",
    "over FlexSP, mean",
    "worst",
    "over bound, mean",
    "worst",
    "over megatron, mean",
    "worst",
    "CPU ms, p50",
    "p99",
)


def mean_and_worst(found: list[float]) -> list[str]:
    """Return two cells."""
    return [f"{np.mean(found):.3f}", f"{max(found):.3f}"] if found else ["-", "-"]


def seconds_by(planner: str, columns: dict[str, Column]) -> list[float | None]:
    """Return a planner's seconds; none where it was not asked for."""
    return columns[planner].seconds if planner in columns else []


def print_rows(name: str, columns: dict[str, Column]) -> None:
    """Print one row for each planner on a set."""
    for planner, column in columns.items():
        cells = [name, planner, str(len(column.milliseconds))]
        cells += mean_and_worst(column.over(seconds_by("flexsp", columns)))
        cells += mean_and_worst(column.over(column.bounds))
        cells += mean_and_worst(column.over(seconds_by("megatron", columns)))
        for percentile in (50, 99):
            timed = column.milliseconds
            cells.append(f"{np.percentile(timed, percentile):.0f}" if timed else "-")
        print(table_row(cells), flush=True)


def main() -> None:
    parser = argument_parser(__doc__)
    small = [length_set.name for length_set in SMALL]
    parser.add_argument("--sets", nargs="+", choices=SETS, default=small)
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=PLANNERS)
    parser.add_argument("--batches", type=int, default=100, help="per length set")
    parser.add_argument(
        "--flexsp",
        type=int,
        default=0,
        metavar="BATCHES",
        help="solve at least so many with flexsp",
    )
    parser.add_argument("--sync", choices=("lockstep", "free"), default="lockstep")
    asked = parser.parse_args()
    print(f"planners.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"MILPs end at a gap of {GAP}, {NODES} nodes or {CHECKPOINTS} checkpoints\n")
    print(table_head(COLUMNS))
    figures = {}
    for name in asked.sets:
        columns = planned(SETS[name], asked)
        # FlexSP has no plans for ranks that run freely
        if asked.flexsp and asked.sync == "lockstep":
            columns["flexsp"] = flexsp_column(SETS[name], asked)
        print_rows(name, columns)
        figures[name] = {planner: asdict(column) for planner, column in columns.items()}
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
