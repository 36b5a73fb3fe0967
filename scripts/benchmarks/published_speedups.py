"""Simulated: published speed-ups beside what the same comparison gives here.

    python scripts/benchmarks/published_speedups.py [--batches 8] [--flexsp 8]

FlexSP (arXiv 2412.01523, figure 4: 64 A100-40GB, 512 sequences): its planner over one degree for
the run (DeepSpeed) and over the best degree of each batch (BatchAda). Constants: the presets
flexsp-gpt-7b-a100, -13b- and -30b-; lengths: the table in data/ for Wikipedia, for CommonCrawl a
log-normal, which is not the paper's data. FlexSP's own plans are made for the first batches of the
7B model only: each takes minutes. Its 1.98x over Megatron-LM is left out: no constants for tensor
parallelism were released.

Zeppelin (arXiv 2509.21841: 2.80x on average over one ring for everything): documents of at most
64K tokens, 8K per rank, Llama-3.1-8B on A800 and H200 clusters (presets llama-3.1-8b-a800 and
-h200, estimated, without constants per micro-batch and group). The published average is over three
other datasets and models of 3B to 30B.

Seconds are the event simulation's, in lockstep; a speed-up is of total seconds over all batches.
Nothing is measured.
"""

from collections.abc import Sequence
from typing import Any

from common import argument_parser, machine, table, write_record
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.static import static_degrees
from hf_flexseq.simulate import simulate
from hf_flexseq.topology import Topology
from lengths import WIKIPEDIA, Draw, K, batch, common_crawl_like, trace
from zones import TOKENS_PER_RANK, without_constants

CLUSTER = Topology(nodes=8, ranks_per_node=8)
SETS: dict[str, Draw] = {"Wikipedia": WIKIPEDIA, "CommonCrawl": common_crawl_like}
# (model, context in K tokens, data) -> FlexSP's published speed-up over DeepSpeed, and BatchAda's
PUBLISHED = {
    ("7b", 192, "CommonCrawl"): (1.50, 1.09),
    ("7b", 192, "Wikipedia"): (1.72, 1.34),
    ("13b", 192, "CommonCrawl"): (1.35, 1.07),
    ("13b", 192, "Wikipedia"): (1.59, 1.31),
    ("30b", 192, "CommonCrawl"): (1.54, 1.09),
    ("30b", 192, "Wikipedia"): (1.64, 1.23),
    ("7b", 384, "CommonCrawl"): (1.42, 1.04),
    ("7b", 384, "Wikipedia"): (1.46, 1.32),
}
FLEXSP_COLUMNS = (
    "GPT, context, data",
    "BatchAda, published",
    "simulated",
    "FlexSP, published",
    "simulated",
    "auto, simulated",
)
ZEPPELIN_COLUMNS = ("cluster, nodes", "zeppelin, simulated", "auto, simulated")


def simulated_s(
    batches: Sequence[list[int]], topology: Topology, cost: CostModel, **options: str | int
) -> float:
    """Return the simulated seconds of all batches, planned with `options`."""
    total_ns = 0
    for lengths in batches:
        plan = make_plan(lengths, topology, cost, **options)
        total_ns += simulate(plan, topology, cost).stop
    return total_ns / 1e9


def narrowest_degree(longest: int, cost: CostModel) -> int:
    """Return the narrowest degree that holds `longest` tokens: what one degree for a run needs."""
    for degree in static_degrees(CLUSTER):
        tokens_per_rank = -(-longest // degree)  # rounded up
        if tokens_per_rank <= cost.max_tokens_per_rank(64):
            return degree
    raise ValueError(f"no degree holds a sequence of {longest} tokens")


def flexsp_case(case: tuple[str, int, str], batches: int, solved: int) -> dict[str, Any]:
    """Return a case's published speed-ups over one degree for the run, and those simulated here.

    batches: batches drawn for the case. solved: of these, how many FlexSP's MILP plans (7B only).
    """
    model, context, data = case
    cost = PRESETS[f"flexsp-gpt-{model}-a100"]
    longest = min(context * K, CLUSTER.world_size * cost.max_tokens_per_rank(64))
    steps = [batch(SETS[data], longest, 512, seed) for seed in range(batches)]
    degree = narrowest_degree(longest, cost)
    one_degree_s = [
        simulated_s([step], CLUSTER, cost, planner="static", sp_degree=degree) for step in steps
    ]
    flexsp = None
    if model == "7b" and steps[:solved]:
        flexsp_s = simulated_s(steps[:solved], CLUSTER, cost, planner="flexsp")
        flexsp = sum(one_degree_s[:solved]) / flexsp_s
    published_flexsp, published_batch_ada = PUBLISHED[case]
    return {
        "case": f"{model}, {context}K, {data}",
        "batch_ada_published": published_batch_ada,
        "batch_ada": sum(one_degree_s) / simulated_s(steps, CLUSTER, cost, planner="batch-ada"),
        "flexsp_published": published_flexsp,
        "flexsp": flexsp,
        "auto": sum(one_degree_s) / simulated_s(steps, CLUSTER, cost, planner="auto"),
    }


def zeppelin_case(name: str, nodes: int, draws: int) -> dict[str, Any]:
    """Return the speed-ups of Zeppelin's and of the default planner over one ring for all."""
    cost = without_constants(PRESETS[f"llama-3.1-8b-{name}"])
    topology = Topology(nodes=nodes, ranks_per_node=8)
    tokens = topology.world_size * TOKENS_PER_RANK
    steps = [trace(tokens, 64 * K, seed) for seed in range(draws)]
    one_ring = {"planner": "static", "sp_degree": topology.world_size, "strategy": "zigzag"}
    even_s = simulated_s(steps, topology, cost, **one_ring)
    return {
        "case": f"{name}, {nodes}x8",
        "zeppelin": even_s / simulated_s(steps, topology, cost, planner="zeppelin"),
        "auto": even_s / simulated_s(steps, topology, cost, planner="auto"),
    }


def cells(figures: dict[str, Any]) -> list[str]:
    """Return a case's name and speed-ups as the cells of a row."""
    row = [figures["case"]]
    for name, value in figures.items():
        if name != "case":
            row.append("-" if value is None else f"{value:.2f}")
    return row


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=8, help="of each case")
    parser.add_argument(
        "--flexsp",
        type=int,
        default=8,
        help="batches of each 7B case that FlexSP's planner solves",
    )
    asked = parser.parse_args()
    print(f"published_speedups.py --batches {asked.batches} --flexsp {asked.flexsp}")
    print(f"simulated, not measured; planned on {machine('numpy')}")

    print("\nOver one degree for the whole run:\n")
    flexsp = [flexsp_case(case, asked.batches, asked.flexsp) for case in PUBLISHED]
    print(table(FLEXSP_COLUMNS, map(cells, flexsp)))

    print("\nOver one ring over all ranks (Zeppelin, published average: 2.80):\n")
    zeppelin = []
    for name in ("a800", "h200"):
        for nodes in (2, 4, 8):
            zeppelin.append(zeppelin_case(name, nodes, asked.batches))
    print(table(ZEPPELIN_COLUMNS, map(cells, zeppelin)))
    write_record(asked.json, {"over_one_degree": flexsp, "over_one_ring": zeppelin})


if __name__ == "__main__":
    main()
