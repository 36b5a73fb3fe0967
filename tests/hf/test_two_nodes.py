"""A model on ranks of several nodes equals one process: with the ring of a hybrid group, and with
Zeppelin's passes. Ranks are threads."""

import random

import pytest

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from tests.hf.by_hand import (
    TWO_NODES,
    attach,
    run_plan,
    ways_between_nodes,
)
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.plans import random_plan
from tests.published.zeppelin.always import Always
from tests.ranks import join, run_threads

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]
# What only a group across nodes has, by strategy.
OWN_WAYS = {"hybrid": {"ring of a hybrid"}}


def group(strategy, ranks, *sequences):
    return Group(ranks=tuple(ranks), sequences=sequences, strategy=strategy)


def plan_of(strategy):
    """A group across nodes beside one inside a node and a rank's own sequences; then a micro-batch
    that leaves the second node idle, unless it is remapped."""
    first = (
        group(strategy, range(4), 2, 7, 0, 3),
        group(strategy, range(2), 9, 10),
        group("local", [0], 8),
    )
    second = (group(strategy, range(2), 4, 1), group("local", [0], 11, 5, 6))
    micro_batches = (MicroBatch(groups=first), MicroBatch(groups=second))
    return Plan(
        lengths=tuple(LENGTHS),
        micro_batches=micro_batches,
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="by hand",
        planning_s=0.0,
    )


@pytest.fixture(scope="module")
def wanted():
    """Loss and gradients of one process."""
    return reference_gradients(tiny_llama(), documents(LENGTHS))


def worst_error(loss, gradients, wanted):
    wanted_loss, wanted_gradients = wanted
    errors = relative_errors(gradients, wanted_gradients)
    return max(abs(loss / wanted_loss - 1), *errors.values())


def run_cases(rank, world_size, topology, cases, wanted, use_blocks=False):
    """(the worst error of loss and gradients, the ways between nodes) of each case: a plan, passes
    over it, whether layers are checkpointed."""
    communicator = join(topology, use_blocks=use_blocks)
    model = tiny_llama().train()
    attach(model)
    found = []
    for plan, passes, checkpointing in cases:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        loss, gradients, contexts = run_plan(
            model, plan, documents(LENGTHS), communicator, passes=passes
        )
        found.append((worst_error(loss, gradients, wanted), ways_between_nodes(contexts)))
    return found


# Remapped or not, routed or not, checkpointed or not: every pair of the three in one of the cases.
CASES = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_group_across_nodes_equals_one_process(strategy, wanted, monkeypatch):
    monkeypatch.setitem(WORTHY_PAIRS, "cpu", 1)  # steps that are not joined leave NICs idle
    cases = []
    for remap, route, checkpointing in CASES:
        passes = Always(TWO_NODES, remap=remap, route=route)
        cases.append((plan_of(strategy), passes, checkpointing))
    for of_rank in run_threads(run_cases, 4, TWO_NODES, cases, wanted, seed=7):
        for worst, ways in of_rank:
            assert worst < 1e-10
            assert ways == OWN_WAYS.get(strategy, set())


@pytest.mark.parametrize(
    ("nodes", "per_node", "use_blocks"),
    [(2, 1, True), (2, 2, True), pytest.param(3, 2, False, marks=pytest.mark.slow)],
)
def test_random_plans_on_nodes_equal_one_process(nodes, per_node, use_blocks, wanted):
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    rng = random.Random(f"{nodes} x {per_node}")
    cases = []
    while len(cases) < 4:
        plan = random_plan(LENGTHS, topology.world_size, rng, nodes=nodes)
        if has_group_across(plan, topology):
            cases.append((plan, Always(topology, remap=rng.random() < 0.5), len(cases) % 2 == 1))
    for of_rank in run_threads(
        run_cases, topology.world_size, topology, cases, wanted, use_blocks, seed=7
    ):
        assert max(worst for worst, _ in of_rank) < 1e-10


def has_group_across(plan, topology):
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    return any(topology.spans_nodes(group.start, group.stop) for group in groups)
