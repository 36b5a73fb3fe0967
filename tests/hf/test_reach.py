"""Families of models: on two nodes of two ranks, under random plans with groups of both nodes,
plain and checkpointed, each one's loss and gradients are those of one process; so are those of
LoRA's adapters. Ranks are threads. One family of each code path runs with the other tests, all
with `-m nightly`. Recurrent layers under every strategy are in `tests/attention/recurrent`; what
is refused is in `test_checks.py` and `test_recurrent.py`."""

import random
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from hf_flexseq.base.versions import is_older
from tests.budget import examples, others_nightly
from tests.device import DEVICE
from tests.hf import hybrids
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_checks import EXPERTS, ROPE, SIZES
from tests.hf.tiny import VOCAB, documents, reference_gradients
from tests.plans import random_plan

# Windows and chunks are shorter than the longest of these.
LENGTHS = [1, 2, 17, 5, 23, 3, 40, 11]
WINDOW = {"sliding_window": 7}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED_N = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPS = {"n_group": 2, "topk_group": 1}
LOOPS = {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 2}
MIXED_TWICE = {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FROM_5_24 = ("Dory", "CodeGen", "GPTJ")
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB,
    **WINDOW,
}
FAMILIES = {
    "Llama": {},
    "Llama with yarn": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}},
    "Qwen2": {},
    "Qwen2 with a window": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Mistral with a window": WINDOW,
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 8, "attn_logit_softcapping": 0.5, **MIXED},
    "Gemma3": {"head_dim": 8, "query_pre_attn_scalar": 16, **MIXED},
    "Gemma4": {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, **MIXED},
    "Gemma4 with shared keys": {"head_dim": 8, "global_head_dim": 16, **SHARED_KEYS},
    "GptOss": {"head_dim": 8, **EXPERTS, **MIXED},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": MIXED,
    "Phi": {},
    "Phi3": WINDOW,
    "Granite": {"attention_multiplier": 0.3},
    "SmolLM3": {},
    "Glm4": {"head_dim": 8},
    "Cohere": {},
    "Cohere2": {"head_dim": 8, **MIXED},
    "Ministral": {"head_dim": 8, **MIXED},
    "Exaone4": MIXED,
    "SeedOss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Ernie4_5": {"head_dim": 8},
    "Arcee": {},
    "Apertus": {},
    "Helium": {"head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, **WINDOW},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Llama4": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 9,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "moe_layers": [1],
        **EXPERTS,
    },
    "Mixtral": {**EXPERTS, **WINDOW},
    "Qwen2Moe": {**ROUTED, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**ROUTED, **WINDOW, "use_sliding_window": True},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {**LATENT, **ROUTED_N, "first_k_dense_replace": 1},
    "DeepseekV3": {**LATENT, **ROUTED_N, **GROUPS, "first_k_dense_replace": 1},
    "MiniCPM3": LATENT,
    "LongcatFlash": {
        **LATENT,
        "num_layers": 2,
        "head_dim": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "MiMoV2Flash": {"head_dim": 8, "v_head_dim": 6, **ROUTED_N, **MIXED},
    "Gemma3n": {"head_dim": 8, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], **SHARED_KEYS},
    # transformers 5.24 added the first, and brought the others to its attention interface.
    "Dory": {"head_dim": 8, "num_hidden_layers": 4, **LOOPS, **MIXED_TWICE},
    "CodeGen": {"rotary_dim": 4, **NO_DROPOUT},
    "GPTJ": {"rotary_dim": 4, **NO_DROPOUT},
    # Like some of the families above.
    "Afmoe": {"head_dim": 8, **ROUTED, "num_dense_layers": 1, **MIXED},
    "AXK1": {**LATENT, **ROUTED_N, **GROUPS},
    "Beam": MIXED,
    "Cohere2Moe": {"head_dim": 8, **ROUTED, **MIXED},
    "Cwm": {"head_dim": 8, **MIXED},
    "Dots1": {"head_dim": 8, "n_shared_experts": 1, **ROUTED_N, **GROUPS, **MIXED},
    "ExaoneMoe": {"head_dim": 8, **ROUTED, **MIXED},
    "Flint": {"head_dim": 8, **MIXED},
    "Gemma4Unified": {"head_dim": 8, "global_head_dim": 16, **MIXED},
    "Glm4Moe": {"head_dim": 8, **ROUTED_N, **GROUPS, "first_k_dense_replace": 1},
    "Glm4MoeLite": {**LATENT, **ROUTED_N},
    "GraniteMoeSWA": {**EXPERTS, **MIXED},
    "GraniteSWA": MIXED,
    "JetMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "Laguna": {"head_dim": 8, **ROUTED, **MIXED},
    "Mellum": {"head_dim": 8, **ROUTED, **MIXED},
    "VaultGemma": {"head_dim": 8, "attn_logit_softcapping": 0.5, **MIXED},
    "Youtu": LATENT,
}
# One of each code path: no layer kinds, a window, softcaps, shared keys and two head sizes, sinks
# and experts, chunks and counted positions, latent attention, values of another size than queries,
# two attentions in a layer, an own scale, learned positions, sparse activations, layers that run
# twice. Positions of longrope are in test_positions.py.
TRIED = (
    *("Llama", "Mistral with a window", "Gemma2", "Gemma4 with shared keys", "GptOss", "Llama4"),
    *("DeepseekV3", "MiMoV2Flash", "LongcatFlash", "Granite", "OPT", "Gemma3n", "Dory"),
)
COEFFICIENT = 0.5  # of router losses


def make_model(family, **others):
    """A tiny model of a family; others: of its configuration."""
    if family in FROM_5_24 and is_older("transformers", "5.24"):
        pytest.skip(f"{family} trains from transformers 5.24 on")
    kind = getattr(transformers, family.split()[0] + "ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **FAMILIES[family], **others})
    model = kind._from_config(config, dtype=torch.float64, experts_implementation="eager")
    return model.to(torch.float64).train()  # some routers' weights are in float32


def mixture(family="Mixtral", **others):
    """A tiny mixture of experts that asks for its router loss."""
    options = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return make_model(family, **{**options, **others})


@pytest.fixture
def stays_in_float64(monkeypatch):
    keep_float64(monkeypatch)


def keep_float64(monkeypatch):
    """Norms and routers of transformers compute in float32 whatever the dtype; here they do
    not."""
    to, type_, softmax = torch.Tensor.to, torch.Tensor.type, F.softmax
    matmul = torch.Tensor.__matmul__

    def stays(tensor, dtype):
        return tensor.dtype == torch.float64 and dtype == torch.float32

    def patched_to(tensor, *args, **kwargs):
        dtype = kwargs.get("dtype", args[0] if args else None)
        if stays(tensor, dtype):
            return tensor
        return to(tensor, *args, **kwargs)

    def patched_softmax(tensor, *args, **kwargs):
        if stays(tensor, kwargs.get("dtype")):
            kwargs["dtype"] = None
        return softmax(tensor, *args, **kwargs)

    def patched_type(tensor, dtype=None, **kwargs):
        return tensor if stays(tensor, dtype) else type_(tensor, dtype, **kwargs)

    def patched_matmul(one, other):  # of rotary embeddings: positions are float32, always
        common = torch.promote_types(one.dtype, other.dtype)
        return matmul(to(one, common), to(other, common))

    monkeypatch.setattr(torch.Tensor, "__matmul__", patched_matmul)
    monkeypatch.setattr(torch.Tensor, "to", patched_to)
    monkeypatch.setattr(torch.Tensor, "type", patched_type)
    monkeypatch.setattr(F, "softmax", patched_softmax)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: patched_to(tensor, torch.float32))


def plans_across(lengths, seed):
    """Two random plans, each with a group of ranks of both nodes."""
    rng = random.Random(seed)
    plans = []
    while len(plans) < 2:
        plan = random_plan(lengths, TWO_NODES.world_size, rng, nodes=TWO_NODES.nodes)
        groups = [one for micro_batch in plan.micro_batches for one in micro_batch.groups]
        if any(TWO_NODES.spans_nodes(one.start, one.stop) for one in groups):
            plans.append(plan)
    return plans


def check_family(make, lengths, seed):
    """Compare with one process under two plans, and return the gradients of that process. make:
    returns the model."""
    wanted = reference_gradients(make().to(DEVICE), documents(lengths), attention="eager")
    plans = plans_across(lengths, seed)
    assert worst_error(make, TWO_NODES, plans, documents(lengths), wanted) < 1e-10
    return wanted[1]


@pytest.mark.on_device
@pytest.mark.parametrize("family", others_nightly(FAMILIES, tried=TRIED[: examples(len(TRIED))]))
def test_a_family_is_exact(family, stays_in_float64):
    check_family(partial(make_model, family), LENGTHS, family)


# ---- recurrent layers

# One of each kind: the others differ from these in sizes and in what stands between the mixers.
TRIED_HYBRIDS = ("Qwen3Next", "KimiLinear", "Bamba without attention", "Zamba2", "Lfm2")


@pytest.mark.on_device
@pytest.mark.parametrize(
    "family", others_nightly(HYBRIDS, tried=TRIED_HYBRIDS[: examples(len(TRIED_HYBRIDS))])
)
def test_a_hybrid_is_exact(family, stays_in_float64):
    check_family(partial(make_hybrid, family), hybrids.LENGTHS, family)


# Projections around a convolution and a scan, and those of attention, MLPs and experts.
ADAPTED = ["in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "down_proj"]


def with_lora(family):
    """A hybrid of which adapters alone are trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=ADAPTED, init_lora_weights=False)
    return get_peft_model(make_hybrid(family), config).double()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_adapters_of_a_hybrid_are_exact(family, stays_in_float64):
    trained = {name for name, p in with_lora(family).named_parameters() if p.requires_grad}
    assert [name for name in trained if "linear_attn" in name or "conv.in_proj" in name]
    wanted = check_family(partial(with_lora, family), hybrids.LENGTHS, family)
    assert all(wanted[name].norm() > 0 for name in trained)
