"""Wrong settings raise one clear line when a trainer, an engine or a callback is made; what works
is let through."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama
from trl import SFTTrainer

from hf_flexseq import (
    FlexSeqArguments,
    FlexSeqCallback,
    FlexSeqConfig,
    FlexSeqEngine,
    FlexSeqMixin,
    FlexSeqTrainer,
)
from hf_flexseq.base.versions import OFFLOAD_FROM
from hf_flexseq.hf.engine.accelerator_checks import check_accelerator
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.rehearsal import once_for_equal_models
from hf_flexseq.hf.model.trial import PROBED_FAMILIES
from tests.hf import tiny
from tests.hf.tiny import documents, refused, tiny_llama
from tests.ranks import run_cases
from tests.versions import since

DATA = documents([5, 3, 8])


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate's state outlives its accelerators."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def arguments(folder, cls=FlexSeqConfig, **settings):
    return cls(output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, **settings)


def make_trainer(
    folder, *, cls=FlexSeqTrainer, model=None, data=DATA, collator=None, trainer=None, **settings
):
    return cls(
        model=model or tiny_llama(torch.float32),
        args=arguments(folder, **settings),
        train_dataset=data,
        data_collator=collator,
        **(trainer or {}),
    )


class OwnLoss(FlexSeqTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Unscaled(FlexSeqTrainer):
    loss_is_scaled_for_ga = False


class PreparesInputs(FlexSeqTrainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class MakesSamples(PreparesInputs):
    """Samples that are made of prompts."""

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["prompt"]


# ---- arguments of the Trainer; others are refused together below

FREE = "sync='free' needs ranks .* use sync='auto'"
ACCUMULATION = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
STAGES = {"pipeline_parallel_size": 2}
OFFLOAD = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
WRONG_VALUES = [
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: .*it at None"),
    ({"cost_model": "no-model"}, "cost_model='no-model' is neither a file nor one of"),
    ({"torch_compile_mode": "reduce-overhead"}, "reduce-overhead.*'max-autotune-no-cudagraphs'"),
    ({"planner": "static", "sp_degree": 2}, "sp_degree=2 does not divide 1 nodes of 1 ranks"),
    ({"plan_trace": "/"}, "plan_trace='/' is a folder"),
    ({"ddp_timeout": 0}, "ddp_timeout=0: .*more than 0"),
    ({"ddp_timeout": -1}, "ddp_timeout=-1: .*more than 0"),
    ({"sync": "free", "accelerator_config": ACCUMULATION}, FREE),
    (STAGES, "pipeline_parallel_size=2 does not divide the 1 ranks of the job"),
    ({"pipeline_parallel_size": 0}, "lel_size=0: must be at least 1"),
    (STAGES | {"pipeline_schedule": "gpipe"}, "schedule must be one of .*got 'gpipe'"),
    ({"pipeline_schedule": "seq1f1b"}, "'seq1f1b' needs a pipeline: set pipeline_parallel_size"),
]
UNSUPPORTED = [
    ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'"),
    ({"ddp_static_graph": True}, "ddp_static_graph=True"),
    ({"trainer": {"compute_metrics": lambda predictions: {}}}, "compute_metrics"),
    ({"cls": Unscaled}, "Unscaled: it is not divided by the tokens.*num_items_in_batch"),
    ({"cls": MakesSamples}, "support samples made in PreparesInputs: it makes samples"),
    (STAGES | {"cls": OwnLoss}, "OwnLoss.compute_loss with pipeline_parallel"),
    (STAGES | {"trainer": {"compute_loss_func": len}}, "the loss of .*; set it to 1"),
    (STAGES | {"planner": "zeppelin"}, "planner='zeppelin' with pipeline_paralle"),
    (STAGES | {"strategy": "zigzag"}, "strategy='zigzag' with .*: chunks attend"),
    (STAGES | {"sync": "lockstep"}, "sync='lockstep' with pipeline_parallel_size"),
    (STAGES | {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [(ValueError, *case) for case in WRONG_VALUES]
    + [(NotImplementedError, *case) for case in UNSUPPORTED],
)
def test_settings_that_are_refused(tmp_path, kind, settings, message):
    with refused(message, kind):
        make_trainer(tmp_path, **settings)


@since("transformers", OFFLOAD_FROM, "offload is refused for itself")
def test_offload_of_checkpointing_in_stages(tmp_path):
    with refused("offload=True of activation checkpointing on a CPU with"):
        make_trainer(tmp_path, **STAGES, **OFFLOAD)


@pytest.mark.skipif(
    not hasattr(TrainingArguments, "activation_checkpointing_kwargs"), reason="transformers < 5.23"
)
def test_the_other_spelling_of_checkpointing(tmp_path):
    settings = {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
    make_trainer(tmp_path, activation_checkpointing=True, **settings)


def plain_trainer(folder, **given):
    args = arguments(folder, TrainingArguments)
    return Trainer(model=tiny_llama(), args=args, train_dataset=DATA, **given)


class GenerativeTrainer(FlexSeqMixin, Seq2SeqTrainer):
    """As tools for fine-tuning make it: for scores of generated text."""

    def prediction_step(self, *args, **kwargs):
        return super().prediction_step(*args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        return super().get_batch_samples(*args, **kwargs)


@pytest.mark.slow
def test_all_that_is_refused_is_said_in_one_launch(tmp_path):
    model = tiny_llama(torch.float32, attention_dropout=0.1)
    model.compile()
    settings = {"accelerator_config": {"split_batches": True}, "optim": "lomo"}
    settings |= {"average_tokens_across_devices": False, "torch_compile_mode": "max-autotune"}
    args = arguments(tmp_path, Seq2SeqTrainingArguments, **settings)
    unlabelled = [{"input_ids": row["input_ids"]} for row in DATA]
    wrong = {"train_dataset": unlabelled, "compute_metrics": lambda predictions: {}}
    with pytest.raises(NotImplementedError) as raised:
        GenerativeTrainer(model, args, flexseq_args=FlexSeqArguments(), **wrong)
    head, *lines = str(raised.value).splitlines()
    assert head == f"{len(lines)} reasons to refuse this:"
    assert [line.split(". ")[0] for line in lines] == [f"{n + 1}" for n in range(len(lines))]
    wanted = [
        "average_tokens_across_devices=False: .*; set it to True",
        "optim='lomo': .*; use adamw_torch",
        "get_batch_samples would be ignored, .*: change samples in the dataset",
        "split_batches=True: .*; leave it at False",
        "torch.compile in mode 'max-autotune': .*; use torch_compile_mode=",
        "LlamaForCausalLM: attention_dropout=0.1: .*; load the model with from_pretrained",
        "LlamaForCausalLM: it is compiled, .*; leave out model.compile",
        "whole logits for compute_metrics .*: give preprocess_logits_for_metrics",
        r"train_dataset has the columns \['input_ids'\] but no labels: give `labels`",
    ]
    for line, message in zip(lines, wanted, strict=True):
        assert re.search(message, line), line


def test_mistakes_alone_are_a_value_error(tmp_path):
    settings = {"average_tokens_across_devices": False, "ddp_timeout": -1}
    with pytest.raises(ValueError, match="^3 reasons") as raised:
        make_trainer(tmp_path, cls=OwnLoss, data=[{"input_ids": [1]}], **settings)
    assert not isinstance(raised.value, NotImplementedError)
    trainer = plain_trainer(tmp_path)
    trainer.args.ddp_timeout, trainer.args._n_gpu = -1, 2
    with pytest.raises(ValueError, match="(?s)n_gpu=2.*ddp_timeout=-1"):
        FlexSeqCallback(trainer)
    assert type(trainer) is Trainer
    trainer = plain_trainer(tmp_path)
    before = {**vars(trainer)}
    with pytest.raises(ValueError, match="does not exist; make it"):
        FlexSeqCallback(trainer, FlexSeqArguments(plan_trace=f"{tmp_path}/none/trace.jsonl"))
    assert vars(trainer) == before
    with pytest.raises(TypeError, match=r"got FlexSeqArguments, not a trainer: make the trainer"):
        FlexSeqCallback(FlexSeqArguments())


def test_metrics_that_sft_would_give_logits(tmp_path):
    trainer = object.__new__(type("Mine", (FlexSeqMixin, SFTTrainer), {}))
    plain = plain_trainer(tmp_path, compute_metrics=lambda *values, **others: None)
    trainer.__dict__ = {**vars(plain), "_is_vision_dataset": False}
    with refused("Mine with compute_metrics.*: its head returns no logits"):
        trainer._setup_flexseq(FlexSeqArguments())


def zero(stage):
    settings = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    return {"sync": "free", "deepspeed": settings}


def settings_of_two_ranks(rank, world_size, folder, settings, message):
    import deepspeed  # which takes long

    deepspeed.init_distributed("gloo")
    with refused(message, ValueError) if message else nullcontext():
        make_trainer(folder, **settings)


@pytest.mark.processes
def test_settings_of_two_ranks(tmp_path):
    degree_of_three = {"planner": "static", "sp_degree": 3}
    cases = [
        (tmp_path, degree_of_three, "sp_degree=3 does not divide 1 nodes of 2 ranks"),
        (tmp_path, zero(1), None),
        (tmp_path, zero(2), "sync='free' needs ranks"),
    ]
    run_cases(settings_of_two_ranks, 2, cases)


def test_a_cost_model_that_does_not_parse(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text("{", encoding="utf-8")
    with refused(f"cost model file {path}: ", ValueError):
        make_trainer(tmp_path, cost_model=str(path))


# ---- the accelerator of a loop of one's own


STATIC_GRAPH = DistributedDataParallelKwargs(static_graph=True)


@pytest.mark.parametrize(
    ("given", "options", "kind", "message"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ValueError, "_steps=4.*accumulation=..."),
        ({"kwargs_handlers": [STATIC_GRAPH]}, {}, NotImplementedError, "static_graph"),
        ({}, STAGES, NotImplementedError, "pipeline_parallel_size=2 in a loop of your own"),
    ],
)
def test_accelerators_and_options(given, options, kind, message):
    with refused(message, kind):
        FlexSeqEngine(Accelerator(cpu=True, **given), FlexSeqArguments(**options))


@pytest.mark.parametrize("size", ["cp_size", "sp_size", "tp_size"])
def test_other_parallelism_over_the_same_ranks(size):
    accelerator = Accelerator(cpu=True)
    # accelerate itself refuses this on a CPU
    sizes = {"cp_size": 1, "sp_size": 1, "tp_size": 1, size: 2}
    accelerator.state.parallelism_config = SimpleNamespace(**sizes)
    with pytest.raises(ValueError, match=f"{size}=2: .* leave parallelism_config out"):
        FlexSeqEngine(accelerator, FlexSeqArguments())


def test_a_stateful_dataloader_with_lookahead():
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.use_stateful_dataloader = True
    with pytest.raises(ValueError, match="lookahead=None: .*set lookahead=0"):
        FlexSeqEngine(accelerator, FlexSeqArguments())
    FlexSeqEngine(accelerator, FlexSeqArguments(lookahead=0))


# ---- models

SIZES = {**tiny.SIZES, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention"]


def meta_model(name, kind="ForCausalLM", **config):
    cls = getattr(transformers, name + kind)
    with torch.device("meta"):
        return cls(cls.config_class(**{**SIZES, **config}))


NO_DROPOUT = {"attention_probs_dropout_prob": 0.0}
LATENT = {"kv_lora_rank": 16, "num_key_value_heads": 4}
ROUTER = {"output_router_logits": True}
CLASSES = {"kind": "ForSequenceClassification"}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CODES = {"sliding_window": 4, "codebook_size": 8, "ffn_dim": 48}
DYNAMIC = {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}
GENERATION = {"kind": "ForConditionalGeneration"}
DROPPED = {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.1}
tries_opt = since("transformers", "5.23", "it is refused for itself, too")
# before 5.23 the module itself says less, and is refused for that
MASK = (
    "layer 0: its mask shows full attention, but its call and configuration say window 4|"
    "MoshiAttention is not given the keyword arguments"
)
SOFTCAP = "layer 0 asks for softcap=None, but its configuration says softcap=3.0"


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("MiniMax", LINEAR, "layers of the kinds linear_attention"),
        ("Moshi", CODES, MASK),
        ("Llama", {"attn_logit_softcapping": 3.0}, SOFTCAP),
        ("Falcon", {}, "does not call transformers' attention in"),
        ("Bloom", {}, "counts positions itself"),
        ("Doge", {}, "DogeAttention asks for a mask of its own"),
        ("DeepseekV32", {}, "layers of the kinds (indexed|deepseek_sparse)_attention"),
        ("Nemotron", {"head_dim": 8}, "NemotronAttention is not given the keyword arguments of"),
        (
            "Llama",
            {"attention_dropout": 0.1},
            r"0.1: .* from_pretrained\(..., attention_dropout=0",
        ),
        ("GPT2", {"kind": "LMHeadModel", "n_embd": 32, "n_head": 4}, "attn_pdrop=0.1"),
        pytest.param("OPT", DROPPED, "layerdrop=0.1: ranks", marks=tries_opt),
        ("DeepseekV3", ROUTER | LATENT, "does not add a load_balancing_loss_func"),
        ("Mixtral", ROUTER | CLASSES | EXPERTS, "=True: classifiers have no router loss"),
        ("Llama", DYNAMIC, "rope_type='dynamic'"),
        ("Roberta", {"is_decoder": True, **NO_DROPOUT}, "counts positions from its padding_idx"),
        ("Bert", {"kind": "LMHeadModel", **NO_DROPOUT}, "asks for attention in both directions"),
        ("Llama", {"kind": "ForQuestionAnswering"}, "its loss is ForQuestionAnswering"),
        ("T5Gemma", GENERATION, "it is an encoder-decoder"),
    ],
)
def test_models_that_cannot_be_trained(name, config, message):
    with refused(message) as raised:
        check_model(meta_model(name, **config))
    assert type(raised.value) is NotImplementedError


def test_sinks_that_a_layer_keeps_to_itself_are_refused(monkeypatch):
    """Its own function would read them from the layer, and ours gets none."""
    original = modeling_llama.LlamaAttention.__init__

    def with_sinks(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.sinks = nn.Parameter(torch.zeros(4))

    monkeypatch.setattr(modeling_llama.LlamaAttention, "__init__", with_sinks)
    with refused("layer 0 asks for sinks that its call does not give"):
        check_model(meta_model("Llama"))


GPT2 = {"kind": "LMHeadModel", "n_embd": 32, "n_head": 4, "n_layer": 2}


class WithoutItems(transformers.LlamaForCausalLM):
    """Divides by its own targets, whatever it is told."""

    def forward(self, *args, num_items_in_batch=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_class_that_says_it_takes_no_items_is_believed_if_it_drops_them():
    for kind in (transformers.LlamaForCausalLM, WithoutItems):
        model = tiny_llama(cls=kind)
        model.accepts_loss_kwargs = False
        refuses = kind is WithoutItems
        with refused("does not take num_items_in_batch") if refuses else nullcontext():
            check_model(model)


NO_WINDOW = {"layer_types": MIXED[::-1], "sliding_window": None}
CHUNKS = {"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": -2}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Mistral", {"sliding_window": 0}, "layer 0 is sliding_attention over sliding_window=0"),
        ("Gemma3", NO_WINDOW, "layer 1 is sliding_attention, but config.sliding_window is None"),
        ("Llama4", CHUNKS, "layer 1 is chunked_attention over attention_chunk_size=-2"),
    ],
)
def test_configurations_without_a_meaning(name, config, message):
    with refused(message, ValueError):
        check_model(meta_model(name, **config))


def test_a_trial_that_ends_early(monkeypatch):
    model = tiny_llama()

    def breaks(*args, **kwargs):
        raise RuntimeError("no numbers here")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", breaks)
    with refused("tried to the end .RuntimeError: no numbers"):
        check_model(model)
    monkeypatch.setitem(PROBED_FAMILIES, "llama", "in this test")
    check_model(model)


class Mixing(torch.nn.Module):
    """Replaces attention without asking the interface."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states.cumsum(1), None


def test_a_layer_that_never_asks_for_attention():
    model = tiny_llama()
    model.model.layers[1].self_attn = Mixing()
    with refused("its layer 1 does not call transformers'"):
        check_model(model)


class ModelOfOwnLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_loss_of_its_own():
    with refused("a loss of its own, a mean over"):
        check_model(tiny_llama(cls=ModelOfOwnLoss))


def diff_llama():
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SIZES))


def with_lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (diff_llama, "calls attention twice in a layer"),
        (with_lora, "a PEFT model with pipeline_parallel_size=2"),
    ],
)
def test_models_that_have_no_pipeline(tmp_path, make, message):
    with refused(message):
        make_trainer(tmp_path, model=make(), **STAGES)


def test_the_trial_of_a_model_leaves_no_trace():
    model, state = tiny_llama(), torch.get_rng_state()
    check_model(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_compiled_model(tmp_path):
    model = tiny_llama()
    model.compile()
    with refused("leave out model.compile"):
        make_trainer(tmp_path, model=model)
    with refused("attach the model before it is compiled", ValueError):
        base_model(torch.compile(tiny_llama()))


def test_the_attention_by_itself_names_the_way_back():
    model = tiny_llama()
    model.set_attn_implementation("flexseq")
    with pytest.raises(ValueError, match=r"set_attn_implementation\('sdpa'\)"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_processes_that_accelerate_does_not_know_of(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun has it, without use_cpu=True on a CPU
    with refused("2 processes when accelerate sees 1: .* use_cpu=True", ValueError):
        check_accelerator(accelerator, FlexSeqArguments())


def test_versions_of_deepspeed_that_train_other_weights(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"deepspeed": "0.18.9"}[name])
    with refused("DeepSpeed 0.18.9: .*; use a newer version"):
        check_accelerator(accelerator, FlexSeqArguments())
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"deepspeed": "0.19.0"}[name])
    check_accelerator(accelerator, FlexSeqArguments())


# ---- trials run once for equal models


@pytest.fixture
def tried():
    """A trial, and the models that it has run for."""
    models = []

    @once_for_equal_models
    def trial(model):
        models.append(model)
        return SimpleNamespace(number=len(models))

    return SimpleNamespace(trial=trial, models=models)


def double(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


def test_other_models_are_tried(tried, monkeypatch):
    model = tiny_llama()
    first = tried.trial(model)
    model.config.rms_norm_eps *= 2
    assert tried.trial(model) is not first
    model.config.rms_norm_eps /= 2
    assert tried.trial(model) is first
    with monkeypatch.context() as patch:
        for place, name in (
            (modeling_llama, "apply_rotary_pos_emb"),
            (modeling_llama.LlamaAttention, "forward"),
        ):
            before = len(tried.models)
            patch.setattr(place, name, double(getattr(place, name)))
            tried.trial(model)
            assert len(tried.models) == before + 1
    assert tried.trial(model) is first
    model.model.layers[0].mlp.act_fn = nn.GELU()
    assert tried.trial(model) is not first
