"""make_plan on special batches: close to its bound, with notes, refused with a remedy, and the
same on every run; and the order of its micro-batches."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import MicroBatch, PlanInfeasible
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.order import communication_first
from tests.plans import group, planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
H200 = PRESETS["llama-3.1-8b-h200"]
CLUSTER = Topology(nodes=8, ranks_per_node=8)
PAIR = Topology(nodes=1, ranks_per_node=2)
CAP = {"max_tokens_per_rank": 20_000}


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([380_000], id="giant"),
        pytest.param([200_000] + [500] * 63, id="giant and short"),
        pytest.param([4096] * 512, id="equal"),
        pytest.param([5951] * 64, id="one full micro-batch"),
        pytest.param([1] * 3, id="fewer than ranks"),
        pytest.param([150_000, 140_000] + [1000] * 200, id="two"),
    ],
)
@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_no_single_degree_beats_it_by_a_percent_on_64_ranks(lengths, sync):
    plan = planned(lengths, CLUSTER, FLEXSP, sync=sync)
    for degree in CLUSTER.degrees():
        if max(lengths) <= 5951 * degree:
            options = {"planner": "static", "sp_degree": degree, "sync": sync}
            static = planned(lengths, CLUSTER, FLEXSP, **options)
            assert plan.objective_s <= 1.01 * static.objective_s


# ---- arguments


def test_no_sequences_make_an_empty_plan():
    plan = make_plan([], CLUSTER, FLEXSP)
    assert (plan.micro_batches, plan.objective_s, plan.lower_bound_s, plan.notes) == ((), 0, 0, ())


def test_lengths_may_be_numpy_integers():
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
        ([4], {"planner": "static", "sp_degree": 3}, "choose one of 1, 2, 4, 8, 16, 32, 64"),
        ([4], {"planner": "static", "sp_degree": 2, "strategy": "local"}, "never splits"),
        ([4], {"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
        ([4], {"strategy": "zigzag"}, "no ring_bytes"),
    ],
)
def test_arguments_without_meaning_are_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        planned(lengths, CLUSTER, FLEXSP, **options)


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
            r"390000 on each of 1 ranks.*to 390000, let up to 64 ranks",
        ),
        ({"planner": "batch-rebalance"}, r"390000 on each of 1 ranks"),
        ({"planner": "static", "sp_degree": 8}, r"48750 on each of 8 ranks"),
    ],
)
def test_infeasible_sequences_are_named(options, message):
    with pytest.raises(PlanInfeasible, match=message):
        planned([4, 390_000, 7], CLUSTER, FLEXSP, **options)


# ---- determinism


PRINT_DIGESTS = """
import random, sys
from hf_flexseq.planner import make_plan
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.options import PlanOptions
import hf_flexseq.planner.process.worker
assert not {"torch", "transformers", "accelerate", "datasets", "highspy"} & set(sys.modules)
rng = random.Random(0)
for nodes, ranks in ((8, 8), (1, 6)):
    topology = Topology(nodes=nodes, ranks_per_node=ranks)
    lengths = [int(rng.lognormvariate(6.9, 1.5)) + 1 for _ in range(128)]
    for sync in ("lockstep", "free"):
        options = PlanOptions(max_tokens_per_rank=20000, sync=sync)
        print(make_plan(lengths, topology, PRESETS["flexsp-gpt-7b-a100"], options).digest())
"""


@pytest.mark.processes
def test_the_hash_seed_does_not_matter_and_planning_needs_no_torch():
    digests = set()
    for seed in ("0", "4242"):
        path = os.pathsep.join(p for p in sys.path if p)
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", PRINT_DIGESTS]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        digests.add(done.stdout)
    assert len(digests) == 1
    assert len(digests.pop().split()) == 4


# ---- notes


def test_a_note_compares_the_seconds_of_a_chosen_degree():
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


# ---- the order of micro-batches


def micro_batch(*, shared: int | None = None, first: int | None = None, second: int | None = None):
    """A sequence of both ranks, and of each of them alone."""
    places = (((0, 2), shared), ((0, 1), first), ((1, 2), second))
    return MicroBatch(groups=tuple(group(*ranks, one) for ranks, one in places if one is not None))


def test_rings_have_to_be_faster_than_ulysses_by_more_than_a_percent():
    """A sequence on a node of eight ranks, whose ring takes 0.5 % or 2 % less than Ulysses."""
    node = Topology(nodes=1, ranks_per_node=8)
    plain = replace(H200, group_s=0.0, group_rank_s=0.0, heads=None, kernel=None, pass_s=0.0)
    once, twice = plain.all_to_all_bytes, 2 * plain.all_to_all_bytes
    ulysses = [
        replace(plain, all_to_all_bytes=one).sequence_ns(150_000, 8, "ulysses", False)
        for one in (once, twice)
    ]
    ring = plain.sequence_ns(150_000, 8, "zigzag", False)
    for gain, name in ((1.005, "ulysses"), (1.02, "zigzag")):
        share = (gain * ring - ulysses[0]) / (ulysses[1] - ulysses[0])
        cost = replace(plain, all_to_all_bytes=once * (1 + share))
        plan = planned([150_000], node, cost, **CAP)
        assert [group.strategy for one in plan.micro_batches for group in one.groups] == [name]


def test_what_communicates_most_comes_first():
    lengths = (8000, 3000, 900, 4000, 4000, 500)
    whole, mixed = micro_batch(shared=0), micro_batch(shared=1, first=2)
    local, small = micro_batch(first=3, second=4), micro_batch(second=5)
    made = communication_first((local, mixed, small, whole), lengths)
    assert made == (whole, mixed, small, local)


def test_free_ranks_wait_less_when_what_they_do_alone_comes_last():
    """3,000 tokens more on rank 0, then as many on rank 1: between shared sequences each has to
    wait."""
    lengths = (8000, 3000, 8000, 3000)
    whole, other = micro_batch(shared=0), micro_batch(shared=2)
    first, second = micro_batch(first=1), micro_batch(second=3)
    given = (first, whole, second, other)
    made = communication_first(given, lengths)
    assert made == (whole, other, first, second)
    after, before = (step_ns(FLEXSP, one, lengths, PAIR, sync="free") for one in (made, given))
    assert after < before
