"""The cost of stages on ranks that share chunks and on more nodes than one."""

from dataclasses import replace

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.kinds import NearLayers
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.recurrent import RecurrentLayers
from hf_flexseq.pipeline.cost import StageTokenBytes, pipeline_cost
from hf_flexseq.pipeline.stages import cut
from tests.hf.tiny import tiny_llama

COST = PRESETS["flexsp-gpt-7b-a100"]
TOKEN = StageTokenBytes(hidden=8192, kv=4096, owed=90_000)
INSIDE_NS = 1e9 * TOKEN.hidden / COST.bandwidth(2, False)
ACROSS_NS = 1e9 * TOKEN.hidden / COST.bandwidth(16, False)


def send_ns(stages, topology, *, virtual=1, degree=1):
    stage = cut(tiny_llama(num_hidden_layers=8), 0, stages, virtual=virtual)
    cost = pipeline_cost(COST, stage, TOKEN, checkpointed=False, degree=degree, topology=topology)
    return cost.send_ns


def test_across_nodes_is_several_times_slower():
    assert ACROSS_NS > 3 * INSIDE_NS


@pytest.mark.parametrize("topology", [None, Topology(nodes=1, ranks_per_node=8)])
def test_hops_inside_a_node_have_its_bandwidth(topology):
    assert send_ns(4, topology) == INSIDE_NS
    assert send_ns(4, topology, degree=2) == INSIDE_NS / 2


@pytest.mark.parametrize(
    "nodes, ranks_per_node, stages, virtual, across, hops",
    [
        (4, 8, 4, 1, 3, 3),  # a stage is a node
        (8, 4, 4, 1, 3, 3),  # a stage is two nodes
        (2, 4, 4, 1, 1, 3),  # two stages are a node
        (2, 1, 2, 4, 7, 7),  # every virtual stage's neighbours are on the other node
        (2, 2, 4, 2, 3, 7),  # 0 1 | 2 3 | and round to 0 again
        (2, 3, 3, 1, 2, 2),  # two ranks a stage: rank 1 -> 3 crosses, 0 -> 2 does not
        (2, 4, 1, 1, 0, 1),  # no hop
    ],
)
def test_hops_that_cross_nodes_have_the_bandwidth_of_sixteen_ranks(
    nodes, ranks_per_node, stages, virtual, across, hops
):
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    mean = (across * ACROSS_NS + (hops - across) * INSIDE_NS) / hops
    assert send_ns(stages, topology, virtual=virtual) == pytest.approx(mean)


# ---- exchanges of the ranks that share a stage's chunks


@pytest.mark.parametrize(
    ("topology", "stages", "degree", "across"),
    [
        (None, 2, 4, [False, False]),
        (Topology(nodes=1, ranks_per_node=8), 2, 4, [False, False]),
        (Topology(nodes=2, ranks_per_node=4), 2, 4, [False, False]),  # a stage is a node
        (Topology(nodes=4, ranks_per_node=2), 2, 4, [True, True]),  # a stage is two nodes
        (Topology(nodes=4, ranks_per_node=2), 2, 2, [False, False]),  # of which each shares alone
        (Topology(nodes=2, ranks_per_node=3), 3, 2, [False, True, False]),  # 0 1 | 2 3 | 4 5
        (Topology(nodes=2, ranks_per_node=9), 3, 2, [False, True, False]),  # 8 9 of 6 to 11
    ],
)
def test_shared_chunks_are_exchanged_across_nodes_where_their_ranks_lie_on_more_than_one(
    topology, stages, degree, across
):
    stage = cut(tiny_llama(num_hidden_layers=2 * stages), 0, stages)
    alone = pipeline_cost(COST, stage, TOKEN, checkpointed=False).stages
    shared = pipeline_cost(
        COST, stage, TOKEN, checkpointed=False, degree=degree, topology=topology
    ).stages
    assert COST.bandwidth(degree, True) < COST.bandwidth(degree, False) / 2
    for one, part, spans_nodes in zip(alone, shared, across, strict=True):
        layers = one.layers / (2 * stages)
        forward_bytes = COST.all_to_all_bytes * layers / 3
        exchange_ns = 1e9 * forward_bytes / COST.bandwidth(degree, spans_nodes)
        assert part.linear_ns == pytest.approx((one.linear_ns + exchange_ns) / degree)


# ---- layers with windows


@pytest.mark.parametrize("degree", [1, 2])
def test_window_layers_have_the_seconds_of_their_pairs_on_every_stage(degree):
    window = Reach(window=512)
    kinds = (NearLayers(reach=window, share=0.75, attention_s=3 * COST.attention_s),)
    stage = cut(tiny_llama(num_hidden_layers=8), 0, 4)
    options = {"checkpointed": False, "degree": degree, "topology": None}
    full = pipeline_cost(COST, stage, TOKEN, **options)
    near = pipeline_cost(replace(COST, kinds=kinds), stage, TOKEN, **options)
    for plain, priced in zip(full.stages, near.stages, strict=True):
        assert plain.near_ns == ()
        ((reach, pair_ns),) = priced.near_ns
        assert reach == window
        # three times the seconds of the full layers, pair by pair
        assert pair_ns == pytest.approx(3 * priced.attention_ns)


def test_recurrent_layers_take_seconds_of_their_tokens_and_carry_no_keys():
    scan = RecurrentLayers(
        kind="mamba2",
        share=0.75,
        token_s=COST.linear_s,
        again_s=0.0,
        summary_bytes=0.0,
        halo_bytes=0.0,
        row_bytes=0.0,
    )
    stage = cut(tiny_llama(num_hidden_layers=8), 0, 4)
    hybrid = replace(COST, recurrent=(scan,), attention_share=0.25)
    options = {"checkpointed": False, "topology": None}
    full = pipeline_cost(COST, stage, TOKEN, **options)
    mixed = pipeline_cost(hybrid, stage, TOKEN, **options)
    for plain, priced in zip(full.stages, mixed.stages, strict=True):
        assert priced.linear_ns == pytest.approx(2 * plain.linear_ns)
        assert priced.kv_bytes == plain.kv_bytes / 4
