"""Ten Trainer steps under DeepSpeed ZeRO-2 and ZeRO-3, under FSDP2 and under HSDP give the plain
Trainer's weights.

DeepSpeed takes no float64 parameters, so both sides are float32; the larger learning rate keeps
the rounding of the weights themselves, which both sides have, small beside the update.
"""

import copy
from dataclasses import replace

import deepspeed
import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from tests.hf.test_trainer import (
    OPTIONS,
    STEPS,
    dataset,
    logged,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import noting_figures, tiny_llama
from tests.ranks import run_cases

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


def small_llama():
    return tiny_llama(torch.float32)


def zero_run(
    rank, world_size, folder, stage, accumulation, checkpointing, make=small_llama, steps=STEPS
):
    """Weights; log, with the figures of all steps behind it; and how often DeepSpeed stepped its
    optimizer. make: returns the model."""
    model = make()  # before the settings, which make transformers draw other weights
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
        max_steps=steps,
        deepspeed=config,
        gradient_checkpointing=checkpointing,
        **OPTIONS,
    )
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    steps = noting_figures(trainer)
    trainer.train()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    log = [*trainer.state.log_history, *steps]
    return weights, log, trainer.model_wrapped.global_steps


ZERO_RUNS = ((2, 1, False), (3, 3, False), (3, 1, True))  # stage, accumulation, checkpointing


def test_zero_equals_the_plain_trainer(tmp_path):
    cases = [(tmp_path, *run) for run in ZERO_RUNS]
    by_case = run_cases(zero_run, 2, cases, seconds=150)
    for (_, accumulation, _), results in zip(ZERO_RUNS, by_case, strict=True):
        before, wanted, history = plain_float32_run(tmp_path, batch=4 * accumulation)
        for found, log, steps in results:
            assert steps == STEPS
            assert_equal_to_plain(found, log, before, wanted, history)


def plain_float32_run(folder, batch):
    return plain_run(folder, batch=batch, dtype=torch.float32, learning_rate=LEARNING_RATE)


def assert_equal_to_plain(found, log, before, wanted, history):
    assert update_error(before, wanted, found) < 2e-6
    assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-5)
    assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-4)


def fsdp2_run(rank, world_size, folder, checkpointing, config, accumulation, cost_model):
    """Weights, log, optimizer steps and the policies taken under FSDP2, sharded by transformers at
    load."""
    model = LlamaForCausalLM.from_pretrained(
        folder / "model",
        distributed_config=DistributedConfig(**config),
        dtype=torch.float32,
    )
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=1,
        accumulation=accumulation,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        gradient_checkpointing=checkpointing,
        **OPTIONS | {"cost_model": cost_model},
    )
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    updates = []
    trainer.add_callback(CountedUpdates(updates))
    trainer.train()
    weights = {name: p.detach().full_tensor().numpy() for name, p in model.named_parameters()}
    policies = trainer.flexseq.executor.fsdp.taken
    return weights, trainer.state.log_history, len(updates), policies


class CountedUpdates(TrainerCallback):
    """Notes each step of the optimizer itself."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer.register_step_post_hook(lambda *_: self.updates.append(1))


HSDP = {"fsdp_size": 2, "dp_replicate_size": 2}
# By number of ranks: configuration, accumulation, checkpointing, whether memory is scarce.
FSDP2_RUNS = {
    2: [({"fsdp_size": 2}, 3, False, False), ({"fsdp_size": 2}, 2, True, True)],
    4: [(HSDP, 2, True, False)],
}


@pytest.mark.parametrize("world_size", FSDP2_RUNS)
def test_fsdp2_equals_the_plain_trainer(tmp_path, world_size):
    tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    scarce = str(tmp_path / "cost.json")
    replace(PRESETS["llama-3.1-8b-h200"], budget_bytes=1.0).save(scarce)
    cases = []
    for config, accumulation, checkpointing, is_scarce in FSDP2_RUNS[world_size]:
        cost_model = scarce if is_scarce else "estimate"
        cases.append((tmp_path, checkpointing, config, accumulation, cost_model))
    by_case = run_cases(fsdp2_run, world_size, cases, seconds=150)
    for (_, accumulation, _, is_scarce), results in zip(
        FSDP2_RUNS[world_size], by_case, strict=True
    ):
        before, wanted, history = plain_float32_run(tmp_path, batch=world_size * accumulation)
        for found, log, updates, policies in results:
            assert updates == STEPS
            if is_scarce:
                assert policies == {PLAIN}
            else:
                assert FsdpPolicy(reduces_each=False, regathers=False) in policies
            assert_equal_to_plain(found, log, before, wanted, history)
