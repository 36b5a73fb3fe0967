"""Zeppelin, LightSeq's rings and the baselines by their published rules;
tests/planner/test_legal.py checks that their plans are legal."""

import random

import pytest
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.rings import ring_named
from hf_flexseq.published.baselines.batch_rebalance import rebalanced
from tests.budget import examples, for_seeds
from tests.costs import rings
from tests.plan.schedules import schedule_of
from tests.plans import planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
CLUSTER = Topology(nodes=8, ranks_per_node=8)
NODE = Topology(nodes=1, ranks_per_node=4)


def groups_of(
    planner: str, lengths: list[int], topology: Topology, cap: int, cost=FLEXSP, **options
):
    """Return (degree, strategy, sequences) of the groups of each micro-batch."""
    plan = planned(lengths, topology, cost, planner=planner, max_tokens_per_rank=cap, **options)
    return [
        [(group.degree, group.strategy, group.sequences) for group in micro_batch.groups]
        for micro_batch in plan.micro_batches
    ]


# ---- zeppelin


def test_zeppelin_makes_three_zones():
    """Plan a sequence above a node's memory, one above its share of a node's work, short ones."""
    topology = Topology(nodes=2, ranks_per_node=4)
    lengths = [9000, 3000] + [100] * 12
    ((world, node, *alone),) = groups_of("zeppelin", lengths, topology, 2000, rings(topology))
    assert world == (8, "zigzag", (0,))
    assert node == (4, "zigzag", (1,))
    assert {group[:2] for group in alone} == {(1, "local")}


def test_zeppelin_uses_the_strategy_asked_for_and_ulysses_where_no_ring_is_known():
    ((first, *_),) = groups_of("zeppelin", [3000, 10], NODE, 2000)
    assert first[1:] == ("ulysses", (0,))
    for strategy in ("balanced", "ulysses"):
        ((only,),) = groups_of("zeppelin", [600], NODE, 200, rings(NODE), strategy=strategy)
        assert only == (4, strategy, (0,))


@for_seeds(5)
def test_zeppelin_cuts_long_tails_into_few_micro_batches(seed):
    rng = random.Random(seed)
    limit = 64 * 5951
    lengths = [min(limit, int(rng.lognormvariate(6.9, 1.75)) + 1) for _ in range(512)]
    plan = planned(lengths, CLUSTER, FLEXSP, planner="zeppelin")
    assert len(plan.micro_batches) <= -(-sum(lengths) // limit) + 2


# ---- megatron


@pytest.mark.parametrize(
    "lengths, cap, groups",
    [
        # the longest limits the work of a micro-batch
        ([2500] * 8, 1536, [[(2, (i,)), (2, (i + 1,))] for i in (0, 2, 4, 6)]),
        # 4000 needs two ranks; the others share a rank below it, and grow over the idle one, too
        ([4000, 1000, 900], 2000, [[(2, (0,)), (2, (1, 2))]]),
        # two whose squares are below that of the longest share a rank
        ([3000, 2000, 2000], 4000, [[(2, (0,)), (2, (1, 2))]]),
        # groups grow over idle ranks
        ([1000, 900], 2000, [[(2, (0,)), (2, (1,))]]),
    ],
)
def test_megatron_packs_and_limits_the_work_by_the_longest(lengths, cap, groups):
    found = groups_of("megatron", lengths, NODE, cap)
    assert [[(degree, ids) for degree, _, ids in one] for one in found] == groups


# ---- the best degree per batch


@pytest.mark.parametrize("count", [10, 200])
def test_batch_ada_is_the_best_single_degree(count):
    rng = random.Random(0)
    lengths = [min(100_000, int(rng.lognormvariate(7, 1.75)) + 1) for _ in range(count)]
    seconds = []
    for degree in CLUSTER.degrees():
        if max(lengths) <= 5951 * degree:
            static = planned(lengths, CLUSTER, FLEXSP, planner="static", sp_degree=degree)
            seconds.append(static.objective_s)
    assert planned(lengths, CLUSTER, FLEXSP, planner="batch-ada").objective_s == min(seconds)


# ---- transformers' sampler


@for_seeds(examples(30))
def test_the_rebalancing_rule_is_transformers_own(seed):
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    batches = rng.randint(1, 4)
    count = rng.randint(ranks * batches, 60)
    lengths = [int(rng.lognormvariate(6, 1.2)) + 1 for _ in range(count)]
    sampler = BatchRebalanceSampler(lengths, count, ranks, batches, shuffle=False)
    order = sorted(range(count), key=lambda i: (-lengths[i], i))
    slices = rebalanced([lengths[i] for i in order], ranks, batches)
    theirs = sampler._assign(list(range(count)), lengths)  # [ranks][batches] ids
    for index, (start, stop) in enumerate(slices):
        batch, rank = divmod(index, ranks)
        assert theirs[rank][batch] == order[start:stop]


# ---- LightSeq's rings


def busiest_link(degree: int, keys: float, queries: float) -> float:
    """From the steps of `balanced`: the most that any rank sends or receives, for tensors of these
    widths."""
    total = 0.0
    for there, back_of_keys in ((1, 0), (3, 1)):  # forward, backward
        moves = []  # (source, target, size)
        for step in schedule_of("balanced", degree):
            if step.source != step.worker:
                moves.append((step.source, step.worker, keys))
                moves.append((step.worker, step.source, back_of_keys * keys))
            if step.reader != step.worker:
                moves.append((step.reader, step.worker, there * queries))
                moves.append((step.worker, step.reader, queries))
        sent, received = [0.0] * degree, [0.0] * degree
        for source, target, size in moves:
            sent[source] += size
            received[target] += size
        total += max(sent + received)
    return total


@pytest.mark.parametrize("degree", range(2, 17))
def test_the_ring_pays_what_its_busiest_rank_moves(degree):
    """Keys and values of a width of 2, queries as wide as keys alone."""
    assert 2.0 * ring_named("balanced").trips(degree) == busiest_link(degree, 2.0, 1.0)
