"""Remapping: the transport to an even layout against the linear program that it stands for, its
decision by the cost model, and what every rank then holds."""

from dataclasses import replace

import highspy
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import lockstep_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.published.zeppelin.moves import moved_tokens, transport
from hf_flexseq.published.zeppelin.passes import ZeppelinPasses
from hf_flexseq.published.zeppelin.remap import remapped_ns, remapped_shards
from tests.budget import examples
from tests.plans import planned

NODE = Topology(nodes=1, ranks_per_node=4)
TWO_BY_TWO = Topology(nodes=2, ranks_per_node=2)

# ---- moves


def optimum(tokens: list[int], topology: Topology) -> tuple[int, int]:
    """(tokens that move, tokens that cross nodes) of the cheapest transport to any layout that is
    even to within one; crossing a node counts a hundredfold."""
    world, share = len(tokens), sum(tokens) // len(tokens)
    ranks = range(world)
    solver = highspy.Highs()
    solver.silent()
    x = [[solver.addIntegral() for _ in ranks] for _ in ranks]
    more = [solver.addBinary() for _ in ranks]
    pairs = [(i, j) for i in ranks for j in ranks if i != j]
    crosses = {(i, j): topology.node_of(i) != topology.node_of(j) for i, j in pairs}
    for i in ranks:
        solver.addConstr(solver.qsum(x[i]) == tokens[i])
        solver.addConstr(solver.qsum(row[i] for row in x) == share + more[i])
    solver.minimize(solver.qsum((100 if crosses[i, j] else 1) * x[i][j] for i, j in pairs))
    moved = {(i, j): round(solver.val(x[i][j])) for i, j in pairs}
    return sum(moved.values()), sum(moved[pair] for pair in pairs if crosses[pair])


@settings(deadline=None, max_examples=examples(25), derandomize=True)
@given(st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (3, 2), (4, 1)]), st.data())
def test_transport_is_the_linear_programs(shape, data):
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    world = topology.world_size
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=world, max_size=world))
    moves = transport(tokens, topology)
    left = list(tokens)
    crossing = 0
    for source, target, moved in zip(*(column.tolist() for column in moves), strict=True):
        assert moved > 0
        assert source != target
        left[source] -= moved
        left[target] += moved
        if topology.node_of(source) != topology.node_of(target):
            crossing += moved
    assert max(left) - min(left) <= 1
    assert (sum(moves.tokens), crossing) == optimum(tokens, topology)


def test_the_busiest_rank_counts_by_kind_of_link():
    moves = transport([12, 0, 0, 0], TWO_BY_TWO)
    assert [column.tolist() for column in moves] == [[0, 0, 0], [1, 2, 3], [3, 3, 3]]
    assert moved_tokens(moves, TWO_BY_TWO) == (3, 6)


# ---- remapped micro-batches

LENGTHS = (16_000, *[500] * 30)
FAST = replace(PRESETS["llama-3.1-8b-a800"], micro_batch_s=0.0)
SLOW = replace(FAST, bandwidths=tuple((degree, speed / 1e4) for degree, speed in FAST.bandwidths))


def micro_batch_of(cost):
    plan = planned(LENGTHS, NODE, cost, planner="zeppelin", max_tokens_per_rank=40_000)
    (micro_batch,) = plan.micro_batches
    return micro_batch


def test_it_is_decided_by_the_cost_model():
    """Zeppelin levels attention alone, so tokens are uneven; moving them pays on fast links."""
    micro_batch = micro_batch_of(FAST)
    even_ns = remapped_ns(FAST, micro_batch, LENGTHS, NODE)
    assert even_ns < lockstep_ns(FAST, (micro_batch,), LENGTHS, NODE)[0]
    assert ZeppelinPasses(FAST, NODE, lockstep=True).shards(micro_batch, LENGTHS) is not None
    assert ZeppelinPasses(FAST, NODE, lockstep=False).shards(micro_batch, LENGTHS) is None
    assert ZeppelinPasses(SLOW, NODE, lockstep=True).shards(micro_batch_of(SLOW), LENGTHS) is None


def test_ranks_hold_even_shares_of_all_tokens():
    shards = remapped_shards(micro_batch_of(FAST), LENGTHS, NODE)
    tokens = [shard.tokens for shard in shards]
    assert max(tokens) - min(tokens) <= 1
    held = sorted(
        (part.sequence, position)
        for shard in shards
        for part in shard.slices
        for position in range(part.start, part.stop)
    )
    assert held == [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]
    attention = [shard.zones[-1].stop if shard.zones else 0 for shard in shards]
    for shard, before in zip(shards, attention, strict=True):
        given = sum(rows for _, rows in shard.given)
        got = sum(rows for _, rows in shard.got)
        assert shard.tokens == before - given + got
