"""The cost of stages on ranks that share chunks and on more nodes than one, and the memory that is
left on a stage."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.pipeline.cost import StageTokenBytes, pipeline_cost, room_bytes
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.stages import cut
from tests.hf.test_reach import make_model
from tests.hf.tiny import tiny_llama

COST = PRESETS["flexsp-gpt-7b-a100"]
TOKEN = StageTokenBytes(hidden=8192, head=32_768, kv=4096, owed=90_000)
INSIDE_NS = 1e9 * TOKEN.hidden / COST.bandwidth(2, False)
ACROSS_NS = 1e9 * TOKEN.hidden / COST.bandwidth(16, False)


def cost_of(stages, *, virtual=1, layers=8, degree=1, topology=(1, 8)):
    stage = cut(tiny_llama(num_hidden_layers=layers), 0, stages, virtual=virtual)
    nodes, ranks_per_node = topology
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    return pipeline_cost(COST, stage, TOKEN, checkpointed=False, degree=degree, topology=topology)


@pytest.mark.parametrize(
    "topology, stages, virtual, across, hops",
    [
        ((4, 8), 4, 1, 3, 3),  # a stage is a node
        ((8, 4), 4, 1, 3, 3),  # a stage is two nodes
        ((2, 4), 4, 1, 1, 3),  # two stages are a node
        ((2, 1), 2, 4, 7, 7),  # every virtual stage's neighbours are on the other node
        ((2, 2), 4, 2, 3, 7),  # 0 1 | 2 3 | and round to 0 again
        ((2, 3), 3, 1, 2, 2),  # two ranks a stage: rank 1 -> 3 crosses, 0 -> 2 does not
        ((2, 4), 1, 1, 0, 1),  # no hop
    ],
)
def test_hops_that_cross_nodes_have_the_bandwidth_of_sixteen_ranks(
    topology, stages, virtual, across, hops
):
    assert ACROSS_NS > 3 * INSIDE_NS
    mean = (across * ACROSS_NS + (hops - across) * INSIDE_NS) / hops
    found = cost_of(stages, virtual=virtual, topology=topology).send_ns
    assert found == pytest.approx(mean)


@pytest.mark.parametrize(
    ("topology", "stages", "degree", "across"),
    [
        ((2, 4), 2, 4, [False, False]),  # a stage is a node
        ((4, 2), 2, 4, [True, True]),  # a stage is two nodes
        ((2, 3), 3, 2, [False, True, False]),  # 0 1 | 2 3 | 4 5
    ],
)
def test_shared_chunks_are_exchanged_across_nodes_where_their_ranks_lie_on_more_than_one(
    topology, stages, degree, across
):
    alone = cost_of(stages, layers=2 * stages).stages
    shared = cost_of(stages, layers=2 * stages, degree=degree, topology=topology).stages
    for one, part, spans_nodes in zip(alone, shared, across, strict=True):
        forward_bytes = COST.all_to_all_bytes * one.layers / (2 * stages) / 3
        exchange_ns = 1e9 * forward_bytes / COST.bandwidth(degree, spans_nodes)
        assert part.linear_ns == pytest.approx((one.linear_ns + exchange_ns) / degree)


# ---- what is left on a stage


def stage_and_cost():
    stage = cut(tiny_llama(num_hidden_layers=3), 0, 2)
    return stage, replace(COST, budget_bytes=1e15)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("mixed", "whole_bytes"), [(False, 8), (True, 6)])
def test_room_counts_what_is_whole_during_a_step(ranks, mixed, whole_bytes):
    """Of 16 bytes a parameter, 8 are whole and 12 shared; weights are counted in both, the whole
    ones as 2 bytes in mixed precision."""
    stage, cost = stage_and_cost()
    state = cost.budget_bytes - room_bytes(cost, stage, sharded_over=1, mixed=False)[0]
    memory_limit = room_bytes(cost, stage, sharded_over=ranks, mixed=mixed)[0]
    wanted = state * (whole_bytes + 12 / ranks) / 16
    assert cost.budget_bytes - memory_limit == pytest.approx(wanted, abs=2)


def test_a_stage_that_a_file_leaves_out_is_named():
    record = cost_of(2).to_record()
    record["stages"][1] = None
    with pytest.raises(ValueError, match="stages, not the cost of a stage: expected a JSON obj"):
        PipelineCost.from_record(record)


def test_stages_hold_all_experts_and_compute_with_the_active_ones():
    """Two of eight: their weights divide the layers, all weights fill the memory."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    stage = cut(make_model("Qwen3Moe", num_hidden_layers=4, vocab_size=64, **sizes), 0, 4)
    mlp = stage.own_layers[0].mlp
    experts = sum(p.numel() for p in mlp.experts.parameters())
    held = sum(p.numel() for p in stage.own_layers[0].parameters())
    vectors = sum(p.numel() for p in stage.own_layers[0].parameters() if p.dim() == 1)
    assert stage.sizes.held == (held,) * 4
    assert stage.sizes.layers == (held - vectors - experts * 6 // 8,) * 4
    assert stage.spans == ((0, 1), (1, 2), (2, 3), (3, 4))
    cost = replace(COST, budget_bytes=1e15)
    rooms = room_bytes(cost, stage, sharded_over=1, mixed=False)
    state = 1e15 - rooms[1]  # of a layer
    weights = 4 * held + 2 * stage.sizes.head
    total = cost.state_bytes + cost.sharded_state_bytes
    assert state == pytest.approx(total * held / weights, abs=2)
