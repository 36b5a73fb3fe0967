"""Estimated cost models, and presets with the published sizes of their models."""

from dataclasses import replace

import pytest

from hf_flexseq.base.layers import Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS, SHAPES
from hf_flexseq.cost.shapes import ModelShape

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
