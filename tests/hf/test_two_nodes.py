"""A model on ranks of several nodes equals one process: with the ring of a hybrid group, and with
Zeppelin's passes. Ranks are threads."""

from functools import partial

import pytest

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from tests.hf.by_hand import TWO_NODES, errors_by_rank, ways_between_nodes, worst_error
from tests.hf.test_reach import plans_across
from tests.hf.tiny import documents, reference_gradients, tiny_llama
from tests.plans import group, plan_of_groups
from tests.published.zeppelin.always import Always

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]
EXAMPLES = documents(LENGTHS)
# What only a group across nodes has, by strategy.
OWN_WAYS = {"hybrid": {"ring of a hybrid"}}


def plan_across(strategy):
    """A group across nodes beside one inside a node and a rank's own sequences; then a micro-batch
    that leaves the second node idle, unless it is remapped."""
    shared = partial(group, strategy=strategy)
    first = (shared(0, 4, 2, 7, 0, 3), shared(0, 2, 9, 10), group(0, 1, 8))
    return plan_of_groups(LENGTHS, first, (shared(0, 2, 4, 1), group(0, 1, 11, 5, 6)))


@pytest.fixture(scope="module")
def wanted():
    """Loss and gradients of one process."""
    return reference_gradients(tiny_llama(), EXAMPLES)


# Remapped or not, routed or not, checkpointed or not: every pair of the three in one of the cases.
CASES = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_group_across_nodes_equals_one_process(strategy, wanted, monkeypatch):
    monkeypatch.setitem(WORTHY_PAIRS, "cpu", 1)  # steps that are not joined leave NICs idle
    cases = []
    for remap, route, checkpointing in CASES:
        passes = Always(TWO_NODES, remap=remap, route=route)
        cases.append((plan_across(strategy), passes, checkpointing))
    for of_rank in errors_by_rank(tiny_llama, TWO_NODES, cases, EXAMPLES, wanted, seed=7):
        for worst, contexts in of_rank:
            assert worst < 1e-10
            assert ways_between_nodes(contexts) == OWN_WAYS.get(strategy, set())


@pytest.mark.parametrize(
    ("nodes", "per_node", "use_blocks"),
    [(2, 1, True), (2, 2, True), pytest.param(3, 2, False, marks=pytest.mark.slow)],
)
def test_random_plans_on_nodes_equal_one_process(nodes, per_node, use_blocks, wanted):
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    cases = [
        (plan, Always(topology, remap=index >= 2), index % 2 == 1)
        for index, plan in enumerate(plans_across(LENGTHS, "seed", topology, count=4))
    ]
    ranks = {"use_blocks": use_blocks, "seed": 7}
    assert worst_error(tiny_llama, topology, cases, EXAMPLES, wanted, **ranks) < 1e-10
