"""Counted: bytes that the ranks of a node receive in the forward of one layer's attention.

    python scripts/benchmarks/received_bytes.py [--draws 20]

64K tokens on 8 ranks: documents of at most 16K from the histogram in data/, the last one cut;
hidden width 4096, keys and values 1024 wide each, 16 bits (Llama-3.1-8B). Bytes follow from the
schedules that the engine obeys; the tests count the same on the wire
(tests/attention/test_bytes.py). Costs are those of the preset llama-3.1-8b-a800 without constants.
Imbalance is the busiest rank's attention and linear layers over the mean. The even split gathers
all keys and values on every rank. Nothing is measured.
"""

import statistics

import numpy as np

from common import argument_parser, table, write_record
from hf_flexseq.cost import rank_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, Plan
from hf_flexseq.plan.shard import cuts
from hf_flexseq.planner import make_plan
from hf_flexseq.schedule.attention import attention_schedule
from hf_flexseq.topology import Topology
from lengths import trace
from zones import TOKENS_PER_RANK, without_constants

NODE = Topology(nodes=1, ranks_per_node=8)
COST = without_constants(PRESETS["llama-3.1-8b-a800"])
LONGEST = 16 * 1024  # tokens of a document
TOKEN_BYTES = 2 * 1024 * 2  # keys and values, 1024 wide each, two bytes an element


def received(group: Group, lengths: list[int]) -> np.ndarray:
    """Return the bytes that each rank of a zigzag group receives, [degree]."""
    total = np.zeros(group.degree)
    if group.degree == 1:
        return total
    for cut in cuts("zigzag", tuple(lengths[i] for i in group.sequences), group.degree):
        for step in attention_schedule("zigzag", group.degree, cut.mirrored).calls:
            is_transfer = step.source != step.worker
            if is_transfer and cut.tokens(step.queries):
                total[step.worker] += TOKEN_BYTES * cut.tokens(step.keys)
    return total


def plan_figures(plan: Plan, lengths: list[int]) -> dict[str, float]:
    """Return the megabytes that the busiest and the mean rank receive, and the imbalance."""
    (micro_batch,) = plan.micro_batches
    moved = np.zeros(NODE.world_size)
    for group in micro_batch.groups:
        moved[group.start : group.stop] += received(group, lengths)
    busy_ns = np.array(rank_ns(COST, micro_batch.groups, lengths, NODE))
    return {
        "busiest_mb": float(moved.max() / 1e6),
        "mean_mb": float(moved.mean() / 1e6),
        "imbalance": float(busy_ns.max() / busy_ns.mean()),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--draws", type=int, default=20, help="micro-batches")
    asked = parser.parse_args()
    figures = []
    for seed in range(asked.draws):
        lengths = trace(NODE.world_size * TOKENS_PER_RANK, LONGEST, seed)
        plan = make_plan(lengths, NODE, COST, strategy="zigzag")
        figures.append(plan_figures(plan, lengths))
    busiest = [draw["busiest_mb"] for draw in figures]
    mean = [draw["mean_mb"] for draw in figures]
    imbalance = [draw["imbalance"] for draw in figures]
    even = (NODE.world_size - 1) * TOKENS_PER_RANK * TOKEN_BYTES / 1e6
    print(f"received_bytes.py --draws {asked.draws}, counted, not measured\n")
    rows = [
        ("busiest rank", f"{statistics.mean(busiest):.0f}", f"{max(busiest):.0f}"),
        ("mean rank", f"{statistics.mean(mean):.0f}", f"{max(mean):.0f}"),
        ("even split, every rank", f"{even:.0f}", f"{even:.0f}"),
    ]
    print(table(("received, MB", "mean draw", "worst draw"), rows))
    print(f"\nimbalance: mean {statistics.mean(imbalance):.3f}, worst {max(imbalance):.3f}")
    write_record(asked.json, {"draws": figures, "even_split_mb": even})


if __name__ == "__main__":
    main()
