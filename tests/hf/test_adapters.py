"""Every method of PEFT trains as under the plain trainers, or is refused by name."""

import warnings
from dataclasses import fields
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftType, get_peft_model
from peft import mapping as of_peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora import config as of_lora
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, SFTTrainer

from hf_flexseq.base.versions import untested
from hf_flexseq.hf.model.adapters import EXACT, REFUSED
from hf_flexseq.hf.model.checks import check_model
from tests.differential.case import Case
from tests.differential.runs import both, here, run
from tests.hf.objectives import pairs
from tests.hf.plain import dataset, float64_loss
from tests.hf.tiny import refused, tiny_llama
from tests.hf.trainers import trainer_of, weights_apart, word_tokenizer
from tests.ranks import run_ranks
from tests.versions import since

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
    "LORA saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "LORA saved, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "LORA plus": {},
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
    # some adapters decompose matrices, in float32 alone
    model = tiny_llama(torch.float32, tie_word_embeddings=name.endswith("tied"))
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


PROMPTS = {"PROMPT_TUNING", "P_TUNING"}  # see test_prompts.py
INEXACT = {  # by case: what the message says
    "PREFIX_TUNING": "PREFIX_TUNING of PEFT .its keys are in no sequence",
    "CARTRIDGE": "CARTRIDGE of PEFT .its keys are in no sequence",
    "MULTITASK_PROMPT_TUNING": "MULTITASK_PROMPT_TUNING of PEFT .its virtual tokens depend",
    "CPT": "CPT of PEFT .it weights the loss of tokens",
    "ADAPTION_PROMPT": "ADAPTION_PROMPT of PEFT .it changes the layers' attention",
    "LILY": "LILY of PEFT .it mixes experts by a mean over all tokens",
    "POLY": "POLY of PEFT .it takes one task for each row",
    "SHADOW": "SHADOW of PEFT .its second network attends over whole rows",
    "LORA alora": r"alora_invocation_tokens=\[7, 8\] of PEFT's LORA .it looks for one invocation",
    "LORA monteclora": "monteclora_config=.* of PEFT's LORA .its random numbers hold for all",
    "LORA velora, average": "velora_config=.* of PEFT's LORA .it takes a mean over all tokens",
    "LORA replicated": "layer_replication=.* of PEFT's LORA .copied layers have configurations",
    "LOHA module dropout": "module_dropout=0.5 of PEFT's LOHA .its random numbers hold for all",
    "LOKR rank dropout": "rank_dropout=0.5 of PEFT's LOKR .its random numbers hold for all",
    "BOFT dropout": "boft_dropout=0.5 of PEFT's BOFT .its random numbers hold for all",
    "PVERA seed": "generator_seed=0 of PEFT's PVERA .a recomputed layer would draw other numbers",
}
CASES = [name for name in (*OPTIONS, *VARIANTS) if is_available(name)]
NOISY = ["PVERA"]  # its noise is drawn for each token, so weights are never those of another run
TRAINED = [name for name in CASES if name not in (*INEXACT, *NOISY)]

# Of the update. Some methods compute in float32, as does the loss of a head with an adapter, and
# TRL computes log-probabilities of DPO in it.
BOUNDS = dict.fromkeys(("ADAMSS", "ADAMSS asa", "C3A", "DEFT", "FOURIERFT"), 1e-5)
BOUNDS |= dict.fromkeys(("LORA embedding", "LORA saved", "LORA saved, tied"), 1e-6)
BOUND = {"trainer": 1e-10, "sft": 1e-10, "dpo": 1e-5}

# What TRL or PEFT itself refuses.
NOT_IN_TRL = {
    "sft": ["LORA embedding"],
    "dpo": ["LORA embedding", "LORA bias", "ADALORA", "PSOFT", *PROMPTS]
    + ["LORA pissa", "LORA olora", "LORA mica"],
}


# ---- the tables


@pytest.mark.skipif(untested("peft") is not None, reason="the tables hold for tested versions")
@since("peft", "0.20", "methods that have gone")
def test_every_method_of_peft_is_in_a_table():
    of_tables = EXACT | REFUSED.keys() | PROMPTS
    assert {kind.value for kind in PeftType} <= of_tables
    assert {name.partition(" ")[0] for name in (*TRAINED, *NOISY)} <= EXACT | PROMPTS


@pytest.mark.parametrize("name", [name for name in CASES if name in INEXACT])
def test_methods_that_look_beyond_a_token_are_refused_by_name(name, tmp_path):
    model = tiny_llama()
    model.peft_config = {"default": config_of(name)}
    with refused(f"hf_flexseq does not support {INEXACT[name]}"):
        trainer_of(Trainer, tmp_path, model=model, flexseq={})


# ---- the trial


class NewConfig(LoraConfig):
    def __post_init__(self):
        super().__post_init__()
        self.peft_type = "NEW"


class NewModel(LoraModel):
    mixes = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for layer in self.modules():
            if self.mixes and isinstance(layer, LoraLayer):
                layer.register_forward_hook(lambda _, given, out: out + out.mean(1, True))


def new_adapter(monkeypatch, *, mixes):
    monkeypatch.setitem(of_peft.PEFT_TYPE_TO_CONFIG_MAPPING, "NEW", NewConfig)
    monkeypatch.setitem(of_peft.PEFT_TYPE_TO_TUNER_MAPPING, "NEW", NewModel)
    monkeypatch.setitem(of_peft.PEFT_TYPE_TO_PREFIX_MAPPING, "NEW", "lora_")
    monkeypatch.setattr(NewModel, "mixes", mixes)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(tiny_llama(), NewConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.slow
def test_an_unknown_method_of_tokens_trains_exactly_and_one_of_rows_is_refused(
    monkeypatch, tmp_path
):
    case = Case(
        model=partial(new_adapter, monkeypatch, mixes=False),
        stock_loss=float64_loss,
        flexseq={"max_tokens_per_rank": 64},
    )
    assert weights_apart(*here(case, tmp_path)) < 1e-10
    with refused("NEW of PEFT, which is in no table .*the first module whose output differs"):
        trainer_of(Trainer, tmp_path, model=new_adapter(monkeypatch, mixes=True), flexseq={})


# ---- training


def rows():
    """Documents, most of which have tokens 7 and 8 in the middle."""
    examples = dataset(16)
    for example in examples:
        tokens = example["input_ids"]
        tokens[len(tokens) // 3 : len(tokens) // 3 + 2] = [7, 8][: len(tokens)]
    return examples


OF_DPO = {
    "config": DPOConfig,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
    "beta": 0.5,
    "processing_class": word_tokenizer(),
    "data_collator": None,
}


def with_two_rates(model):
    """LoRA+, whose second factors have another learning rate."""
    optimizer = create_loraplus_optimizer(
        model, optimizer_cls=torch.optim.SGD, lr=1e-2, loraplus_lr_ratio=16
    )
    return {"optimizers": (optimizer, None)}


def case_of(kind, name):
    """A trainer of two steps, each of several micro-batches."""
    base, settings = {
        "trainer": (Trainer, {"train_dataset": rows()}),
        "sft": (SFTTrainer, {"train_dataset": Dataset.from_list(rows())}),
        "dpo": (DPOTrainer, {"train_dataset": pairs(16), **OF_DPO}),
    }[kind]
    return Case(
        base=base,
        model=partial(adapted, name),
        settings={"max_steps": 2, "learning_rate": 1.0, **settings},
        stock_loss=float64_loss if kind == "trainer" else None,
        flexseq={"max_tokens_per_rank": 64},
        **({"of_model": with_two_rates} if name == "LORA plus" else {}),
    )


SOME = [
    *(("trainer", name) for name in ("ADALORA", "OSF", "LORA tokens", "LORA dora")),
    ("trainer", "LORA saved, tied"),
    ("sft", "ADALORA"),
    ("dpo", "OFT"),
]
ALL = [(kind, name) for kind in BOUND for name in TRAINED if name not in NOT_IN_TRL.get(kind, ())]


@pytest.mark.processes
@pytest.mark.parametrize(
    "cases",
    [SOME, pytest.param(ALL, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])],
    ids=["some", "all"],
)
def test_adapters_train_as_under_the_plain_trainers(cases, tmp_path):
    cases = [case for case in cases if is_available(case[1])]
    cases = {case: case_of(*case) for case in cases}
    for (kind, name), stock, by_rank in both(cases, tmp_path, seconds=900):
        packed = run(0, 1, cases[kind, name], tmp_path)
        bound = max(BOUND[kind], BOUNDS.get(name, 0))
        for ours in (packed, *by_rank):
            assert weights_apart(stock, ours) < bound, (kind, name)


# ---- parameters that share memory


@since("peft", "0.20", "adapters of tied embeddings are trained apart")
def test_adapters_that_share_memory_are_refused(tmp_path):
    """Under DDP the plain Trainer, too, ends far from one process: by 0.7 of the update here."""
    options = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    model = get_peft_model(tiny_llama(tie_word_embeddings=True), LoraConfig(r=4, **options))
    with refused("embed_tokens.lora_embedding_B.default and .*lm_head.lora_A.*share memory"):
        check_model(model.get_base_model())


def check_sharded(rank, world_size):
    model = tiny_llama()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            mesh = init_device_mesh("cpu", (world_size,))
            part = parameter.detach().clone()
            sharded = distribute_tensor(part, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert rank == 0 or len(set(places)) < len(places), "a sharded tensor begins nowhere itself"
    check_model(model)


@pytest.mark.processes
def test_sharded_parameters_share_no_memory():
    run_ranks(check_sharded, 2)
