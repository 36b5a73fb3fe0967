"""Remapping is decided by the cost model, and every rank then holds an even share."""

from dataclasses import replace

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import slowest_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.published.zeppelin.passes import ZeppelinPasses
from hf_flexseq.published.zeppelin.remap import remapped_ns, remapped_shards

NODE = Topology(nodes=1, ranks_per_node=4)
LENGTHS = (16_000, *[500] * 30)
FAST = replace(PRESETS["llama-3.1-8b-a800"], micro_batch_s=0.0)
SLOW = replace(FAST, bandwidths=tuple((degree, speed / 1e4) for degree, speed in FAST.bandwidths))


def planned(cost):
    (micro_batch,) = make_plan(
        LENGTHS, NODE, cost, PlanOptions(planner="zeppelin", max_tokens_per_rank=40_000)
    ).micro_batches
    return micro_batch


def test_it_is_decided_by_the_cost_model():
    """Zeppelin levels attention alone, so tokens are uneven; moving them pays on fast links."""
    micro_batch = planned(FAST)
    even_ns = sum(remapped_ns(FAST, micro_batch, LENGTHS, NODE))
    assert even_ns < slowest_ns(FAST, micro_batch, LENGTHS, NODE)
    assert ZeppelinPasses(FAST, NODE, lockstep=True).shards(micro_batch, LENGTHS) is not None
    assert ZeppelinPasses(FAST, NODE, lockstep=False).shards(micro_batch, LENGTHS) is None
    assert ZeppelinPasses(SLOW, NODE, lockstep=True).shards(planned(SLOW), LENGTHS) is None


def test_ranks_hold_even_shares_of_all_tokens():
    shards = remapped_shards(planned(FAST), LENGTHS, NODE)
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
