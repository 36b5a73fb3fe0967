"""Ten Trainer steps under DeepSpeed ZeRO-2 and ZeRO-3 and under FSDP2 give the plain Trainer's
weights.

DeepSpeed takes no float64 parameters, so both sides are float32; the larger learning rate keeps
the rounding of the weights themselves, which both sides have, small beside the update.
"""

import copy

import deepspeed
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.test_trainer import (
    OPTIONS,
    STEPS,
    dataset,
    logged,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


LEARNING_RATE = 0.1

ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
}


def zero_run(rank, world_size, folder, stage, accumulation, checkpointing):
    """Weights, log, and how often DeepSpeed stepped its optimizer."""
    deepspeed.init_distributed("gloo")
    config = copy.deepcopy(ZERO) | {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
    }
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=accumulation,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        deepspeed=config,
        gradient_checkpointing=checkpointing,
        **OPTIONS,
    )
    model = tiny_llama(torch.float32)
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    trainer.train()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    return weights, trainer.state.log_history, trainer.model_wrapped.global_steps


@pytest.mark.parametrize(
    ("stage", "accumulation", "checkpointing"), [(2, 1, False), (3, 3, False), (3, 1, True)]
)
def test_zero_equals_the_plain_trainer(tmp_path, stage, accumulation, checkpointing):
    before, wanted, history = plain_run(
        tmp_path, batch=4 * accumulation, dtype=torch.float32, learning_rate=LEARNING_RATE
    )
    for found, log, steps in run_ranks(
        zero_run, 2, tmp_path, stage, accumulation, checkpointing, seconds=120
    ):
        assert steps == STEPS
        assert update_error(before, wanted, found) < 2e-6
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-5)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-4)


def fsdp2_run(rank, world_size, folder, checkpointing):
    """Weights and log under FSDP2, sharded by transformers at load."""
    model = LlamaForCausalLM.from_pretrained(
        folder / "model",
        distributed_config=DistributedConfig(fsdp_size=world_size),
        dtype=torch.float32,
    )
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=1,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        gradient_checkpointing=checkpointing,
        **OPTIONS,
    )
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    trainer.train()
    weights = {name: p.detach().full_tensor().numpy() for name, p in model.named_parameters()}
    return weights, trainer.state.log_history


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp2_equals_the_plain_trainer(tmp_path, checkpointing):
    tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    before, wanted, history = plain_run(
        tmp_path, batch=4, dtype=torch.float32, learning_rate=LEARNING_RATE
    )
    for found, log in run_ranks(fsdp2_run, 2, tmp_path, checkpointing, seconds=120):
        assert update_error(before, wanted, found) < 2e-6
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-5)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-4)
