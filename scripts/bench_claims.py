"""Published speed-ups beside what the same comparison gives here, simulated under published or
estimated constants.

    python scripts/bench_claims.py [--batches 8] [--flexsp 8]

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

import argparse
from collections.abc import Sequence

from bench_planner import WIKIPEDIA, Draw, K, batch, common_crawl_like, machine
from bench_zones import TOKENS_PER_RANK, trace, without_constants

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.static import static_degrees
from hf_flexseq.simulate import simulate
from hf_flexseq.topology import Topology

CLUSTER = Topology(nodes=8, ranks_per_node=8)
SETS: dict[str, Draw] = {"Wikipedia": WIKIPEDIA, "CommonCrawl": common_crawl_like}
# (model, context, data) -> FlexSP's published speed-up over DeepSpeed, and BatchAda's
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


def seconds(
    batches: Sequence[list[int]], topology: Topology, cost: CostModel, **options: str | int
) -> float:
    """Simulated seconds of all batches."""
    plans = [make_plan(lengths, topology, cost, **options) for lengths in batches]
    return sum(simulate(plan, topology, cost).stop for plan in plans) / 1e9


def flexsp_row(case: tuple[str, int, str], batches: int, solved: int) -> list[str]:
    """A case's published speed-ups over one degree for the run, and those simulated here."""
    model, context, data = case
    cost = PRESETS[f"flexsp-gpt-{model}-a100"]
    longest = min(context * K, CLUSTER.world_size * cost.max_tokens_per_rank(64))
    steps = [batch(SETS[data], longest, 512, seed) for seed in range(batches)]
    degree = next(
        d for d in static_degrees(CLUSTER) if -(-longest // d) <= cost.max_tokens_per_rank(64)
    )
    one = [seconds([step], CLUSTER, cost, planner="static", sp_degree=degree) for step in steps]
    ada, ours = (
        sum(one) / seconds(steps, CLUSTER, cost, planner=p) for p in ("batch-ada", "auto")
    )
    first = steps[:solved] if model == "7b" else []
    theirs = (
        f"{sum(one[:solved]) / seconds(first, CLUSTER, cost, planner='flexsp'):.2f}"
        if first
        else "-"
    )
    published = PUBLISHED[case]
    return [
        f"{model}, {context}K, {data}",
        f"{published[1]:.2f}",
        f"{ada:.2f}",
        f"{published[0]:.2f}",
        theirs,
        f"{ours:.2f}",
    ]


def zeppelin_row(name: str, nodes: int, draws: int) -> list[str]:
    """Speed-ups of the zone partition and of the default planner over one ring for everything."""
    cost, topology = (
        without_constants(PRESETS[f"llama-3.1-8b-{name}"]),
        Topology(nodes=nodes, ranks_per_node=8),
    )
    steps = [trace(topology.world_size * TOKENS_PER_RANK, 64 * K, seed) for seed in range(draws)]
    even = seconds(
        steps, topology, cost, planner="static", sp_degree=topology.world_size, strategy="zigzag"
    )
    zones, ours = (even / seconds(steps, topology, cost, planner=p) for p in ("zeppelin", "auto"))
    return [f"{name}, {nodes}x8", f"{zones:.2f}", f"{ours:.2f}"]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=8, help="of each case")
    parser.add_argument(
        "--flexsp",
        type=int,
        default=8,
        help="batches of each 7B case that FlexSP's planner solves",
    )
    asked = parser.parse_args()
    print(f"bench_claims.py --batches {asked.batches} --flexsp {asked.flexsp}")
    print(f"simulated, not measured; planned on {machine()}")
    table(
        "Over one degree for the whole run:",
        (
            "GPT, context, data",
            "BatchAda, published",
            "simulated",
            "FlexSP, published",
            "simulated",
            "auto, simulated",
        ),
        [flexsp_row(case, asked.batches, asked.flexsp) for case in PUBLISHED],
    )
    table(
        "Over one ring over all ranks (Zeppelin, published average: 2.80):",
        ("cluster, nodes", "zeppelin, simulated", "auto, simulated"),
        [
            zeppelin_row(name, nodes, asked.batches)
            for name in ("a800", "h200")
            for nodes in (2, 4, 8)
        ],
    )


if __name__ == "__main__":
    main()
