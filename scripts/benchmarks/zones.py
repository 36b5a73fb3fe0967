"""Simulated: how far from evenly spread work each planner ends, on traces of one micro-batch.

    python scripts/benchmarks/zones.py
    python scripts/benchmarks/zones.py --draws 2

A trace is drawn document after document from the histogram in data/ until 8K tokens per rank are
there; the last document is cut. Costs are those of Llama-3.1-8B on nodes of eight A800 or H200
(presets llama-3.1-8b-a800 and -h200) without the constants of micro-batches and groups, so that
what is left is attention, linear layers and transfers. Ideal is attention and linear layers,
without any transfer, spread evenly over all ranks. Nothing here is measured.

Each cell is the mean over the draws of time over ideal: of the closed form, and of the event
simulation, in which ranks meet in every layer. "even" is one zigzag ring over all ranks for
everything.
"""

import statistics
from dataclasses import replace
from typing import Any

from common import argument_parser, machine, table_head, table_row, write_record
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.simulate import simulate
from hf_flexseq.topology import Topology
from lengths import K, trace

# (nodes of eight ranks, tokens of the longest document)
SETTINGS = ((1, 16 * K), (1, 64 * K), (2, 32 * K), (4, 64 * K))
PLANNERS = ("auto", "zeppelin", "megatron", "even")
TOKENS_PER_RANK = 8 * K


def without_constants(cost: CostModel) -> CostModel:
    """Return the cost model with attention, linear layers and transfers alone."""
    return replace(cost, micro_batch_s=0.0, group_s=0.0, launch_s=0.0, post_s=0.0)


def over_ideal(
    lengths: list[int], topology: Topology, cost: CostModel, planner: str
) -> tuple[float, float]:
    """Return the seconds of the closed form and of the simulation, each over the ideal ones."""
    options: dict[str, Any] = {"planner": planner}
    if planner == "even":
        options = {"planner": "static", "sp_degree": topology.world_size, "strategy": "zigzag"}
    plan = make_plan(lengths, topology, cost, **options)
    work_s = sum(cost.attention_s * n * n + cost.linear_s * n for n in lengths)
    ideal_s = work_s / topology.world_size
    simulated_s = simulate(plan, topology, cost).stop / 1e9
    return plan.objective_s / ideal_s, simulated_s / ideal_s


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--draws", type=int, default=40, help="traces of each setting")
    asked = parser.parse_args()
    print(
        f"zones.py --draws {asked.draws}, simulated, not measured; planned on {machine('numpy')}\n"
    )
    headings = [f"{planner}: closed, simulated" for planner in PLANNERS]
    print(table_head(["cluster", "nodes", "longest document", *headings]))
    figures = []
    for name in ("a800", "h200"):
        cost = without_constants(PRESETS[f"llama-3.1-8b-{name}"])
        for nodes, longest in SETTINGS:
            topology = Topology(nodes=nodes, ranks_per_node=8)
            tokens = topology.world_size * TOKENS_PER_RANK
            traces = [trace(tokens, longest, seed) for seed in range(asked.draws)]
            cells = []
            for planner in PLANNERS:
                pairs = [over_ideal(lengths, topology, cost, planner) for lengths in traces]
                closed = statistics.mean(pair[0] for pair in pairs)
                simulated = statistics.mean(pair[1] for pair in pairs)
                cells.append(f"{closed:.3f}, {simulated:.3f}")
                figures.append(
                    {
                        "cluster": name,
                        "nodes": nodes,
                        "longest_tokens": longest,
                        "planner": planner,
                        "closed_and_simulated_over_ideal": pairs,
                    }
                )
            print(table_row([name, f"{nodes}x8", f"{longest // K}K", *cells]), flush=True)
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
