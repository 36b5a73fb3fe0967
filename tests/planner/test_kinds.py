"""Plans of models whose layers read windows."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.kinds import NearLayers
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan

GEMMA = PRESETS["gemma-3-27b-h100"]
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
CAP = 20_000


def lengths_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(150_000, 1 + int(rng.lognormvariate(7.5, 1.75))) for _ in range(40)]


def strategies(plan: Plan) -> set[str]:
    return {group.strategy for one in plan.micro_batches for group in one.groups}


@pytest.mark.parametrize("planner", ["auto", "zeppelin", "megatron", "batch-ada"])
@pytest.mark.parametrize("sync", ["lockstep", "free"])
@pytest.mark.parametrize("seed", range(2))
def test_every_planner_takes_windows_and_stays_above_the_bound(
    planner: str, sync: str, seed: int
) -> None:
    lengths = lengths_of(seed)
    options = {"planner": planner, "sync": sync, "max_tokens_per_rank": CAP}
    plan = make_plan(lengths, TOPOLOGY, GEMMA, PlanOptions(**options))
    assert plan.lower_bound_s <= plan.objective_s
    priced = step_ns(GEMMA, plan.micro_batches, lengths, TOPOLOGY, sync=sync)
    assert plan.objective_s == priced / 1e9
    assert plan.digest() == make_plan(lengths, TOPOLOGY, GEMMA, PlanOptions(**options)).digest()


@pytest.mark.parametrize("seed", range(3))
def test_windows_that_hold_every_sequence_give_the_plans_of_full_layers(seed: int) -> None:
    lengths = lengths_of(seed)
    full = replace(
        GEMMA, kinds=(), attention_s=1e-9, ring_bytes=None, all_to_all_overlap=0.0, heads=None
    )
    wide = NearLayers(reach=Reach(window=10**6), share=0.5, attention_s=0.5e-9)
    split = replace(full, attention_s=0.5e-9, kinds=(wide,))
    plans = [
        make_plan(lengths, TOPOLOGY, one, PlanOptions(max_tokens_per_rank=CAP))
        for one in (full, split)
    ]
    assert plans[0].objective_s == pytest.approx(plans[1].objective_s, rel=1e-3)


def test_between_nodes_windows_make_a_ring_cheaper_than_exchanges_of_heads() -> None:
    lengths = [120_000, 800]
    by_kind = make_plan(lengths, TOPOLOGY, GEMMA, PlanOptions(max_tokens_per_rank=CAP))
    all_bytes = replace(GEMMA, kinds=())
    without = make_plan(lengths, TOPOLOGY, all_bytes, PlanOptions(max_tokens_per_rank=CAP))
    assert "zigzag" in strategies(by_kind)
    assert strategies(without) & {"ulysses", "hybrid"}
