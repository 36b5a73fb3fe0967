"""Traces of one micro-batch on one to four nodes: how far from evenly spread work each planner
ends.

    python scripts/bench_zones.py [--draws 40]

A trace is drawn document after document from the histogram in data/ until 8K tokens per rank are
there; the last one is cut. Costs are those of Llama-3.1-8B on nodes of eight A800 or H200 (presets
llama-3.1-8b-a800 and -h200) without the constants of micro-batches and groups, so that what is
left is attention, linear layers and transfers. Ideal is attention and linear layers, without any
transfer, spread evenly over all ranks. Nothing here is measured.

Each cell is the mean over the draws of time over ideal: of the closed form, and of the event
simulation, in which ranks meet in every layer. "even" is one zigzag ring over all ranks for
everything.
"""

import argparse
import random
import statistics
from dataclasses import replace

from bench_planner import DOCUMENTS, K, machine

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.simulate import simulate
from hf_flexseq.topology import Topology

# nodes of eight ranks, longest document
SETTINGS = ((1, 16 * K), (1, 64 * K), (2, 32 * K), (4, 64 * K))
PLANNERS = ("auto", "zeppelin", "megatron", "even")
TOKENS_PER_RANK = 8 * K


def trace(tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths of documents that add up to `tokens`."""
    rng, lengths = random.Random(seed), []
    while (left := tokens - sum(lengths)) > 0:
        if (length := DOCUMENTS(rng)) <= longest:
            lengths.append(min(length, left))
    return lengths


def without_constants(cost: CostModel) -> CostModel:
    return replace(cost, micro_batch_s=0.0, group_s=0.0)


def over_ideal(
    lengths: list[int], topology: Topology, cost: CostModel, planner: str
) -> tuple[float, float]:
    """Seconds of the closed form and of the simulation, over the ideal ones."""
    options = {"planner": planner}
    if planner == "even":
        options = {"planner": "static", "sp_degree": topology.world_size, "strategy": "zigzag"}
    plan = make_plan(lengths, topology, cost, **options)
    ideal = (
        sum(cost.attention_s * s * s + cost.linear_s * s for s in lengths) / topology.world_size
    )
    return plan.objective_s / ideal, simulate(plan, topology, cost).stop / 1e9 / ideal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=40)
    asked = parser.parse_args()
    print(
        f"bench_zones.py --draws {asked.draws}, simulated, not measured; planned on {machine()}\n"
    )
    print(
        "| cluster | nodes | longest document |",
        " | ".join(f"{p}: closed, simulated" for p in PLANNERS),
        "|",
    )
    print("|---|---|---|" + "---|" * len(PLANNERS))
    for name in ("a800", "h200"):
        cost = without_constants(PRESETS[f"llama-3.1-8b-{name}"])
        for nodes, longest in SETTINGS:
            topology = Topology(nodes=nodes, ranks_per_node=8)
            traces = [
                trace(topology.world_size * TOKENS_PER_RANK, longest, seed)
                for seed in range(asked.draws)
            ]
            cells = []
            for planner in PLANNERS:
                pairs = [over_ideal(lengths, topology, cost, planner) for lengths in traces]
                cells.append(
                    ", ".join(
                        f"{statistics.mean(ratios):.3f}" for ratios in zip(*pairs, strict=True)
                    )
                )
            print(f"| {name} | {nodes}x8 | {longest // K}K |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
