"""Prompt tuning and P-tuning through PEFT on two ranks: gradients, weights and figures are those
of the plain trainers in one process."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import Trainer
from trl import SFTTrainer

from hf_flexseq import FlexSeqEngine
from hf_flexseq.hf.model.adapters import unsuitable_prompt
from tests.differential.case import Case, make_trainer
from tests.differential.runs import both
from tests.hf.plain import float64_loss, padded
from tests.hf.test_exactness import LENGTHS
from tests.hf.tiny import (
    attached,
    documents,
    errors,
    own_batches,
    random_steps,
    refused,
    tiny_arguments,
    tiny_llama,
    worst_of,
)
from tests.hf.trainers import assert_logged_alike, trainer_of, weights_apart
from tests.ranks import run_cases

CAUSAL = {"task_type": "CAUSAL_LM"}
LSTM = {"encoder_reparameterization_type": "LSTM"}
KINDS = {
    "prompt tuning": (PromptTuningConfig, {}),
    "P-tuning": (PromptEncoderConfig, {"encoder_hidden_size": 24}),
    "P-tuning, LSTM": (PromptEncoderConfig, {"encoder_hidden_size": 24, **LSTM}),
}


def make_model(kind, count, **options):
    """A model of PEFT in float64 with so many virtual tokens, whose embeddings are not small."""
    config, own = KINDS[kind]
    config = config(num_virtual_tokens=count, **CAUSAL, **own, **options)
    model = get_peft_model(tiny_llama(), config).double()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return model


def whole_documents(lengths):
    """Documents of which every second one has labels for all of its tokens."""
    examples = documents(lengths)
    for example in examples[::2]:
        example["labels"] = list(example["input_ids"])
    return examples


# ---- gradients


def wanted_gradients(kind, count, examples):
    """Loss and gradients of one padded batch by PEFT's own forward."""
    model = make_model(kind, count)
    model.get_base_model().loss_function = float64_loss
    loss = model(**padded(examples)).loss
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.prompt_encoder.named_parameters()}


def worst_errors(rank, world_size, kind, count, plans, sharding):
    """The largest relative error of loss and gradients under random plans."""
    examples = whole_documents(LENGTHS)
    wanted = wanted_gradients(kind, count, examples)
    model = make_model(kind, count)
    if sharding == "fsdp2":
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.train()
    engine = attached(model, world_size)
    batches = own_batches(examples, rank, world_size)
    ddp = {} if sharding == "ddp" else None
    found = []
    for _, loss, gradients in random_steps(engine, model, batches, ddp=ddp, plans=plans):
        own = {name: gradients[f"prompt_encoder.{name}"] for name in wanted[1]}
        found.append(errors(loss, own, wanted))
    engine.attach(model)
    with torch.no_grad():  # with its own attention, and virtual tokens of its own
        other_call = float(model(**padded(examples)).loss)
    engine.detach()
    assert other_call == pytest.approx(wanted[0], rel=1e-6)
    return max(worst_of(found).values())


@pytest.mark.processes
def test_gradients_are_those_of_peft_under_any_plan():
    # 20 virtual tokens are shared by all rows
    cases = [
        ("prompt tuning", 5, 3, "ddp"),
        ("P-tuning", 20, 3, "ddp"),
        ("P-tuning, LSTM", 1, 2, "ddp"),
        ("P-tuning", 20, 2, "fsdp2"),
    ]
    for case, by_rank in zip(cases, run_cases(worst_errors, 2, cases), strict=True):
        assert max(by_rank) < 1e-10, case


# ---- trainers


SETTINGS = {
    "train_dataset": Dataset.from_list(whole_documents([1 + (i * i * 7) % 40 for i in range(40)])),
    "eval_dataset": Dataset.from_list(whole_documents([3, 1, 12, 30, 7])),
    "per_device_eval_batch_size": 64,  # all of it: the plain trainer averages means of batches
    "learning_rate": 5.0,
    "max_steps": 4,
    "include_num_input_tokens_seen": "non_padding",
}


def case_of(base, kind, flexseq, settings, accumulation=1):
    """A trainer in float64, which evaluates."""
    return Case(
        base=base,
        model=partial(make_model, kind, 20),
        settings=SETTINGS | settings,
        stock_loss=None if base is SFTTrainer else float64_loss,
        flexseq=flexseq,
        accumulation=accumulation,
        evaluates=True,
    )


SPLIT = {"planner": "static", "sp_degree": 2}
RUNS = {  # by name: trainer, kind, options of hf_flexseq, settings, accumulation
    "ten steps": (Trainer, "prompt tuning", SPLIT, {"max_steps": 10}),
    "sft": (SFTTrainer, "P-tuning", {}, {}),
    "apart": (
        Trainer,
        "P-tuning",
        {"shared_prefixes": "off"},
        {"gradient_checkpointing": True},
        2,
    ),
    "one rank each": (Trainer, "P-tuning, LSTM", {"max_tokens_per_rank": 200}, {}),
    "dft": (SFTTrainer, "prompt tuning", SPLIT, {"loss_type": "dft"}),
}
FIGURES = ["loss", "grad_norm", "eval_loss", "num_input_tokens_seen"]
OF_SFT = ["mean_token_accuracy", "entropy", "eval_entropy", "num_tokens"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "names",
    [("ten steps", "sft"), pytest.param(tuple(RUNS), marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_steps_are_those_of_the_plain_trainers(names, tmp_path):
    cases = {name: case_of(*RUNS[name]) for name in names}
    for name, stock, by_rank in both(cases, tmp_path, seconds=150):
        for found in by_rank:
            assert weights_apart(stock, found) < 1e-8, name
            figures = FIGURES + (OF_SFT if RUNS[name][0] is SFTTrainer else [])
            assert_logged_alike(stock, found, figures, rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_and_its_adapter_is_one_of_peft(tmp_path):
    def trainer_in(folder, **settings):
        plan = {"max_tokens_per_rank": 200}
        case = case_of(Trainer, "prompt tuning", plan, {"save_strategy": "steps", **settings})
        return make_trainer(case, folder, is_ours=True)

    straight = trainer_in(tmp_path / "a", save_steps=2)
    straight.train()
    again = trainer_in(tmp_path / "b")
    again.train(str(tmp_path / "a" / "checkpoint-2"))
    prompts = [one.model.get_prompt(batch_size=1) for one in (straight, again)]
    assert torch.equal(*prompts)
    folder = tmp_path / "a" / "checkpoint-4"
    loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    assert torch.allclose(loaded.get_prompt(batch_size=1), prompts[0].float())
    assert list(load_file(folder / "adapter_model.safetensors")) == ["prompt_embeddings"]


# ---- what is refused, besides the methods of `test_adapters.py`

REFUSED = {
    "P_TUNING of PEFT here .dropout=0.5 of its encoder": PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=8, encoder_dropout=0.5, **LSTM, **CAUSAL
    ),
    "PROMPT_TUNING of PEFT here .in PeftModelForFeatureExtraction": PromptTuningConfig(
        num_virtual_tokens=4, task_type="FEATURE_EXTRACTION"
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_prompt_learning_is_refused_by_name(message, tmp_path):
    model = get_peft_model(tiny_llama(), REFUSED[message])
    with refused(message):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model)
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    with refused(message):
        engine.attach(model)
    assert not engine.is_attached


def test_two_adapters_predictions_and_samples_are_refused(tmp_path, monkeypatch):
    model = make_model("prompt tuning", 4)
    with monkeypatch.context() as patch:
        name = "is_distributed_loading_by_transformers"
        patch.setattr(type(model.get_base_model()), name, True, raising=False)
        assert "DistributedConfig has sharded the model" in unsuitable_prompt(model)
    assert unsuitable_prompt(model) is None
    with refused("4 virtual tokens of PEFT with compute_metrics or predict"):
        trainer_of(
            Trainer,
            tmp_path,
            flexseq={},
            model=model,
            compute_metrics=lambda prediction: {},
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
    with refused("4 virtual tokens of PEFT with FlexTrainer: figures of whole samples"):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model, compute_loss_func=float64_loss)
    model.add_adapter("second", PromptTuningConfig(num_virtual_tokens=4, **CAUSAL))
    with refused("PROMPT_TUNING of PEFT beside other adapters .default, second"):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model)
