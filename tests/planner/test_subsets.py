"""The search over subsets: the optimum where memory is plenty, legal and close where it is not."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan, check
from hf_flexseq.planner.problem import Problem, make_problem, micro_batches_of
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled
from hf_flexseq.planner.search.subsets import least_of_few
from hf_flexseq.topology import Topology
from planner.brute import best_lockstep_ns

MODEL = replace(PRESETS["flexsp-gpt-7b-a100"], micro_batch_s=0.05)


def few(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(8, 15)) for _ in range(count)]


def problem(lengths: list[int], topology: Topology, cap: int, sync: str = "lockstep") -> Problem:
    return make_problem(lengths, topology, MODEL, strategy="auto", cap=cap, sync=sync)


def verify(asked: Problem, found: Filled, lengths: list[int]) -> None:
    """Check that a plan is legal, within memory, and as long as it says."""
    made = micro_batches_of(asked, found.row2block.tolist(), found.row2batch.tolist())
    nanoseconds = step_ns(MODEL, made, lengths, asked.topology, sync="lockstep")
    assert nanoseconds == found.objective
    plan = Plan(
        lengths=tuple(lengths),
        micro_batches=made,
        objective_s=nanoseconds / 1e9,
        lower_bound_s=0.0,
        planner="auto",
        planning_s=0.0,
    )
    check(plan, asked.topology, asked.cap)


@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (1, 4), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_where_memory_is_plenty(shape: tuple[int, int], seed: int) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    count = 5 if shape[1] < 4 else 4
    lengths = few(seed, count)
    asked = problem(lengths, topology, sum(lengths))
    found, surely = least_of_few(asked)
    assert found is not None
    assert surely
    assert found.objective == best_lockstep_ns(
        lengths, topology, MODEL, cap=sum(lengths), batches=2
    )
    verify(asked, found, lengths)


@pytest.mark.parametrize("fill", [0.5, 0.8, 0.9, 1.8])
@pytest.mark.parametrize("seed", range(5))
def test_close_to_brute_force_where_memory_is_tight(fill: float, seed: int) -> None:
    topology = Topology(nodes=1, ranks_per_node=3)
    lengths = few(seed, 4)
    cap = int(max(max(lengths) / 3 + 1, sum(lengths) / 3 / fill))
    asked = problem(lengths, topology, cap)
    found, surely = least_of_few(asked)
    assert found is not None
    verify(asked, found, lengths)
    exact = best_lockstep_ns(lengths, topology, MODEL, cap=cap, batches=3)
    most = exact if surely else 1.03 * exact
    assert exact <= found.objective <= most


@pytest.mark.parametrize("shape", [(1, 8), (2, 6), (3, 2), (6, 8)])
def test_legal_on_any_topology(shape: tuple[int, int]) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    for seed in range(3):
        lengths = few(seed, 7)
        plenty = sum(lengths)
        tight = int(max(max(lengths) / topology.world_size + 1, sum(lengths) / 3))
        for cap in (plenty, tight):
            asked = problem(lengths, topology, cap)
            found, _ = least_of_few(asked)
            if found:
                verify(asked, found, lengths)


def test_what_memory_forbids_is_not_called_the_optimum() -> None:
    """Two ranks: what were fastest if all ranks had memory for it, they have not."""
    lengths = [1261, 917, 370, 258]
    topology = Topology(nodes=2, ranks_per_node=1)
    fastest, surely = least_of_few(problem(lengths, topology, sum(lengths)))
    tight, still = least_of_few(problem(lengths, topology, 779))
    assert fastest is not None
    assert tight is not None
    assert (surely, still) == (True, False)
    assert tight.objective > fastest.objective
    assert tight.tokens.max() <= 779 < fastest.tokens.max()


@pytest.mark.parametrize(
    ("count", "sync"), [(EFFORT.subset_sequences + 1, "lockstep"), (3, "free")]
)
def test_not_for_many_sequences_nor_free_ranks(count: int, sync: str) -> None:
    lengths = few(0, count)
    asked = problem(lengths, Topology(nodes=1, ranks_per_node=4), sum(lengths), sync)
    assert least_of_few(asked) == (None, False)
