"""How many bytes the ranks of a node receive in the forward of one attention layer, for packed
documents.

    python scripts/bench_bytes.py [--draws 20]

64K tokens on 8 ranks: documents of at most 16K from the histogram in data/, the last one cut;
hidden width 4096, keys and values 1024 wide each, 16 bits (Llama-3.1-8B). Bytes follow from the
schedules that the engine obeys; the tests count the same on the wire
(tests/attention/test_bytes.py). Costs are those of the preset llama-3.1-8b-a800 without constants.
Imbalance is the busiest rank's attention and linear layers over the mean. The even split gathers
all keys and values on every rank. Nothing is measured.
"""

import argparse
import statistics

import numpy as np
from bench_zones import TOKENS_PER_RANK, trace, without_constants

from hf_flexseq.cost import rank_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, Plan
from hf_flexseq.plan.shard import cuts
from hf_flexseq.planner import make_plan
from hf_flexseq.schedule.attention import attention_schedule
from hf_flexseq.topology import Topology

NODE = Topology(nodes=1, ranks_per_node=8)
COST = without_constants(PRESETS["llama-3.1-8b-a800"])
TOKEN_BYTES = 2 * 1024 * 2  # keys and values


def received(group: Group, lengths: list[int]) -> np.ndarray:
    """Bytes that each rank of a zigzag group receives."""
    total = np.zeros(group.degree)
    if group.degree > 1:
        for cut in cuts("zigzag", tuple(lengths[i] for i in group.sequences), group.degree):
            for step in attention_schedule("zigzag", group.degree, cut.mirrored).calls:
                if step.source != step.worker and cut.tokens(step.queries):
                    total[step.worker] += TOKEN_BYTES * cut.tokens(step.keys)
    return total


def figures(plan: Plan, lengths: list[int]) -> tuple[float, float, float]:
    """Received megabytes of the busiest and of the mean rank, and the imbalance."""
    (micro_batch,) = plan.micro_batches
    moved = np.zeros(NODE.world_size)
    for group in micro_batch.groups:
        moved[group.start : group.stop] += received(group, lengths)
    busy = np.array(rank_ns(COST, micro_batch.groups, lengths, NODE))
    return moved.max() / 1e6, moved.mean() / 1e6, busy.max() / busy.mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=20)
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.draws):
        lengths = trace(NODE.world_size * TOKENS_PER_RANK, 16 * 1024, seed)
        rows.append(figures(make_plan(lengths, NODE, COST, strategy="zigzag"), lengths))
    busiest, mean, imbalance = zip(*rows, strict=True)
    even = (NODE.world_size - 1) * TOKENS_PER_RANK * TOKEN_BYTES / 1e6
    print(f"bench_bytes.py --draws {asked.draws}, counted, not measured\n")
    print("| received, MB | mean draw | worst draw |\n|---|---|---|")
    print(f"| busiest rank | {statistics.mean(busiest):.0f} | {max(busiest):.0f} |")
    print(f"| mean rank | {statistics.mean(mean):.0f} | {max(mean):.0f} |")
    print(f"| even split, every rank | {even:.0f} | {even:.0f} |")
    print(f"\nimbalance: mean {statistics.mean(imbalance):.3f}, worst {max(imbalance):.3f}")


if __name__ == "__main__":
    main()
