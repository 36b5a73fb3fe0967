"""Bytes that a layer is counted to keep, on tensors without memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_flexseq.hf.engine.layer_trial import LayerTrial, count_bytes
from hf_flexseq.hf.model.rehearsal import fake_copy

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


def test_one_layer_of_a_kind_keeps_what_each_of_all_layers_keeps():
    found = []
    for skips in (True, False):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copied = fake_copy(llama(), torch.float32, mode)
        found.append(LayerTrial(copied, mode, None, skips=skips).count([]))
    assert found[0] == found[1]


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
