"""A tiny Llama with any of PEFT's methods, each adapter far from doing nothing."""

import warnings
from dataclasses import fields
from importlib.util import find_spec

import torch
from peft import PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as of_lora

from tests.hf.tiny import tiny_llama

CAUSAL = {"task_type": "CAUSAL_LM"}
LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
PROMPT = {"num_virtual_tokens": 4}

# Options of every method, besides the layers that it adapts.
OPTIONS = {
    "PROMPT_TUNING": PROMPT,
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2, **PROMPT},
    "P_TUNING": {"encoder_hidden_size": 8, **PROMPT},
    "PREFIX_TUNING": PROMPT,
    "CARTRIDGE": PROMPT,
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "LORA": {"r": 4, **LAYERS},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, **LAYERS},
    "ADAMSS": {"r": 8, "num_subspaces": 2, **LAYERS},
    "BOFT": {"boft_block_size": 4, **LAYERS},
    "IA3": {"feedforward_modules": ["down_proj"], **LAYERS},
    "LILY": {"r": 4, **LAYERS},
    "LOHA": {"r": 4, **LAYERS},
    "LOKR": {"r": 4, **LAYERS},
    "OFT": {"oft_block_size": 4, **LAYERS},
    "POLY": {"r": 4, "n_tasks": 2, **LAYERS},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "VERA": {"r": 4, **LAYERS},
    "FROD": {"progressbar": False, "target_modules": ["q_proj", "o_proj"]},
    "PVERA": {"r": 4, **LAYERS},
    "FOURIERFT": {"n_frequency": 20, **LAYERS},
    "GLORA": {"r": 4, **LAYERS},
    "HRA": {"r": 4, **LAYERS},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8, **LAYERS},
    "UNILORA": {"r": 4, "theta_d_length": 32, **LAYERS},
    "MISS": {"r": 4, **LAYERS},
    "RANDLORA": {"r": 4, **LAYERS},
    "ROAD": {"group_size": 8, **LAYERS},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5, 7], "target_modules": ["embed_tokens"]},
    "HIRA": {"r": 4, **LAYERS},
    "SHIRA": {"r": 4, "random_seed": 0, **LAYERS},
    "C3A": {"block_size": 8, **LAYERS},
    "WAVEFT": {"n_frequency": 20, **LAYERS},
    "OSF": {"effective_rank": 4, **LAYERS},
    "DELORA": {"r": 4, **LAYERS},
    "GRALORA": {"r": 4, "gralora_k": 2, **LAYERS},
    "TINYLORA": {"r": 2, "u": 4, **LAYERS},
    "PSOFT": {"r": 4, **LAYERS},
    "PEANUT": {"r": 4, **LAYERS},
    "SHADOW": {"r": 4, "shadow_dropout": 0.0},
    "SUPERTUNING": {"sparsity": 0.9, **LAYERS},
    "DEFT": {"r": 4, **LAYERS},
    "BEFT": {"target_modules": ["v_proj"]},
}


def _part(name, **options):
    """A part of LoRA's configuration; None on a version of PEFT that does not have it."""
    kind = getattr(of_lora, name, None)
    return kind and kind(**options)


BLOCKS = {"target_modules_bd_a": ["down_proj"], "target_modules_bd_b": ["q_proj", "v_proj"]}

# Further options that change what a layer computes, by the name of a case.
VARIANTS = {
    "LORA dora": {"use_dora": True},
    "LORA rslora": {"use_rslora": True},
    "LORA pissa": {"init_lora_weights": "pissa"},
    "LORA olora": {"init_lora_weights": "olora"},
    "LORA orthogonal": {"init_lora_weights": "orthogonal"},
    "LORA mica": {"init_lora_weights": "mica"},
    "LORA bias": {"lora_bias": True, "bias": "lora_only"},
    "LORA alora": {"alora_invocation_tokens": [7, 8]},
    "LORA bdlora": {"use_bdlora": _part("BdLoraConfig", nblocks=2, **BLOCKS)},
    "LORA kasa": {"kasa_config": _part("KasaConfig")},
    "LORA monteclora": {"monteclora_config": _part("MontecloraConfig", num_samples=2)},
    "LORA velora": {"velora_config": _part("VeloraConfig", num_groups=4, init_type="random")},
    "LORA velora, average": {"velora_config": _part("VeloraConfig", num_groups=4)},
    "LORA tokens": {"trainable_token_indices": [3, 5, 7]},
    "LORA replicated": {"layer_replication": [(0, 2), (1, 2)]},
    "LORA embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "LORA patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "LOHA module dropout": {"module_dropout": 0.5},
    "LOKR rank dropout": {"rank_dropout": 0.5},
    "BOFT dropout": {"boft_dropout": 0.5},
    "PVERA seed": {"generator_seed": 0},
    "OFT coft": {"coft": True, "use_cayley_neumann": False},
    "HRA gs": {"apply_GS": True},
    "GRALORA hybrid": {"hybrid_r": 2},
    "ADAMSS asa": {"use_asa": True},
}


def config_of(name):
    """The configuration of a method, or of a case of VARIANTS."""
    kind = name.partition(" ")[0]
    given = {**CAUSAL, **OPTIONS[kind], **VARIANTS.get(name, {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**given)


def is_available(name):
    """Tell if PEFT has a method, and the options of a case."""
    kind = name.partition(" ")[0]
    if kind not in list(PeftType) or (kind == "ADAMSS" and find_spec("sklearn") is None):
        return False
    options = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])}
    return options >= VARIANTS.get(name, {}).keys()


def adapted(name):
    """A tiny Llama in float64 with such an adapter, no part of which is zero."""
    model = tiny_llama(torch.float32)  # some adapters decompose matrices, in float32 alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, config_of(name))
    if not name.startswith("ADAMSS"):  # it computes in the dtype that it was made with
        model = model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
