"""QLoRA: adapters on layers that bitsandbytes has quantized, on a CPU.

    pip install "bitsandbytes>=0.50" && pytest -m kernels tests/hf/test_quantized_layers.py

PEFT imports bitsandbytes wherever it is installed, which takes seconds in every process.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer

from hf_flexseq.hf.engine import layer_trial
from hf_flexseq.hf.model.facts import elements, is_mostly_frozen, model_shape, stored_bytes
from hf_flexseq.hf.model.quantized_layers import is_quantized
from tests.hf.test_sharding import ZERO
from tests.hf.test_trainer import dataset, float64_loss
from tests.hf.tiny import tiny_llama, with_torch_norms
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.ranks import run_cases

needs_bitsandbytes = pytest.mark.kernels
SIZES = {"hidden_size": 64, "intermediate_size": 128}
BITS = (4, 8)
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
    """The saved model with quantized layers, in float32 otherwise; 32 bits leave it as it is."""
    quantization = None
    if bits < 32:
        options = FOUR if bits == 4 else {"load_in_8bit": True}
        quantization = BitsAndBytesConfig(**options)
    return LlamaForCausalLM.from_pretrained(
        folder / "model", quantization_config=quantization, dtype=torch.float32
    )


def with_adapters(model):
    """The model with adapters of all its layers, as QLoRA's users make them."""
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def make_trainer(folder, bits, flexseq, batch):
    """A trainer of five steps. All that is not quantized is in float64, so that adapters do not
    round to more than their updates."""
    model = with_adapters(with_torch_norms(load(folder, bits)))
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.double()
    if flexseq is None:
        model.get_base_model().loss_function = float64_loss
    settings = {"train_dataset": dataset(20), "max_steps": 5}
    return trainer_of(Trainer, folder, model=model, flexseq=flexseq, batch=batch, **settings)


def run(rank, world_size, folder, bits):
    return trained(make_trainer(folder, bits, {}, 2))


@needs_bitsandbytes
@pytest.mark.processes
def test_two_ranks_train_adapters_as_the_plain_trainer_does(tmp_path):
    save_model(tmp_path)
    by_bits = run_cases(run, 2, [(tmp_path, bits) for bits in BITS], seconds=150)
    for bits, by_rank in zip(BITS, by_bits, strict=True):
        stock = trained(make_trainer(tmp_path, bits, None, 4))
        for ours in by_rank:
            assert weights_apart(stock, ours) < 1e-9, bits


def run_under_zero(rank, world_size, folder, stage):
    import deepspeed  # which takes long

    deepspeed.init_distributed("gloo")
    sharding = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return trained(
        make_float32_trainer(folder, {}, 2, deepspeed=ZERO | {"zero_optimization": sharding})
    )


def make_float32_trainer(folder, flexseq, batch, **settings):
    """A trainer of layers of 4 bits whose steps are so large that adapters hardly round."""
    settings |= {"train_dataset": dataset(20), "max_steps": 3, "learning_rate": 3.0}
    model = with_adapters(load(folder, 4))
    return trainer_of(Trainer, folder, model=model, flexseq=flexseq, batch=batch, **settings)


@needs_bitsandbytes
@pytest.mark.processes
def test_zero_shards_layers_of_4_bits(tmp_path):
    save_model(tmp_path)
    stock = trained(make_float32_trainer(tmp_path, None, 4))
    by_stage = run_cases(run_under_zero, 2, [(tmp_path, stage) for stage in (2, 3)], seconds=150)
    for by_rank in by_stage:
        for ours in by_rank:
            # in float32; 5.8e-6 as under DDP, where layers that are not quantized end 3.6e-6 away
            assert weights_apart(stock, ours) < 1e-5


# ---- sizes


def test_packed_weights_count_as_what_they_stand_for():
    packed = nn.Parameter(torch.zeros(2048, 1, dtype=torch.uint8), requires_grad=False)
    factors = SimpleNamespace(absmax=torch.zeros(1), state2=None)
    packed.quant_state = SimpleNamespace(
        shape=(64, 64), absmax=torch.zeros(64, dtype=torch.uint8), state2=factors
    )
    assert elements(packed) == 4096
    assert stored_bytes(packed) == 2048 + 64 + 4


@needs_bitsandbytes
@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_model_has_the_sizes_of_its_weights_and_fewer_bytes(bits, tmp_path):
    save_model(tmp_path)
    plain, packed = (with_adapters(load(tmp_path, one)).get_base_model() for one in (32, bits))
    wanted, found = model_shape(plain), model_shape(packed)
    assert (found.params, found.frozen_params) == (wanted.params, wanted.frozen_params)
    assert found.dtype_bytes == 4
    assert is_mostly_frozen(packed)
    # seven matrices of each of two layers are quantized; embedding, head and norms are not
    quantized_params = sum(
        module.in_features * module.out_features
        for module in packed.modules()
        if is_quantized(module)
    )
    assert quantized_params == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    left = wanted.frozen_bytes - 4 * quantized_params
    assert found.frozen_bytes - left == pytest.approx(quantized_params * bits / 8, rel=0.05)


@needs_bitsandbytes
def test_what_layers_keep_is_counted_with_their_adapters(tmp_path):
    save_model(tmp_path)
    counted = {}
    for bits in (32, *BITS):
        model = with_adapters(load(tmp_path, bits)).get_base_model()
        found = layer_trial.count_bytes(model, dtype=torch.float32)
        (counted[bits],) = found.kinds
    assert counted[4] == counted[32]
    assert counted[8].kept_bytes == counted[32].kept_bytes
    assert counted[8].output_bytes > 3 * counted[32].output_bytes  # in spite of checkpointing


# ---- layers of 8 bits


def layer_of(kind, **options):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, bias=False)
    layer = getattr(bitsandbytes.nn, kind)(256, 128, bias=False, **options)
    layer.load_state_dict(plain.state_dict())
    return layer.requires_grad_(False).to("cpu")


@needs_bitsandbytes
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_with_outliers_what_8_bits_give_a_token_depends_on_the_others(threshold):
    """As on GPUs; in training, a CPU computes with whole weights."""
    layer = layer_of("Linear8bitLt", has_fp16_weights=False, threshold=threshold).eval()
    tokens = torch.randn(64, 256)
    tokens[3, 5] = 20.0
    together = layer(tokens)
    alone = torch.cat([layer(tokens[:3]), layer(tokens[3:4]), layer(tokens[4:])])
    apart = float((alone - together).norm() / together.norm())
    assert apart == 0.0 if threshold == 0.0 else 1e-4 < apart < 1e-2


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_the_log_says_that_outliers_count_for_all_tokens(threshold, tmp_path, caplog):
    model = tiny_llama()
    options = {"load_in_8bit": True, "llm_int8_threshold": threshold}
    model.config.quantization_config = BitsAndBytesConfig(**options)
    trainer_of(Trainer, tmp_path, model=model, flexseq={})
    assert ("llm_int8_threshold=6.0: layers of 8 bits" in caplog.text) == (threshold > 0)


@needs_bitsandbytes
@pytest.mark.parametrize("kind, keeps", [("Linear4bit", False), ("Linear8bitLt", True)])
def test_layers_of_8_bits_keep_their_input_in_spite_of_checkpointing(kind, keeps):
    layer = layer_of(kind, **({"has_fp16_weights": False} if keeps else {})).train()
    inputs = []

    def region(hidden):
        hidden = hidden * 2
        inputs.append(weakref.ref(hidden))
        return layer(hidden)

    result = checkpoint(region, torch.randn(8, 256, requires_grad=True), use_reentrant=False)
    assert result.requires_grad
    assert (inputs[0]() is not None) == keeps
