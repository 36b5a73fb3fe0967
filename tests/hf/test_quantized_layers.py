"""QLoRA: adapters on layers that bitsandbytes has quantized, on a CPU.

    pip install "bitsandbytes>=0.50" && pytest -m kernels tests/hf/test_quantized_layers.py

PEFT imports bitsandbytes wherever it is installed, which takes seconds in every process.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer

from tests.differential.case import Case
from tests.differential.runs import assert_alike
from tests.hf.plain import dataset, float64_loss
from tests.hf.tiny import tiny_llama, with_torch_norms
from tests.hf.trainers import trainer_of

needs_bitsandbytes = pytest.mark.kernels
SIZES = {"hidden_size": 64, "intermediate_size": 128}
FOUR = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


def save_model(folder):
    """Save what `load` quantizes, or skip the test, which a rank could not do."""
    pytest.importorskip("bitsandbytes")
    tiny_llama(torch.float32, **SIZES).save_pretrained(folder / "model")


def load(folder, bits):
    """The saved model with quantized layers, in float32 otherwise."""
    quantization = BitsAndBytesConfig(**FOUR if bits == 4 else {"load_in_8bit": True})
    return LlamaForCausalLM.from_pretrained(
        folder / "model", quantization_config=quantization, dtype=torch.float32
    )


def with_adapters(model):
    """The model with adapters of all its layers, as QLoRA's users make them."""
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def adapted(folder, bits):
    """All that is not quantized is in float64, so that adapters do not round to more than their
    updates."""
    model = with_adapters(with_torch_norms(load(folder, bits)))
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.double()
    return model


@needs_bitsandbytes
@pytest.mark.processes
def test_two_ranks_train_adapters_as_the_plain_trainer_does(tmp_path):
    save_model(tmp_path)
    settings = {"train_dataset": dataset(20), "max_steps": 5}
    cases = {
        bits: Case(
            model=partial(adapted, tmp_path, bits), settings=settings, stock_loss=float64_loss
        )
        for bits in (4, 8)
    }
    assert_alike(cases, tmp_path, weights=1e-9, figures=(), seconds=150)


@needs_bitsandbytes
@pytest.mark.processes
def test_zero_shards_layers_of_4_bits(tmp_path):
    """With steps that are so large that adapters hardly round."""
    save_model(tmp_path)
    settings = {"train_dataset": dataset(20), "learning_rate": 3.0}
    case = Case(model=lambda: with_adapters(load(tmp_path, 4)), settings=settings)
    cases = {stage: replace(case, stage=stage) for stage in (2, 3)}
    # in float32; 5.8e-6 as under DDP, where layers that are not quantized end 3.6e-6 away
    assert_alike(cases, tmp_path, weights=1e-5, figures=(), seconds=150)


# ---- layers of 8 bits


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_the_log_says_that_outliers_count_for_all_tokens(threshold, tmp_path, caplog):
    model = tiny_llama()
    options = {"load_in_8bit": True, "llm_int8_threshold": threshold}
    model.config.quantization_config = BitsAndBytesConfig(**options)
    trainer_of(Trainer, tmp_path, model=model, flexseq={})
    assert ("llm_int8_threshold=6.0: layers of 8 bits" in caplog.text) == (threshold > 0)
