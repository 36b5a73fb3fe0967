"""Recurrent layers in the cost model: segments, summaries, seconds, posts."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import GroupKind, kinds_ns
from hf_flexseq.cost.launches import segments_work
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.recurrent import filled, segments_of_rank, summaries
from hf_flexseq.plan.segments import segments_of
from hf_flexseq.program.compile import (
    HALO,
    HALO_RETURN,
    SUMMARIES_AFTER,
    SUMMARIES_BEFORE,
    Machine,
    MicroBatchLayout,
    of_rows,
)
from hf_flexseq.program.instructions import RowShape
from tests.costs import SCAN, simple_cost
from tests.plans import planned, shards_of

STRATEGIES = ["ulysses", "zigzag", "balanced", "hybrid"]
SIMPLE = simple_cost(heads=8, recurrent=(SCAN,), attention_share=0.25)


# ---- segments


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_the_busiest_rank_has_the_segments_and_summaries_that_it_is_priced_with(strategy, degree):
    most_segments, most_moved = 0, {False: 0, True: 0}  # by whether segments after count
    for rank, shard in enumerate(shards_of(strategy, degree, (64 * degree,))):
        (zone,) = shard.zones
        found = segments_of(zone)
        (tree,) = found.trees.values()
        chain = tree.segments
        most_segments = max(most_segments, len(found.held))
        own = [one.place for one in found.held]
        for after in (False, True):

            def is_read(place: int, mine: int, after: bool = after) -> bool:
                return place > mine if after else place < mine

            others = [place for place in range(len(chain)) if place not in own]
            received = [place for place in others if any(is_read(place, mine) for mine in own)]
            sent = 0
            for mine in own:
                places = [place for place in range(len(chain)) if is_read(mine, place)]
                sent += len({chain[place].holder for place in places} - {rank})
            most_moved[after] = max(most_moved[after], len(received), sent)
    assert most_segments == segments_of_rank(degree, strategy)
    assert set(most_moved.values()) == {summaries(degree, strategy)}


def test_no_rank_of_ulysses_receives_more_of_many_sequences_than_of_one():
    for shard in shards_of("ulysses", 4, (30, 10, 50, 3, 90)):
        (zone,) = shard.zones
        assert sum(one.place for one in segments_of(zone).held) <= summaries(4, "ulysses")


def test_chunks_are_filled_up():
    s = np.array([1.0, 64.0, 1000.0])
    assert filled(s, 64, 1, "local").tolist() == [64, 64, 1024]
    assert filled(s, 64, 4, "ulysses").tolist() == [16, 16, 256]
    assert filled(s, 64, 4, "balanced").tolist() == [64, 64, 256]
    assert filled(s, 64, 4, "zigzag").tolist() == [128, 128, 256]
    assert filled(s, 1, 4, "zigzag").tolist() == [2, 16, 250]


# ---- seconds


def test_seconds_are_tokens_a_second_pass_and_summaries_worked_by_hand():
    # a rank of four has 8 of 32 tokens; a summary has 24 bytes and a halo 3, both ways
    seconds = {
        "local": 2.0 * 32,
        "ulysses": 2.5 * 8,
        "balanced": 2.5 * 8 + 2 * (3 * 24 + 3),
        "zigzag": 2.5 * 8 + 2 * (5 * 24 + 2 * 3),
    }
    for strategy, expected in seconds.items():
        degree = 1 if strategy == "local" else 4
        found = SIMPLE.sequence_ns(32, degree, strategy, False)
        assert found == pytest.approx(1e9 * expected, rel=1e-6), strategy
    # Ulysses' summaries count once, however many sequences there are
    for lengths in ([32], [16, 16]):
        kind = GroupKind(4, "ulysses", False)
        (whole,) = kinds_ns(SIMPLE, [kind], [range(len(lengths))], lengths)
        assert whole == pytest.approx(1e9 * (2.5 * 8 + 2 * (3 * 24 + 3)), rel=1e-6)


def test_memory_alone_decides_the_degrees_of_recurrent_layers():
    """Where attention takes nothing, ranks share a sequence only if none can hold it."""
    cost = replace(PRESETS["qwen3.5-35b-a3b-h100"], attention_s=0.0)
    topology = Topology(nodes=1, ranks_per_node=8)
    plan = planned([70_000, *[35_000] * 6], topology, cost, max_tokens_per_rank=40_000)
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    degrees = {sequence: group.degree for group in groups for sequence in group.sequences}
    assert degrees == {0: 2} | dict.fromkeys(range(1, 7), 1)


# ---- the host


def test_the_host_posts_for_layers_of_either_kind():
    cost = replace(SIMPLE, post_s=1.0)
    attention = replace(cost, recurrent=(), attention_share=1.0)
    # a quarter of the layers post as Ulysses does, three quarters two halos and two summaries
    assert cost.host_s(4, "ulysses", False) == 0.25 * attention.host_s(4, "ulysses", False) + 3.0
    assert cost.waits(1, "local", False) == (0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree, nodes", [(2, 1), (3, 1), (8, 1), (8, 2)])
def test_posts_and_messages_are_those_of_the_programs(strategy, degree, nodes):
    topology = Topology(nodes=nodes, ranks_per_node=degree // nodes)
    machine = Machine(topology=topology, device="cuda", wide_gradients=False)
    posts, messages = [], []
    for rank, shard in enumerate(shards_of(strategy, degree, (64 * degree,))):
        parts = MicroBatchLayout(shard, machine).parts
        programs = []
        for what in (HALO, HALO_RETURN, SUMMARIES_BEFORE, SUMMARIES_AFTER):
            programs.append(of_rows(parts, what, RowShape(8, "float32", 4)))
        posts.append(sum(one.posts(topology.node_of, rank=rank) for one in programs))
        messages.append(sum(one.messages for one in programs))
    work = segments_work("gated_delta", strategy, degree, nodes=nodes)
    assert (max(posts), max(messages)) == (work.posts, work.messages)
