"""How far the default planner is from the optimum, on random small cases.

    PYTHONPATH=tests python scripts/bench_exact.py --cases 1000

One to ten sequences of 256 tokens to 32K (log-uniform) on two to eight ranks in one or two nodes,
with memory for one to three micro-batches; costs of the preset flexsp-gpt-7b-a100 with a constant
of 0.05 s, which leaves more of the seconds to the plan. The optimum is that of
`tests/planner/exact.py`: where memory is tight it is a bound only, so the true distance is at most
the one printed.
"""

import argparse
import random
from dataclasses import replace

import numpy as np

from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology
from planner.exact import least_lockstep_ns

COST = replace(load_cost_model("flexsp-gpt-7b-a100"), micro_batch_s=0.05)
SHAPES = ((1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 1), (2, 2), (2, 3), (2, 4))


def case(seed: int) -> tuple[Topology, list[int], int]:
    """A topology, lengths, and tokens per rank: plenty in every other case."""
    rng = random.Random(seed)
    nodes, ranks = rng.choice(SHAPES)
    world = nodes * ranks
    lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(1, 10))]
    if seed % 2:
        return Topology(nodes=nodes, ranks_per_node=ranks), lengths, sum(lengths)
    cap = int(
        max(max(lengths) / world + 1, sum(lengths) / world / rng.choice([0.6, 0.9, 1.8, 2.7]))
    )
    return Topology(nodes=nodes, ranks_per_node=ranks), lengths, cap


def ratio(seed: int) -> float:
    topology, lengths, cap = case(seed)
    plan = make_plan(lengths, topology, COST, max_tokens_per_rank=cap, remap="off")
    return plan.objective_s / (least_lockstep_ns(lengths, topology, COST, cap=cap) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    ratios = np.array([ratio(seed) for seed in range(parser.parse_args().cases)])
    print(
        "| memory | cases | over the optimum, mean | p95 | worst | equal to it "
        "|\n|---|---|---|---|---|---|"
    )
    for name, chosen in (("plenty", ratios[1::2]), ("tight", ratios[::2])):
        mean, p95, worst, equal = (
            chosen.mean(),
            np.percentile(chosen, 95),
            chosen.max(),
            (chosen < 1.000001).mean(),
        )
        print(f"| {name} | {len(chosen)} | {mean:.4f} | {p95:.3f} | {worst:.3f} | {equal:.0%} |")


if __name__ == "__main__":
    main()
