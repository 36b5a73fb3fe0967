"""Bytes that a layer is counted to keep, on tensors without memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_flexseq.hf.engine import layer_trial
from hf_flexseq.hf.engine.layer_trial import count_bytes
from hf_flexseq.kernels.convolution import causal_convolution_of_rows
from hf_flexseq.kernels.scans import kimi
from hf_flexseq.kernels.scans.grid import CHUNK, ChunkGrid
from hf_flexseq.memory.live_bytes import LiveBytes
from tests.ranks import run_ranks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
WIDTH, INSIDE, QUERIES, KEYS, HEADS = 64, 96, 64, 64, 4  # keys and values together


def llama(**config):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **config}))


def kept_by_hand(moved, between, copies=2):
    """Bytes of a token in a layer of a Llama. moved: bytes of a number in matrix products;
    between: of one between layers. copies: of normalised rows, for the matrices that read them."""
    norms = 2 * (4 + between) * WIDTH + 2 * 4  # inputs in float32, normalised rows, and a factor
    attention = moved * (2 * QUERIES + KEYS) + 4 * HEADS
    return norms + copies * moved * WIDTH + attention + 4 * moved * INSIDE


@pytest.mark.slow
def test_a_llama_keeps_what_is_counted_by_hand_in_every_dtype():
    model = llama()
    state = torch.random.get_rng_state()
    counted = count_bytes(model, dtype=torch.float32)
    assert bool((torch.random.get_rng_state() == state).all())
    (layer,) = counted.kinds
    assert counted.order == (0, 0, 0)
    assert counted.mlp_params == 3 * 3 * WIDTH * INSIDE
    assert (layer.input_bytes, layer.output_bytes) == (4 * WIDTH, 4 * QUERIES + 4 * HEADS)
    assert layer.kept_bytes == kept_by_hand(4, 4)
    assert layer.mlp_bytes == 4 * 4 * INSIDE

    (layer,) = count_bytes(model, dtype=torch.bfloat16).kinds
    assert layer.input_bytes == 2 * WIDTH
    assert layer.kept_bytes == kept_by_hand(2, 2)

    # autocast makes a copy in bfloat16 for each of five matrices, and the output is in bfloat16
    (layer,) = count_bytes(model, dtype=torch.float32, autocast=torch.bfloat16).kinds
    assert (layer.input_bytes, layer.output_bytes) == (4 * WIDTH, 2 * QUERIES + 4 * HEADS)
    assert layer.kept_bytes == kept_by_hand(2, 4, copies=5)


def test_a_backward_holds_the_gradients_of_an_mlp_besides_what_a_layer_keeps():
    (layer,) = count_bytes(llama(), dtype=torch.float32).kinds
    # the gradients of the output, of the MLP's product instead of it, and of its two factors; the
    # input is kept by a norm
    assert layer.peak_bytes == layer.kept_bytes + 4 * WIDTH + 4 * 2 * INSIDE
    # of all inside of the MLP, a gradient of its input is whole under tiles
    assert layer.tiled_bytes == 4 * (6 * INSIDE - WIDTH)
    assert layer.kept_bytes - layer.mlp_bytes < layer.rest_bytes < layer.peak_bytes


def test_frozen_weights_keep_no_inputs_and_adapters_are_counted():
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), options)
    (layer,) = count_bytes(model.get_base_model(), dtype=torch.float32).kinds
    norms = 2 * 4 * WIDTH + 2 * 4  # their inputs, and a factor
    adapters = 4 * WIDTH + 2 * 4 * 2  # what both read, and two rows of rank 2
    attention = 4 * (2 * QUERIES + KEYS) + 4 * HEADS
    mlp = 3 * 4 * INSIDE  # all but the product, which a frozen matrix reads
    assert layer.kept_bytes == norms + adapters + attention + mlp
    assert all(one.grad is None for one in model.parameters())
    assert not any(one.is_meta for one in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_keep_the_rows_of_all_that_work_on_a_token(experts):
    config = Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    )
    config._experts_implementation = experts
    (layer,) = count_bytes(Qwen3MoeForCausalLM(config), dtype=torch.float32).kinds
    assert layer.mlp_bytes == 0
    # of each of two experts: gate and up, the activation, the product
    assert layer.kept_bytes > kept_by_hand(4, 4) - 16 * INSIDE + 2 * 4 * 4 * 32


def test_layers_of_one_kind_count_once_and_others_by_themselves():
    config = Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[0],
    )
    counted = count_bytes(Qwen3MoeForCausalLM(config), dtype=torch.float32)
    assert counted.order == (0, 1, 1)
    dense, sparse = counted.kinds
    assert dense.mlp_bytes == 16 * INSIDE
    assert sparse.mlp_bytes == 0
    assert counted.has_experts == (False, True)


@pytest.mark.slow
def test_what_a_copy_does_not_have_is_not_counted_again(monkeypatch):
    model = llama()
    counted = count_bytes(model, dtype=torch.float32)
    model.eval()
    model.config.use_cache = not model.config.use_cache
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with monkeypatch.context() as patch:
        patch.delattr(layer_trial, "LayerTrial")
        assert count_bytes(model, dtype=torch.float32) is counted
    model.config.rms_norm_eps *= 2
    assert count_bytes(model, dtype=torch.float32) is not counted
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    assert count_bytes(model, dtype=torch.float32).order == (0, 1, 1)


@pytest.mark.slow
def test_a_module_of_the_user_that_needs_numbers_is_left_out():
    class Reads(torch.nn.Module):
        def forward(self, hidden):
            return hidden * float(hidden.detach().numpy().sum())

    model = llama()
    model.model.layers[1].mlp.act_fn = Reads()
    counted = count_bytes(model, dtype=torch.float32)
    assert counted.kinds == count_bytes(llama(), dtype=torch.float32).kinds


def test_a_model_whose_layers_are_not_found_is_not_counted():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    assert count_bytes(model, dtype=torch.float32) is None


def count_in_half_precision(rank, world_size):
    return count_bytes(llama(), dtype=torch.float16)


@pytest.mark.processes
def test_what_a_forked_rank_has_counted_is_known_afterwards(monkeypatch):
    counted, _ = run_ranks(count_in_half_precision, 2)
    monkeypatch.delattr(layer_trial, "LayerTrial")
    assert count_bytes(llama(), dtype=torch.float16) == counted


def convolved(grid):
    x, weight = (torch.randn(size, requires_grad=True) for size in ((grid.tokens, 6), (6, 4)))
    return causal_convolution_of_rows(x, weight, None, computes=grid.computes)


def decayed(grid):
    q, k, v, g = (torch.randn(grid.tokens, 1, 6, requires_grad=True) for _ in range(4))
    beta = torch.randn(grid.tokens, 1, requires_grad=True)
    return sum(x.sum() for x in kimi.chunk_inputs(q, k, v, g, beta, grid, l2norm=True))


@pytest.mark.slow
@pytest.mark.parametrize("run", [convolved, decayed])
def test_blocks_of_rows_need_not_be_computed_to_count_what_lives(run):
    """Operations that are left out make nothing that grows with the tokens."""
    found = []
    for computes in (True, False):
        with FakeTensorMode():
            grid = ChunkGrid([11 * CHUNK], torch.device("cpu"), computes=computes)
            tracker = LiveBytes(11)
            with tracker:
                out = run(grid)
                kept, peak = tracker.live, tracker.take_peak()
                out.sum().backward()
                found.append((kept, peak, tracker.take_peak()))
    assert found[0] == found[1]
    assert found[0][0] > 0
