"""make_plan: legal, within memory, never below the bound, close to brute force, and the same on
every run."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan, PlanInfeasible, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.bound import bound_ns
from planner.brute import best_lockstep_ns
from tests.budget import examples
from tests.planner.small_model import rings

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
CLUSTER = Topology(nodes=8, ranks_per_node=8)
ROOMY = {"max_tokens_per_rank": 100_000}
TOPOLOGIES = [
    (1, 1),
    (1, 2),
    (1, 3),
    (1, 5),
    (1, 6),
    (1, 7),
    (1, 8),
    (1, 12),
    (2, 1),
    (2, 2),
    (3, 2),
    (2, 6),
    (3, 4),
    (4, 8),
]


def long_tailed(count: int, seed: int, limit: int) -> list[int]:
    rng = random.Random(seed)
    return [min(limit, int(rng.lognormvariate(6.9, 1.75)) + 1) for _ in range(count)]


def verify(
    plan: Plan, topology: Topology, cost: CostModel, *, cap: int, sync: str = "lockstep"
) -> None:
    check(plan, topology, cap)
    assert (
        plan.objective_s
        == step_ns(cost, plan.micro_batches, plan.lengths, topology, sync=sync) / 1e9
    )
    assert plan.lower_bound_s <= plan.objective_s


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(["auto", "ulysses", "zigzag", "balanced", "hybrid", "local"]),
    st.sampled_from(["lockstep", "free"]),
    st.integers(0, 20_000),
)
def test_any_lengths_on_any_topology(
    lengths: list[int], shape: tuple[int, int], strategy: str, sync: str, spare: int
) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    widest = 1 if strategy == "local" else topology.world_size
    cap = -(-max(lengths) // widest) + spare
    cost = rings(topology)
    plan = make_plan(
        lengths, topology, cost, PlanOptions(strategy=strategy, max_tokens_per_rank=cap, sync=sync)
    )
    verify(plan, topology, cost, cap=cap, sync=sync)
    used = {g.strategy for mb in plan.micro_batches for g in mb.groups}
    assert strategy == "auto" or used <= {"local", strategy}


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    st.sampled_from(TOPOLOGIES),
    st.data(),
)
def test_static_plans_use_one_degree(
    lengths: list[int], shape: tuple[int, int], data: st.DataObject
) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    degree = data.draw(st.sampled_from(topology.degrees()))
    cap = -(-max(lengths) // degree) + data.draw(st.integers(0, 10_000))
    cost = rings(topology)
    plan = make_plan(
        lengths,
        topology,
        cost,
        PlanOptions(planner="static", sp_degree=degree, max_tokens_per_rank=cap),
    )
    verify(plan, topology, cost, cap=cap)
    assert set(plan.degrees()) == {degree}
    assert len(plan.micro_batches) <= 2 * -(-sum(lengths) // (cap * topology.world_size)) + 1


def test_within_1_percent_of_brute_force() -> None:
    over = []
    for seed in range(30):
        rng = random.Random(seed)
        nodes, ranks = rng.choice(((1, 2), (1, 3), (1, 4), (2, 2)))
        topology = Topology(nodes=nodes, ranks_per_node=ranks)
        world = topology.world_size
        cost = rng.choice([replace(FLEXSP, micro_batch_s=0.05), rings(topology)])
        count = rng.randint(1, 5 if world < 4 else 4)
        lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(count)]
        fill = rng.choice([0.6, 0.9, 1.8])
        cap = int(max(max(lengths) / world + 1, sum(lengths) / world / fill))
        exact_s = best_lockstep_ns(lengths, topology, cost, cap=cap, batches=2) / 1e9
        plan = make_plan(lengths, topology, cost, PlanOptions(max_tokens_per_rank=cap))
        assert plan.lower_bound_s <= exact_s
        if len(plan.micro_batches) <= 2:
            assert exact_s <= plan.objective_s
            over.append(plan.objective_s / exact_s)
    assert sum(over) / len(over) <= 1.01
    assert max(over) <= 1.16


@pytest.mark.parametrize(
    "lengths",
    [
        [380_000],
        [200_000] + [500] * 63,
        [4096] * 512,
        [5951] * 64,
        [1],
        [1] * 3,
        [7000] * 40,
        [150_000, 140_000] + [1000] * 200,
    ],
    ids=[
        "giant",
        "giant and short",
        "equal",
        "one full micro-batch",
        "one token",
        "fewer than ranks",
        "middling",
        "two",
    ],
)
@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_special_batches_on_64_ranks(lengths: list[int], sync: str) -> None:
    plan = make_plan(lengths, CLUSTER, FLEXSP, PlanOptions(sync=sync))
    verify(plan, CLUSTER, FLEXSP, cap=5951, sync=sync)
    for degree in CLUSTER.degrees():
        if max(lengths) <= 5951 * degree:
            fixed = make_plan(
                lengths,
                CLUSTER,
                FLEXSP,
                PlanOptions(planner="static", sp_degree=degree, sync=sync),
            )
            assert plan.objective_s <= fixed.objective_s


@pytest.mark.parametrize("fill", [0.9, 0.95, 0.99])
def test_memory_nearly_full(fill: float) -> None:
    lengths = long_tailed(256, seed=3, limit=300_000)
    cap = int(sum(lengths) / 64 / 2 / fill) + 1
    plan = make_plan(lengths, CLUSTER, FLEXSP, PlanOptions(max_tokens_per_rank=cap))
    verify(plan, CLUSTER, FLEXSP, cap=cap)
    assert len(plan.micro_batches) <= (2 if fill < 0.97 else 3)


def test_near_the_lower_bound_on_long_tailed_batches() -> None:
    plans = [make_plan(long_tailed(512, seed, 300_000), CLUSTER, FLEXSP) for seed in range(3)]
    assert np.mean([plan.objective_s / plan.lower_bound_s for plan in plans]) < 1.07


def test_the_bound_by_hand() -> None:
    """Two sequences on two ranks of one node; the long one needs both."""
    node, cost = Topology(nodes=1, ranks_per_node=2), replace(FLEXSP, micro_batch_s=1.0)
    areas = cost.sequence_ns(100, 1, "local", False) + 2 * cost.sequence_ns(
        3000, 2, "ulysses", False
    )
    lengths = np.array([100, 3000])
    bound = {
        sync: bound_ns(lengths, node, cost, strategy="auto", cap=1500, sync=sync)
        for sync in ("lockstep", "free")
    }
    assert bound == {"lockstep": -(-areas // 2) + 2 * 10**9, "free": -(-(areas + 3 * 10**9) // 2)}
    roomy = bound_ns(lengths, node, cost, strategy="auto", cap=3000, sync="free")
    alone = sum(cost.sequence_ns(s, 1, "local", False) for s in (100, 3000))
    assert roomy == -(-alone // 2) + 10**9


# ---- arguments


def test_no_sequences_make_an_empty_plan() -> None:
    plan = make_plan([], CLUSTER, FLEXSP)
    assert plan.micro_batches == ()
    assert plan.objective_s == plan.lower_bound_s == 0


def test_lengths_may_be_numpy_integers() -> None:
    assert make_plan(np.array([5, 6]), CLUSTER, FLEXSP).to_json()
    with pytest.raises(TypeError):
        make_plan([1.5], CLUSTER, FLEXSP)


@pytest.mark.parametrize(
    "lengths, options, message",
    [
        ([4, 0], {}, "sequence 1 has length 0"),
        ([4], {"planner": "milp"}, "planner must be one of auto, .*; got 'milp'"),
        ([4], {"strategy": "cyclic"}, "strategy must be one of auto, .*; got 'cyclic'"),
        ([4], {"sync": "auto"}, "sync must be one of lockstep, free; got 'auto'"),
        ([4], {"sp_degree": 2}, "needs planner='static', got planner='auto'"),
        ([4], {"planner": "static"}, "needs sp_degree"),
        ([4], {"planner": "static", "sp_degree": 3}, "does not divide 8 nodes of 8 ranks"),
        ([4], {"planner": "static", "sp_degree": 2, "strategy": "local"}, "never splits"),
        ([4], {"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
        ([4], {"strategy": "zigzag"}, "no ring_bytes"),
    ],
)
def test_refuses_arguments_without_meaning(
    lengths: list[int], options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(lengths, CLUSTER, FLEXSP, PlanOptions(**options))


def test_static_degrees_follow_the_nodes() -> None:
    assert Topology(nodes=3, ranks_per_node=4).degrees() == [1, 2, 4, 12]
    with pytest.raises(ValueError, match="choose one of 1, 2, 4, 12"):
        make_plan(
            [4],
            Topology(nodes=3, ranks_per_node=4),
            FLEXSP,
            PlanOptions(planner="static", sp_degree=6),
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {},
            r"sequence 1 has 390000 tokens: 6094 on each of 64 ranks.*=5951\. Raise "
            r"max_tokens_per_rank to 6094, ",
        ),
        (
            {"strategy": "local"},
            r"390000 on each of 1 ranks.*Raise max_tokens_per_rank to 390000, "
            r"let up to 64 ranks",
        ),
        ({"planner": "static", "sp_degree": 8}, r"48750 on each of 8 ranks"),
    ],
)
def test_infeasible_sequences_are_named(options: dict, message: str) -> None:
    with pytest.raises(PlanInfeasible, match=message):
        make_plan([4, 390_000, 7], CLUSTER, FLEXSP, PlanOptions(**options))


# ---- determinism


PRINT_DIGESTS = """
import random
from hf_flexseq.planner import make_plan
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.options import PlanOptions
rng = random.Random(0)
for nodes, ranks in ((8, 8), (1, 6)):
    topology = Topology(nodes=nodes, ranks_per_node=ranks)
    lengths = [int(rng.lognormvariate(6.9, 1.5)) + 1 for _ in range(128)]
    for sync in ("lockstep", "free"):
        cost = PRESETS["flexsp-gpt-7b-a100"]
        options = PlanOptions(max_tokens_per_rank=20000, sync=sync)
        plan = make_plan(lengths, topology, cost, options)
        print(plan.digest())
"""


@pytest.mark.processes
def test_the_hash_seed_does_not_matter() -> None:
    def digests(seed: str) -> str:
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        return subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert digests("0") == digests("4242") != ""


@pytest.mark.processes
def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, hf_flexseq.planner.process.worker; "
        "print({m.split('.')[0] for m in sys.modules})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert not {"torch", "transformers", "accelerate", "datasets", "pulp"} & eval(loaded.stdout)


def test_a_note_says_that_memory_forces_a_degree() -> None:
    plan = make_plan([80_000, *[500] * 40], CLUSTER, FLEXSP, PlanOptions(planner="zeppelin"))
    assert max(plan.degrees()) == 16
    assert plan.notes == (
        "degree 16 for sequence 0 (80,000 tokens): the fewest ranks with enough memory",
    )


def test_a_note_compares_the_seconds_of_a_chosen_degree() -> None:
    plan = make_plan([20_000, *[500] * 100], CLUSTER, FLEXSP)
    degree = max(plan.degrees())
    assert degree > 4
    fewest = FLEXSP.sequence_ns(20_000, 4, "ulysses", spans_nodes=False) / 1e9
    chosen = FLEXSP.sequence_ns(20_000, degree, "ulysses", spans_nodes=degree > 8) / 1e9
    (note,) = plan.notes
    assert note.startswith(
        f"degree {degree} for sequence 0 (20,000 tokens, fits on 4): {chosen:.3g} s, "
    )
    assert f"{fewest:.3g} s on 4" in note


def test_notes_on_degrees_that_were_not_chosen() -> None:
    node = Topology(nodes=1, ranks_per_node=4)
    static = make_plan(
        [500] * 4, node, FLEXSP, PlanOptions(planner="static", sp_degree=2, **ROOMY)
    )
    local = make_plan([500] * 4, node, FLEXSP, PlanOptions(strategy="local", **ROOMY))
    assert static.notes == ("degree 2 for every sequence, set by sp_degree",)
    assert local.notes == ("degree 1 for every sequence",)
    assert make_plan([], node, FLEXSP, PlanOptions(**ROOMY)).notes == ()
