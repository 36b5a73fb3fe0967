"""Tiny models with recurrent layers, and lengths that show what may go wrong in them: chunks of
64 tokens, convolutions of 3 to 7, and sequences shorter than these."""

import torch
import transformers

from tests.hf.test_checks import SIZES

LENGTHS = [1, 2, 3, 4, 64, 65, 17, 131, 5, 97]

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TWO = {"layer_types": ["linear_attention", "full_attention"]}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
KIMI_DELTA = {"linear_num_heads": 2, "linear_head_dim": 8, **LATENT}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"head_dim": 8, **TWO, **GATED_DELTA}
QWEN_MOE = {**QWEN, **ROUTED, "shared_expert_intermediate_size": 16}

HYBRIDS = {
    "Qwen3Next": QWEN_MOE,
    "Qwen3_5": QWEN,
    "Qwen3_5Moe": QWEN_MOE,
    "OlmoHybrid": {**TWO, **GATED_DELTA, "linear_num_key_heads": 4},
    "KimiLinear": {
        **TWO,
        **KIMI_DELTA,
        **EXPERTS,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "GraniteMoeHybrid": {**TWO, **MAMBA2, **EXPERTS, "shared_intermediate_size": 16},
    "GraniteMoeHybrid without attention": {
        "layer_types": ["linear_attention"] * 2,
        **MAMBA2,
        "num_local_experts": 0,
        "shared_intermediate_size": 16,
    },
    "Bamba": {"attn_layer_indices": [1], **MAMBA2},
    "Bamba without attention": MAMBA2,
    "FalconH1": {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "Zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "Lfm2": CONVOLUTION,
    # Like some of the families above.
    "BailingHybrid": {
        **TWO,
        **LATENT,
        "head_dim": 8,
        **ROUTED,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "Lfm2Moe": {**CONVOLUTION, **ROUTED, "num_dense_layers": 1},
    "Lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 7, "head_dim": 8},
}


def make_hybrid(family, **others):
    """A model in float64 whose states matter: what a token leaves in them lasts for tens of
    tokens. others: of its configuration."""
    kind = getattr(transformers, family.split()[0] + "ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **HYBRIDS[family], **others})
    model = kind._from_config(config, experts_implementation="eager").double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)  # decays of exp(-0.01) to exp(-0.2) at a step of 1
            elif parameter.dim() < 2:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model
