"""Modelled: planned degrees against one degree, for a mixture of experts with its experts over the
ranks of a node.

    python scripts/benchmarks/expert_plans.py --json expert_plans.json
    python scripts/benchmarks/expert_plans.py --cost-model gpt-oss-120b-ep8-h100 --steps 2

Qwen3-30B-A3B trains on 64 H100, eight ranks to an expert group. Lengths are log-normal with a
given mean; sigma 1 is a short tail, 1.75 that of CommonCrawl, and what is longer than a million
tokens is cut. A run of --steps steps has each quantile once, in a fixed order, so that no figure
depends on chance. `wikipedia` and `documents` are drawn from the tables in data/ with a fixed
seed; longer ones than 192K are drawn again. A step has about --tokens tokens.

Seconds are those of the closed form, of all steps together. Each ratio is over the planner `auto`,
and with it stand the degree and the strategy.

* `own degree`: the planner `static` with the best degree of the run. It balances groups by cost,
  and chooses a strategy for each group.
* `most`: the seconds of `own degree` over the lower bound. No plan gains more than that over it.
* `in order`: one degree and one strategy for all sequences, Ulysses within the number of query
  heads or a zigzag. Samples go to groups in the order in which they come, and nothing is balanced
  by cost. Either each group packs its share of the samples into as few micro-batches as memory
  allows, or samples are packed into rows of one size, and a group gets one row in a micro-batch.
  The best degree, strategy, way of packing and size of rows is taken.
* `one by one`: the same with one sample for each group and micro-batch, as with
  per_device_train_batch_size=1 and no packing.

The degree has to hold the longest sequence of the run. All of them have hf_flexseq's kernels, its
transfers that hide, and attention that is not computed again; stacks that lack these take longer.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import NamedTuple

from common import argument_parser, machine, table_head, table_row, write_record
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, experts_ns, step_ns
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import Group, MicroBatch, Plan, PlanInfeasible
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from lengths import DOCUMENTS, WIKIPEDIA, K, batch

TOPOLOGY = Topology(nodes=8, ranks_per_node=8)
WORLD = TOPOLOGY.world_size
LONGEST = 1024 * K
TABLE_LONGEST = 192 * K
MEANS = (2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K)
SIGMAS = (1.0, 1.75)
TABLES = {"wikipedia": WIKIPEDIA, "documents": DOCUMENTS}
SEED = 0


# ---- lengths


def log_normal(mean: int, sigma: float, count: int) -> list[int]:
    """Return `count` quantiles of a log-normal distribution, cut at `LONGEST`, in a fixed order.
    Its median is such that their mean is `mean`."""
    scores = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]

    def cut(median: float) -> list[int]:
        return [max(1, min(LONGEST, int(median * math.exp(sigma * one)))) for one in scores]

    low, high = 1.0, float(LONGEST)
    for _ in range(60):
        median = math.sqrt(low * high)
        if sum(cut(median)) < mean * count:
            low = median
        else:
            high = median
    lengths = cut(high)
    random.Random(SEED).shuffle(lengths)
    return lengths


class Run(NamedTuple):
    """The steps of a run."""

    name: str
    steps: tuple[tuple[int, ...], ...]
    """Lengths of each step."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(max(lengths) for lengths in self.steps)


def runs_of(steps: int, tokens: int) -> Iterator[Run]:
    """Yield the runs, each of `steps` steps of about `tokens` tokens."""
    for sigma in SIGMAS:
        for mean in MEANS:
            of_step = tokens // mean
            lengths = log_normal(mean, sigma, steps * of_step)
            yield _cut(f"mean {mean // K}K, sigma {sigma:g}", lengths, of_step)
    for name, draw in TABLES.items():
        of_step = tokens * 100 // sum(batch(draw, TABLE_LONGEST, 100, SEED))
        lengths = batch(draw, TABLE_LONGEST, steps * of_step, SEED)
        yield _cut(f"{name}, mean {sum(lengths) / len(lengths) / K:.1f}K", lengths, of_step)


def _cut(name: str, lengths: Sequence[int], of_step: int) -> Run:
    """Return a run whose steps have so many sequences each."""
    starts = range(0, len(lengths), of_step)
    return Run(name, tuple(tuple(lengths[at : at + of_step]) for at in starts))


# ---- one degree, samples in order


class Fixed(NamedTuple):
    """One degree for a run."""

    seconds: float
    """Of all steps together."""
    degree: int
    strategy: str


def rows_in_order(lengths: Sequence[int], ids: Sequence[int], room: int) -> list[list[int]]:
    """Return the ids in rows of at most `room` tokens: a sequence that does not fit begins the
    next row."""
    rows: list[list[int]] = []
    left = 0
    for one in ids:
        if not rows or lengths[one] > left:
            rows.append([])
            left = room
        rows[-1].append(one)
        left -= lengths[one]
    return rows


def shared_out(lengths: Sequence[int], groups: int, room: int) -> list[list[list[int]]]:
    """Return the samples of each group in each micro-batch, [micro-batches][groups], where every
    group packs its share of the samples. room: tokens of a group."""
    by_group = []
    for group in range(groups):
        by_group.append(rows_in_order(lengths, range(group, len(lengths), groups), room))
    micro_batches = []
    for index in range(max(map(len, by_group))):
        micro_batches.append([rows[index] if index < len(rows) else [] for rows in by_group])
    return micro_batches


def in_rows(rows: Sequence[list[int]], groups: int) -> list[list[list[int]]]:
    """Return the samples of each group in each micro-batch, [micro-batches][groups], where each
    group gets one row in a micro-batch."""
    return [list(rows[at : at + groups]) for at in range(0, len(rows), groups)]


def dealt_s(
    dealt: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    cost: CostModel,
    degree: int,
    strategy: str,
) -> float:
    """Return the seconds of a step. dealt: [micro-batches][groups] the samples of each group."""
    micro_batches = []
    for of_groups in dealt:
        groups = []
        for index, ids in enumerate(of_groups):
            if ids:
                ranks = tuple(range(index * degree, (index + 1) * degree))
                groups.append(Group(ranks=ranks, sequences=tuple(ids), strategy=strategy))
        micro_batches.append(MicroBatch(groups=tuple(groups)))
    return step_ns(cost, micro_batches, lengths, TOPOLOGY, sync="lockstep") / 1e9


def shapes_of(run: Run, cost: CostModel, cap: int) -> Iterator[tuple[int, str]]:
    """Yield each (degree, strategy) that holds the longest sequence of a run."""
    for degree in TOPOLOGY.degrees():
        if -(-run.longest // degree) > cap:
            continue
        if degree == 1:
            yield degree, "local"
            continue
        if cost.heads is None or degree <= cost.heads:
            yield degree, "ulysses"
        yield degree, "zigzag"


def in_order(run: Run, cost: CostModel, cap: int) -> Fixed:
    """Return the best degree where samples are packed in the order in which they come."""
    tried = []
    for degree, strategy in shapes_of(run, cost, cap):
        groups = WORLD // degree
        room = cap * degree
        total = 0.0
        for lengths in run.steps:
            dealt = shared_out(lengths, groups, room)
            total += dealt_s(dealt, lengths, cost, degree, strategy)
        tried.append(Fixed(total, degree, strategy))
        while room >= run.longest:
            total = 0.0
            for lengths in run.steps:
                rows = rows_in_order(lengths, range(len(lengths)), room)
                total += dealt_s(in_rows(rows, groups), lengths, cost, degree, strategy)
            tried.append(Fixed(total, degree, strategy))
            room //= 2
    return min(tried)


def one_by_one(run: Run, cost: CostModel, cap: int) -> Fixed:
    """Return the best degree where each group has one sample in a micro-batch."""
    tried = []
    for degree, strategy in shapes_of(run, cost, cap):
        total = 0.0
        for lengths in run.steps:
            rows = [[one] for one in range(len(lengths))]
            total += dealt_s(in_rows(rows, WORLD // degree), lengths, cost, degree, strategy)
        tried.append(Fixed(total, degree, strategy))
    return min(tried)


# ---- our own planners


def own_degree(run: Run, cost: CostModel) -> Fixed:
    """Return the best degree of the planner `static`."""
    tried = []
    for degree in TOPOLOGY.degrees():
        options = PlanOptions(planner="static", sp_degree=degree)
        try:
            plans = [make_plan(lengths, TOPOLOGY, cost, options) for lengths in run.steps]
        except PlanInfeasible:
            continue
        tried.append(Fixed(sum(plan.objective_s for plan in plans), degree, ""))
    return min(tried)


def experts_share(plans: Sequence[Plan], cost: CostModel) -> float:
    """Return the share of the ranks' time that experts take in some plans."""
    if cost.experts is None:
        return 0.0
    spent = 0.0
    for plan in plans:
        for micro_batch in plan.micro_batches:
            spent += experts_ns(cost, micro_batch, plan.lengths, TOPOLOGY).mean() / 1e9
    return spent / sum(plan.objective_s for plan in plans)


# ---- the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A run by each of them; seconds of all steps together."""

    name: str
    longest: int
    sequences: int
    """Of a step."""
    planned_s: float
    bound_s: float
    micro_batches: float
    """Of a planned step."""
    experts: float
    """Share of the ranks' time in experts, planned."""
    own: Fixed
    ordered: Fixed
    single: Fixed

    def cells(self) -> tuple[str, ...]:
        """Return the run's line of the table."""
        over = [one.seconds / self.planned_s for one in (self.own, self.ordered, self.single)]
        return (
            self.name,
            f"{self.longest / K:,.0f}K",
            f"{self.sequences:,}",
            f"{self.planned_s:.1f}",
            f"{self.micro_batches:.1f}",
            f"{100 * self.experts:.0f} %",
            f"{over[0]:.3f}x ({self.own.degree})",
            f"{self.own.seconds / self.bound_s:.3f}x",
            f"{over[1]:.2f}x ({self.ordered.degree}, {self.ordered.strategy})",
            f"{over[2]:.2f}x ({self.single.degree}, {self.single.strategy})",
        )


COLUMNS = (
    "lengths",
    "longest",
    "sequences a step",
    "planned, s",
    "micro-batches",
    "experts",
    "own degree",
    "most",
    "in order",
    "one by one",
)


def result_of(run: Run, cost: CostModel) -> Result:
    """Return the figures of a run."""
    cap = cost.max_tokens_per_rank(WORLD)
    plans = [make_plan(lengths, TOPOLOGY, cost) for lengths in run.steps]
    return Result(
        name=run.name,
        longest=run.longest,
        sequences=len(run.steps[0]),
        planned_s=sum(plan.objective_s for plan in plans),
        bound_s=sum(plan.lower_bound_s for plan in plans),
        micro_batches=sum(len(plan.micro_batches) for plan in plans) / len(plans),
        experts=experts_share(plans, cost),
        own=own_degree(run, cost),
        ordered=in_order(run, cost, cap),
        single=one_by_one(run, cost, cap),
    )


def main() -> None:
    """Print a line for each run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cost-model", default="qwen3-30b-a3b-ep8-h100")
    parser.add_argument("--steps", type=int, default=4, help="of a run")
    parser.add_argument("--tokens", type=int, default=4 * K * K, help="of a step, about")
    asked = parser.parse_args()
    cost = load_cost_model(asked.cost_model)
    print(f"{cost.name}{cost.experts_text(WORLD, before=', ')}, on {machine('numpy')}\n")
    print(table_head(COLUMNS, range(1, len(COLUMNS))))
    results = []
    for run in runs_of(asked.steps, asked.tokens):
        results.append(result_of(run, cost))
        print(table_row(results[-1].cells()), flush=True)
    write_record(asked.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
