"""Estimated cost models, and presets with the published sizes of their models."""

from dataclasses import replace

import pytest

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS, SHAPES
from hf_flexseq.cost.shapes import HeadShape, ModelShape

WINDOW = Reach(window=256)
DELTA = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)


def shape(**changes: object) -> ModelShape:
    """A small model of twelve layers."""
    sizes = {"layers": 12, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    sizes |= {"intermediate": 128, "vocab": 10, "params": 10_000}
    return ModelShape(**sizes | changes)


def estimate(
    model: ModelShape, nodes: int = 1, ranks: int = 8, device: str = "H100", **options: object
) -> CostModel:
    topology = Topology(nodes=nodes, ranks_per_node=ranks)
    return analytic_cost_model(model, DEVICES[device], topology, **options)


# ---- full attention


def test_flops_and_bytes_are_counted():
    cost, device = estimate(LLAMA_8B, 2, zero_stage=3), DEVICES["H100"]
    assert cost.linear_s * device.flops == pytest.approx(8 * (LLAMA_8B.params - 128256 * 4096))
    assert cost.attention_s * device.attention_flops == pytest.approx(32 * 7 * 4096)
    assert cost.all_to_all_bytes == pytest.approx(32 * 2 * (2 + 2 / 3) * (2 * 4096 + 2 * 1024))
    plain = estimate(LLAMA_8B, 2, checkpointing=False)
    assert plain.all_to_all_bytes == 32 * 2 * 2 * (2 * 4096 + 2 * 1024)
    assert cost.ring_bytes == 32 * 2 * 3 * 2 * 1024
    assert cost.pass_s == 32 * 2 * (4096 + 2 * 1024) / device.memory_rate
    assert cost.kernel == device.kernel
    assert cost.state_bytes == 4 * 128256 * 4096  # the gradient of the head
    assert cost.sharded_state_bytes == 16 * LLAMA_8B.params


def test_memory_depends_on_sharding_and_checkpointing():
    def tokens(**options: object) -> int:
        return estimate(LLAMA_8B, 2, device="H200", **options).max_tokens_per_rank(16)

    assert tokens(zero_stage=3) > tokens(zero_stage=2) > tokens(zero_stage=1)
    assert tokens(zero_stage=3) > 2 * tokens(zero_stage=3, checkpointing=False)
    assert tokens(zero_stage=3) > 2 * tokens(zero_stage=3, chunked_loss=False)
    with pytest.raises(ValueError, match="leaves no room for a token: shard them"):
        tokens(zero_stage=0)
    with pytest.raises(ValueError, match="zero_stage=4"):
        tokens(zero_stage=4)


def test_frozen_parameters_have_weights_alone():
    node = Topology(nodes=1, ranks_per_node=8)
    adapted = LLAMA_8B.with_adapters(64)
    adapters = adapted.params - LLAMA_8B.params
    # at seven matrices of each layer: q and o, k and v, gate and up, down
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert adapters == 64 * 32 * widths
    head = 4 * 128256 * 4096  # the gradient of a chunked loss
    for zero_stage, whole, sharded in (
        (0, 2 * LLAMA_8B.params + 16 * adapters, 0),
        (2, 2 * LLAMA_8B.params + 4 * adapters, 12 * adapters),
        (3, 0, 2 * LLAMA_8B.params + 16 * adapters),
    ):
        cost = analytic_cost_model(adapted, DEVICES["H100"], node, zero_stage=zero_stage)
        assert (cost.state_bytes, cost.sharded_state_bytes) == (whole + head, sharded)
    # as in recipes/llama-3.1-8b/long_context_lora.yaml
    unsharded = analytic_cost_model(adapted, DEVICES["H100"], node)
    assert unsharded.max_tokens_per_rank(8) > 65_000
    assert max(most_tokens(unsharded, one, 8) for one in choices_of(unsharded, 8)) > 65_536
    with pytest.raises(ValueError, match="leaves no room for a token"):
        analytic_cost_model(LLAMA_8B, DEVICES["H100"], node).max_tokens_per_rank(8)


def test_autocast_copies_no_weights_that_have_its_dtype():
    node = Topology(nodes=1, ranks_per_node=8)
    states = []
    for hidden_bytes in (None, 2, 4):
        cast = replace(LLAMA_8B, hidden_bytes=hidden_bytes)
        states.append(analytic_cost_model(cast, DEVICES["H100"], node).state_bytes)
    assert states[0] == states[1] == states[2] - 2 * LLAMA_8B.params


@pytest.mark.parametrize(
    "nodes, ranks", [(1, 1), (1, 8), (2, 8), (2, 4), (3, 2), (2, 12), (2, 16), (5, 3)]
)
def test_bandwidth_is_the_node_s_exactly_inside_nodes(nodes, ranks):
    cost, device = estimate(LLAMA_8B, nodes, ranks, zero_stage=3), DEVICES["H100"]
    assert all(cost.bandwidth(d, False) == device.intra_bytes for d in range(2, ranks + 1))
    for n in range(2, nodes + 1):
        speed = cost.bandwidth(n * ranks, True)  # a part of the bytes stays inside
        assert device.inter_bytes < speed <= 2 * device.inter_bytes


# ---- windows


def test_pairs_of_windows_and_weights_of_active_experts_are_counted():
    model = shape(active_params=4_000, reaches=((9, WINDOW),))
    cost, plain = estimate(model, zero_stage=3), estimate(shape(), zero_stage=3)
    assert cost.attention_s == pytest.approx(plain.attention_s / 4)
    # a token reads its window and a block, in three quarters of the layers
    windows_s = 0.75 * plain.attention_s * 2 * (256 + 128)
    active_s = plain.linear_s * (4000 - 640) / (10_000 - 640)
    assert cost.linear_s == pytest.approx(active_s + windows_s)
    chunks = estimate(shape(active_params=4_000, reaches=((9, Reach(chunk=256)),)), zero_stage=3)
    assert chunks.linear_s == pytest.approx(active_s + 0.75 * plain.attention_s * 256)
    assert (plain.widest_window, cost.widest_window, chunks.widest_window) == (0, 256, 256)
    for name in ("token_bytes", "state_bytes", "sharded_state_bytes", "micro_batch_s"):
        assert getattr(cost, name) == getattr(plain, name)
    lone = estimate(model, ranks=1)
    assert lone.state_bytes == 16.0 * model.params + 4 * model.vocab * model.hidden


def test_heads_that_differ_by_kind_count_by_kind():
    even = shape(layers=4, kv_heads=4, head_dim=32, reaches=((3, WINDOW),))
    by_kind = ((FULL, HeadShape(4, 1, 32)), (WINDOW, HeadShape(4, 4, 16)))
    cost, uneven = estimate(even), estimate(replace(even, head_shapes=by_kind))
    # queries, and keys with values, of one full layer and three with a window
    queries, keys = 4 * 32 + 3 * 4 * 16, 2 * 32 + 3 * 2 * 4 * 16
    assert uneven.ring_bytes == 2 * 3 * keys
    assert uneven.all_to_all_bytes == pytest.approx(2 * 8 / 3 * (2 * queries + keys))
    assert uneven.attention_s == cost.attention_s
    assert uneven.linear_s < cost.linear_s  # windows of half as many numbers
    outputs = [one.activations.kinds[0].output_bytes for one in (cost, uneven)]
    assert outputs[0] - outputs[1] == 2 * 3 * 4 * 16 / 4  # what attention gave, on the mean


# ---- recurrent layers


def recurrent(sizes: RecurrentShape, count: int = 6) -> ModelShape:
    return shape(layers=8, without_attention=6, recurrent=((count, sizes),))


def test_bytes_of_summaries_are_counted():
    cost = estimate(recurrent(DELTA), checkpointing=False)
    # there and back: states and transitions in float32, three rows before a convolution
    assert cost.summary_bytes == 2 * 6 * (4 * 16 * (16 + 8) * 4 + 3 * 96 * 2)
    # Ulysses moves what the two layers with attention have
    assert cost.all_to_all_bytes == 2 * 2 * (2 * 64 + 2 * 2 * 16) * 2
    mamba2 = estimate(recurrent(replace(DELTA, kind="mamba2")))
    assert mamba2.summary_bytes == 2 * 6 * (4 * (16 * 8 + 1) * 4 + 3 * 96 * 2)
    convolution = RecurrentShape(kind="convolution", width=3, channels=64)
    assert estimate(recurrent(convolution)).summary_bytes == 2 * 6 * 2 * 64 * 2


def test_the_scan_of_a_preset_takes_what_was_measured_of_its_kernel():
    # 32,768 tokens of 64 heads: 15.56 ms without checkpointing, as SCAN_EFFICIENCY says
    sizes = RecurrentShape(
        kind="gated_delta",
        key_heads=64,
        value_heads=64,
        key_dim=128,
        value_dim=128,
        width=1,
        channels=0,
    )
    with_scan, without = (
        estimate(recurrent(sizes, count), checkpointing=False).linear_s for count in (1, 0)
    )
    assert (with_scan - without) * 32768 == pytest.approx(15.56e-3, rel=0.07)


# ---- presets


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize(
    "model, billions, active",
    [
        ("gemma-3-27b", 27.0, 27.0),
        ("gpt-oss-120b", 116.8, 5.13),
        ("qwen3-30b-a3b", 30.53, 3.04),
        ("qwen3.5-35b-a3b", 34.66, 3.45 - 0.51),
        ("nemotron-3-nano-30b-a3b", 31.58, 3.58 - 0.35),
        ("qwen3-vl-8b", 8.767, 8.19 - 0.622),
    ],
)
def test_presets_have_the_published_sizes(model, billions, active, device):
    cost, sizes = PRESETS[f"{model}-{device}"], SHAPES[model]
    assert cost.sharded_state_bytes == pytest.approx(16e9 * billions, rel=1e-3)
    # 8 FLOPs for every weight that works on a token; windows and scans are less than that again
    weights_s = 8e9 * active / DEVICES["H100"].flops
    most = 2 if sizes.reaches or sizes.recurrent else 1
    assert weights_s * (1 - 1e-2) < cost.linear_s < most * weights_s * (1 + 1e-2)
    assert cost.max_tokens_per_rank(64) > 30_000
    assert bool(cost.summary_bytes) == bool(sizes.recurrent)
    assert bool(cost.widest_window) == bool(sizes.reaches)


# ---- refused


def test_shapes_without_meaning_are_refused():
    with pytest.raises(ValueError, match="63 layers with a window or a chunk, of 62 layers"):
        replace(SHAPES["gemma-3-27b"], reaches=((63, WINDOW),))
    with pytest.raises(ValueError, match="9 gated delta layers, of 8 layers"):
        recurrent(DELTA, 9)
    with pytest.raises(ValueError, match="'rwkv' of recurrent layer: expected one of gated_delta"):
        replace(DELTA, kind="rwkv")


def test_memory_under_autocast_is_not_below_that_of_an_h100():
    # 16 checkpointed layers of 2,048 with float32 weights, in bfloat16 autocast: the peaks of
    # micro-batches of 16,384 and of 32,768 tokens (docs/limits.md)
    sizes = {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128}
    sizes |= {"intermediate": 8192, "vocab": 128256, "params": 1_269_368_832}
    cost = estimate(shape(**sizes, dtype_bytes=2, hidden_bytes=4), ranks=1)
    state = cost.state_bytes + cost.sharded_state_bytes
    # when the loss is computed: with copies of the weights, and the gradient of the head
    of_loss = 2 * sizes["params"] + 4 * sizes["vocab"] * sizes["hidden"]
    (layer,) = cost.activations.kinds
    kept = cost.activations.base_bytes + 16 * (layer.input_bytes + layer.output_bytes)
    for tokens, measured_gib in ((16384, 26.59), (32768, 30.98)):
        loss = state + tokens * (kept + cost.activations.head_bytes)
        replay = state - of_loss + tokens * cost.token_bytes
        assert max(loss, replay) / 2**30 == pytest.approx(measured_gib, rel=0.04)
        # a plan counts what either moment holds
        assert measured_gib <= (state + tokens * cost.token_bytes) / 2**30 <= 1.1 * measured_gib


def test_an_mlp_that_is_narrower_than_its_layer_gains_nothing_by_tiles():
    cost = estimate(shape(hidden=512, intermediate=48))
    assert cost.activations.kinds[0].tiled_bytes == 0
