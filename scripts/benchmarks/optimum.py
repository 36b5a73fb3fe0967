"""How far the default planner is from the optimum, on random small cases.

    python scripts/benchmarks/optimum.py --cases 1000

One to ten sequences of 256 tokens to 32K (log-uniform) on two to eight ranks in one or two nodes,
with memory for one to three micro-batches; costs of the preset flexsp-gpt-7b-a100 with a constant
of 0.05 s, which leaves more of the seconds to the plan. The optimum is that of
tests/planner/exact.py: where memory is tight it is a bound only, so the true distance is at most
the one printed.
"""

import random
import sys
from dataclasses import replace

import numpy as np

from common import ROOT, argument_parser, table, write_record
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology

sys.path.append(str(ROOT / "tests"))

from planner.exact import least_lockstep_ns

COST = replace(load_cost_model("flexsp-gpt-7b-a100"), micro_batch_s=0.05)
# (nodes, ranks per node)
SHAPES = ((1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 1), (2, 2), (2, 3), (2, 4))
MICRO_BATCHES = (0.6, 0.9, 1.8, 2.7)  # of which memory for about so many is given


def case(seed: int) -> tuple[Topology, list[int], int]:
    """Return a topology, lengths, and tokens per rank: plenty for odd seeds, tight for even."""
    rng = random.Random(seed)
    nodes, ranks = rng.choice(SHAPES)
    topology = Topology(nodes=nodes, ranks_per_node=ranks)
    lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(1, 10))]
    if seed % 2:
        return topology, lengths, sum(lengths)
    longest_fits = max(lengths) / topology.world_size + 1
    even_share = sum(lengths) / topology.world_size
    cap = int(max(longest_fits, even_share / rng.choice(MICRO_BATCHES)))
    return topology, lengths, cap


def over_optimum(seed: int) -> float:
    """Return the seconds of the default plan over the least possible ones."""
    topology, lengths, cap = case(seed)
    plan = make_plan(lengths, topology, COST, max_tokens_per_rank=cap, remap="off")
    least_s = least_lockstep_ns(lengths, topology, COST, cap=cap) / 1e9
    return plan.objective_s / least_s


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="half of them with tight memory")
    asked = parser.parse_args()
    found = np.array([over_optimum(seed) for seed in range(asked.cases)])
    by_memory = {"plenty": found[1::2], "tight": found[::2]}
    rows = []
    for memory, chosen in by_memory.items():
        rows.append(
            (
                memory,
                len(chosen),
                f"{chosen.mean():.4f}",
                f"{np.percentile(chosen, 95):.3f}",
                f"{chosen.max():.3f}",
                f"{(chosen < 1.000001).mean():.0%}",
            )
        )
    columns = ("memory", "cases", "over the optimum, mean", "p95", "worst", "equal to it")
    print(table(columns, rows))
    figures = {memory: chosen.tolist() for memory, chosen in by_memory.items()}
    write_record(asked.json, {"over_optimum": figures})


if __name__ == "__main__":
    main()
