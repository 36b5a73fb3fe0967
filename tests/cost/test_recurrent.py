"""Recurrent layers in the cost model: segments, summaries, seconds, bytes, records, presets."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.layers import RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model
from hf_flexseq.cost.launches import segments_work
from hf_flexseq.cost.presets import PRESETS, SHAPES
from hf_flexseq.cost.recurrent import (
    RecurrentLayers,
    filled,
    segments_of_rank,
    summaries,
)
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.segments import chains_of
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.planner import make_plan
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

STRATEGIES = ["ulysses", "zigzag", "balanced", "hybrid"]
SCAN = RecurrentLayers(
    kind="gated_delta",
    share=0.75,
    token_s=2.0,
    again_s=0.5,
    chunk=4,
    summary_bytes=24.0,
    halo_bytes=3.0,
    row_bytes=48.0,
)
SIMPLE = CostModel(
    name="simple",
    attention_s=0.0,
    linear_s=1e-9,
    micro_batch_s=0.0,
    group_s=0.0,
    all_to_all_bytes=0.0,
    ring_bytes=0.0,
    query_bytes=0.0,
    ring_overlap=0.0,
    bandwidths=((2, 1.0),),
    heads=8,
    token_bytes=1.0,
    state_bytes=0.0,
    sharded_state_bytes=0.0,
    budget_bytes=1e6,
    recurrent=(SCAN,),
    attention_share=0.25,
)
DELTA = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
SHAPE = ModelShape(
    layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=10,
    params=10_000, without_attention=6, recurrent=((6, DELTA),),
)  # fmt: skip


def group_of(strategy: str, degree: int, sequences: int = 1) -> Group:
    return Group(ranks=tuple(range(degree)), sequences=tuple(range(sequences)), strategy=strategy)


# ---- segments


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_the_busiest_rank_has_the_segments_and_summaries_that_it_is_priced_with(
    strategy: str, degree: int
) -> None:
    micro_batch = MicroBatch(groups=(group_of(strategy, degree),))
    most_segments, most_moved = 0, {False: 0, True: 0}  # by whether segments after count
    for rank in range(degree):
        (zone,) = make_shard(micro_batch, (64 * degree,), rank).zones
        found = chains_of(zone)
        (chain,) = found.chains.values()
        most_segments = max(most_segments, len(found.held))
        own = [one.place for one in found.held]
        for after in (False, True):
            received = {
                place
                for place in range(len(chain))
                if place not in own
                and any((place > mine) if after else (place < mine) for mine in own)
            }
            sent = 0
            for mine in own:
                readers = {
                    segment.holder
                    for place, segment in enumerate(chain)
                    if ((place < mine) if after else (place > mine))
                }
                sent += len(readers - {rank})
            most_moved[after] = max(most_moved[after], len(received), sent)
    assert most_segments == segments_of_rank(degree, strategy)
    assert set(most_moved.values()) == {summaries(degree, strategy)}


def test_no_rank_of_ulysses_receives_more_of_many_sequences_than_of_one() -> None:
    micro_batch = MicroBatch(groups=(group_of("ulysses", 4, 5),))
    for rank in range(4):
        (zone,) = make_shard(micro_batch, (30, 10, 50, 3, 90), rank).zones
        found = chains_of(zone)
        assert sum(one.place for one in found.held) <= summaries(4, "ulysses")


def test_chunks_are_filled_up() -> None:
    s = np.array([1.0, 64.0, 1000.0])
    assert filled(s, 64, 1, "local").tolist() == [64, 64, 1024]
    assert filled(s, 64, 4, "ulysses").tolist() == [16, 16, 256]
    assert filled(s, 64, 4, "balanced").tolist() == [64, 64, 256]
    assert filled(s, 64, 4, "zigzag").tolist() == [128, 128, 256]
    assert filled(s, 1, 4, "zigzag").tolist() == [2, 16, 250]


# ---- seconds


def test_seconds_are_tokens_a_second_pass_and_summaries_worked_by_hand() -> None:
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
        whole = SIMPLE.group_ns(np.array(lengths), 4, "ulysses", False)
        assert whole == pytest.approx(1e9 * (2.5 * 8 + 2 * (3 * 24 + 3)), rel=1e-6)


def test_what_is_exchanged_does_not_grow_with_the_sequence() -> None:
    cost = replace(SIMPLE, recurrent=(replace(SCAN, token_s=0.0, again_s=0.0),))
    for strategy in STRATEGIES:
        short, long = (
            cost.group_ns(np.array([n]), 4, strategy, False) for n in (1 << 10, 1 << 20)
        )
        assert 0 < long - short < 1e6  # linear layers are a nanosecond per token


def test_the_host_posts_for_layers_of_either_kind() -> None:
    cost = replace(SIMPLE, post_s=1.0)
    attention = replace(cost, recurrent=(), attention_share=1.0)
    # a quarter of the layers post as Ulysses does, three quarters two halos and two summaries
    assert cost.host_s(4, "ulysses", False) == 0.25 * attention.host_s(4, "ulysses", False) + 3.0
    assert cost.waits(1, "local", False) == (0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree, per_node", [(2, 8), (3, 8), (8, 8), (8, 4)])
def test_posts_and_messages_are_those_of_the_programs(
    strategy: str, degree: int, per_node: int
) -> None:
    nodes = max(1, degree // per_node)
    topology = Topology(nodes=nodes, ranks_per_node=max(per_node, degree))
    machine = Machine(topology=topology, device="cuda", wide_gradients=False)
    micro_batch = MicroBatch(groups=(group_of(strategy, degree),))
    posts, messages = [], []
    if nodes > 1:
        topology = Topology(nodes=nodes, ranks_per_node=per_node)
    for rank in range(degree):
        parts = MicroBatchLayout(make_shard(micro_batch, (64 * degree,), rank), machine).parts
        programs = []
        for what in (HALO, HALO_RETURN, SUMMARIES_BEFORE, SUMMARIES_AFTER):
            programs.append(of_rows(parts, what, RowShape(8, "float32", 4)))
        posts.append(sum(one.posts(topology.node_of, rank=rank) for one in programs))
        messages.append(sum(one.messages for one in programs))
    work = segments_work("gated_delta", strategy, degree, nodes=nodes)
    assert max(posts) == work.posts
    assert max(messages) == work.messages


# ---- records


def test_recurrent_layers_survive_json_and_are_seen_by_the_digest() -> None:
    assert CostModel.from_record(SIMPLE.to_record()) == SIMPLE
    without = replace(SIMPLE, recurrent=())
    everywhere = replace(SIMPLE, attention_share=1.0)
    assert len({SIMPLE.digest(), without.digest(), everywhere.digest()}) == 3
    record = replace(without, attention_share=1.0).to_record()
    del record["recurrent"], record["attention_share"]
    assert CostModel.from_record(record).digest() == replace(without, attention_share=1.0).digest()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "rwkv"}, "expected one of gated_delta, kimi_delta, mamba2"),
        ({"share": 1.5}, "recurrent, gated_delta, share=1.5"),
        ({"share": 0.0}, "recurrent, gated_delta: token_s=2.0 of no layers"),
        ({"token_s": -1.0}, "recurrent, gated_delta, token_s=-1.0"),
        ({"chunk": 0}, "recurrent, gated_delta, chunk=0"),
        ({"window": 4}, "window"),
    ],
)
def test_recurrent_layers_without_meaning_are_refused(
    changes: dict[str, object], message: str
) -> None:
    record = SIMPLE.to_record()
    record["recurrent"][0] |= changes
    with pytest.raises(ValueError, match=message):
        CostModel.from_record(record)


def test_a_kind_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="gated_delta is listed twice"):
        replace(SIMPLE, recurrent=(SCAN, SCAN))


def test_attention_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_share=0.0: attention of no layers"):
        replace(SIMPLE, attention_s=1.0, attention_share=0.0)


# ---- estimated and published


def test_an_estimate_has_the_bytes_of_summaries_halos_and_rows() -> None:
    topology = Topology(nodes=1, ranks_per_node=8)
    cost = analytic_cost_model(SHAPE, DEVICES["H100"], topology, checkpointing=False)
    (kind,) = cost.recurrent
    assert cost.attention_share == 0.25
    assert kind.share == 0.75
    assert kind.summary_bytes == 6 * 4 * 16 * (16 + 8) * 4
    assert kind.halo_bytes == 6 * 3 * 96 * 2
    # there and back: into and out of the convolution, and q, k, v, g, beta and out of the scan
    assert kind.row_bytes == 6 * 2 * (2 * 96 + 2 * 2 * 16 + 4 * (2 * 8 + 2)) * 2
    # Ulysses moves what the two layers with attention have
    assert cost.all_to_all_bytes == 2 * 2 * (2 * 64 + 2 * 2 * 16) * 2
    lone = analytic_cost_model(
        SHAPE, DEVICES["H100"], Topology(nodes=1, ranks_per_node=1), checkpointing=False
    )
    assert lone.state_bytes < cost.state_bytes  # states of segments, and summaries on their way


def test_a_mamba_2_has_the_summaries_of_a_decay_and_a_convolution_none() -> None:
    topology = Topology(nodes=1, ranks_per_node=8)
    sizes = replace(DELTA, kind="mamba2")
    mamba = replace(SHAPE, recurrent=((6, sizes),))
    (kind,) = analytic_cost_model(mamba, DEVICES["H100"], topology).recurrent
    assert kind.summary_bytes == 6 * 4 * (16 * 8 + 1) * 4
    convolution = RecurrentShape(kind="convolution", width=3, channels=64)
    short = replace(SHAPE, recurrent=((6, convolution),))
    (kind,) = analytic_cost_model(short, DEVICES["H100"], topology).recurrent
    assert (kind.summary_bytes, kind.again_s, kind.chunk) == (0.0, 0.0, 1)
    assert kind.token_s > 0


def test_an_unknown_kind_of_recurrent_layer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'rwkv' of recurrent layer: expected one of gated_delta"):
        replace(DELTA, kind="rwkv")


def test_a_model_has_no_more_recurrent_layers_than_layers() -> None:
    with pytest.raises(ValueError, match="9 gated delta layers, of 8 layers"):
        replace(SHAPE, recurrent=((9, DELTA),))


@pytest.mark.parametrize(
    "model, full, recurrent, billions, active",
    [
        ("qwen3.5-35b-a3b", 10 / 40, 30 / 40, 34.66, 3.45 - 0.51),
        ("nemotron-3-nano-30b-a3b", 6 / 52, 23 / 52, 31.58, 3.58 - 0.35),
    ],
)
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_presets_of_recurrent_models_have_the_published_sizes(
    model: str, full: float, recurrent: float, billions: float, active: float, device: str
) -> None:
    cost = PRESETS[f"{model}-{device}"]
    (kind,) = cost.recurrent
    assert cost.attention_share == pytest.approx(full)
    assert kind.share == pytest.approx(recurrent)
    assert cost.sharded_state_bytes == pytest.approx(16e9 * billions, rel=1e-3)
    assert cost.linear_s == pytest.approx(8e9 * active / 4.4e14, rel=1e-2)
    assert cost.max_tokens_per_rank(64) > 30_000
    assert kind.token_s < cost.linear_s
    assert cost.layers_text(before="; ").startswith("; layers ")
    ((layers, sizes),) = SHAPES[model].recurrent
    assert kind.summary_bytes == layers * 4 * (sizes.state_numbers + sizes.transition_numbers)


def test_the_scan_of_a_preset_takes_what_was_measured_of_its_kernel() -> None:
    # 32,768 tokens of 64 heads: 15.56 ms without checkpointing, as SCAN_EFFICIENCY says
    sizes = RecurrentShape(
        kind="gated_delta", key_heads=64, value_heads=64, key_dim=128, value_dim=128, width=1,
        channels=0,
    )  # fmt: skip
    shape = replace(SHAPE, recurrent=((1, sizes),))
    topology = Topology(nodes=1, ranks_per_node=8)
    (kind,) = analytic_cost_model(shape, DEVICES["H100"], topology, checkpointing=False).recurrent
    assert kind.token_s * 32768 == pytest.approx(15.56e-3, rel=0.01)


# ---- plans, stages and simulations


def test_memory_alone_decides_the_degrees_of_recurrent_layers() -> None:
    """Where attention takes nothing, ranks share a sequence only if none can hold it."""
    cost = replace(PRESETS["qwen3.5-35b-a3b-h100"], attention_s=0.0)
    topology = Topology(nodes=1, ranks_per_node=8)
    plan = make_plan(
        [70_000, *[35_000] * 6], topology, cost, PlanOptions(max_tokens_per_rank=40_000)
    )
    degrees = {}
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            for sequence in group.sequences:
                degrees[sequence] = group.degree
    assert degrees == {0: 2} | dict.fromkeys(range(1, 7), 1)


def test_the_stages_of_a_pipeline_have_recurrent_layers_among_their_linear_ones() -> None:
    cost = PipelineCost.of_model(SIMPLE, 2)
    assert cost.stages[0].linear_ns == pytest.approx((2.0 + 1e-9) * 1e9 / 3 / 2)
