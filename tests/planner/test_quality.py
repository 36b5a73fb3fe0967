"""Modelled seconds of plans are those that the default planner has reached before.

python -m tests.planner.test_quality     prints the table again
"""

import math
import random
from itertools import product

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan
from tests.plans import planned

CASES = product(
    (
        "flexsp-gpt-7b-a100",
        "llama-3.1-8b-h200",
        "qwen3-8b-h100",
        "gemma-3-27b-h100",
        "qwen3.5-35b-a3b-h100",
        "qwen3-30b-a3b-ep8-h100",
    ),
    (1, 8),  # nodes of eight ranks
    (0.94, 0.3),  # share of memory that is full
)
SECONDS = {
    ("flexsp-gpt-7b-a100", 1, 0.94): 6.0445,
    ("flexsp-gpt-7b-a100", 1, 0.3): 4.6685,
    ("flexsp-gpt-7b-a100", 8, 0.94): 11.2992,
    ("flexsp-gpt-7b-a100", 8, 0.3): 9.4104,
    ("llama-3.1-8b-h200", 1, 0.94): 5.0544,
    ("llama-3.1-8b-h200", 1, 0.3): 3.0707,
    ("llama-3.1-8b-h200", 8, 0.94): 6.7489,
    ("llama-3.1-8b-h200", 8, 0.3): 4.1185,
    ("qwen3-8b-h100", 1, 0.94): 6.0576,
    ("qwen3-8b-h100", 1, 0.3): 3.7571,
    ("qwen3-8b-h100", 8, 0.94): 7.9641,
    ("qwen3-8b-h100", 8, 0.3): 4.9197,
    ("gemma-3-27b-h100", 1, 0.94): 19.8451,
    ("gemma-3-27b-h100", 1, 0.3): 12.3635,
    ("gemma-3-27b-h100", 8, 0.94): 20.1636,
    ("gemma-3-27b-h100", 8, 0.3): 12.0659,
    ("qwen3.5-35b-a3b-h100", 1, 0.94): 15.1862,
    ("qwen3.5-35b-a3b-h100", 1, 0.3): 5.8398,
    ("qwen3.5-35b-a3b-h100", 8, 0.94): 16.4632,
    ("qwen3.5-35b-a3b-h100", 8, 0.3): 6.4066,
    ("qwen3-30b-a3b-ep8-h100", 1, 0.94): 4.1406,
    ("qwen3-30b-a3b-ep8-h100", 1, 0.3): 2.6434,
    ("qwen3-30b-a3b-ep8-h100", 8, 0.94): 6.8273,
    ("qwen3-30b-a3b-ep8-h100", 8, 0.3): 4.4640,
}


def plan_of(preset: str, nodes: int, fill: float) -> Plan:
    """The plan of long-tailed lengths, three micro-batches where memory is tight."""
    rng = random.Random(nodes)
    limit = 24_000 * nodes
    lengths = [min(limit, int(rng.lognormvariate(7, 1.6)) + 1) for _ in range(32 + 28 * nodes)]
    world = 8 * nodes
    micro_batches = 3 if fill > 0.9 else 1
    cap = math.ceil(max(sum(lengths) / world / micro_batches / fill, max(lengths) / world))
    ranks = Topology(nodes=nodes, ranks_per_node=8)
    return planned(lengths, ranks, PRESETS[preset], max_tokens_per_rank=cap)


@pytest.mark.parametrize("case", SECONDS, ids=str)
def test_plans_take_as_long_as_recorded(case):
    assert plan_of(*case).objective_s == pytest.approx(SECONDS[case], rel=5e-3)


if __name__ == "__main__":
    for case in CASES:
        print(f"    {case}: {plan_of(*case).objective_s:.4f},".replace("'", '"'))
