"""A hand-written loop under DeepSpeed ZeRO trains and evaluates as it does under DDP."""

import copy

import deepspeed
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType

from hf_flexseq import FlexSeqEngine
from tests.budget import others_nightly
from tests.hf.random_steps import own_batches
from tests.hf.test_sharding import ZERO
from tests.hf.tiny import documents, tiny_arguments, tiny_llama
from tests.hf.trainers import distance, weights_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

LENGTHS = [1 + (i * i * 7) % 60 for i in range(24)]
STAGES = {
    1: {"stage": 1},
    2: {"stage": 2},
    3: {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def accelerator_of(stage):
    """Of ZeRO on CPUs, or of DDP without a stage."""
    if stage is None:
        return Accelerator(cpu=True)
    deepspeed.init_distributed("gloo")
    settings = {"zero_optimization": STAGES[stage], "train_micro_batch_size_per_gpu": 1}
    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(ZERO) | settings)
    PartialState(cpu=True)  # accelerate looks for GPUs otherwise
    return Accelerator(deepspeed_plugin=plugin)


def loop(rank, world_size, stage, accumulation):
    """Weights before and after some steps, and the held-out loss."""
    model = tiny_llama(torch.float32)
    start = weights_of(model)
    with pytest.MonkeyPatch.context() as patch:
        if stage is not None:
            patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        accelerator = accelerator_of(stage)
        assert (accelerator.distributed_type == DistributedType.DEEPSPEED) == (stage is not None)
        engine = FlexSeqEngine(accelerator, tiny_arguments())
        engine.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        micro_batches = 0
        for number in range(2):
            batches = own_batches(documents(LENGTHS, seed=number), rank, world_size)
            for step in engine.steps(batches, accumulation, first_number=number):
                step.backward(model)
                optimizer.step()
                optimizer.zero_grad()
                micro_batches = max(micro_batches, len(step.plan.micro_batches))
        evaluation = engine.evaluation(own_batches(documents([5, 9, 30, 40]), rank, world_size))
        for step in evaluation:
            step.forward(model)
        held_out = evaluation.mean_loss()
        engine.detach()
    assert micro_batches > 1
    return start, weights_of(accelerator.unwrap_model(model)), held_out


@pytest.mark.parametrize("stage", others_nightly(STAGES, tried=[3]))
@pytest.mark.parametrize("accumulation", others_nightly([1, 2], tried=[2]))
def test_a_loop_trains_as_under_ddp(stage, accumulation):
    start, wanted, loss = run_ranks(loop, 2, None, accumulation)[0]
    update = distance(start, wanted)
    for _, found, held_out in run_ranks(loop, 2, stage, accumulation, seconds=60):
        assert distance(wanted, found) < 2e-6 * update
        assert held_out == pytest.approx(loss, rel=1e-6)
