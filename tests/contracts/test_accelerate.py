"""Parts of accelerate that hf_flexseq sets, swaps or reads beyond what is documented."""

import inspect

import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from tests.contracts.look import attributes, calls, parameters

# ---- hf/engine/engine.py


def test_ddp_is_made_with_the_handler_that_the_accelerator_has_at_that_moment():
    assert Accelerator(cpu=True).ddp_handler is None
    given = DistributedDataParallelKwargs(bucket_cap_mb=3)
    assert Accelerator(cpu=True, kwargs_handlers=[given]).ddp_handler is given
    assert attributes(Accelerator.prepare_model, "ddp_handler") >= 1
    assert given.to_kwargs() == {"bucket_cap_mb": 3}
    assert DistributedDataParallelKwargs.bucket_cap_mb == 25


def test_dispatch_batches_is_read_from_the_configuration_when_a_loader_is_prepared():
    configuration = DataLoaderConfiguration(dispatch_batches=None)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    for value in (None, False):
        accelerator.dataloader_config.dispatch_batches = value
        assert accelerator.dispatch_batches is value
    assert attributes(Accelerator.prepare_data_loader, "dispatch_batches") >= 1


def test_gradients_are_synchronised_as_the_gradient_state_says():
    state = GradientState()
    before = state.sync_gradients
    try:
        for value in (False, True):
            state._set_sync_gradients(value)
            assert state.sync_gradients is Accelerator(cpu=True).sync_gradients is value
    finally:
        state._set_sync_gradients(before)
    assert parameters(Accelerator.no_sync) == ["model"]


def test_deepspeed_steps_its_optimizer_where_gradients_are_synchronised_and_nowhere_else():
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    assert "sync_gradients" in parameters(deepspeed.DeepSpeedEngineWrapper.backward)
    (call,) = calls(Accelerator.backward, "backward")[:1]
    assert "sync_gradients" in {keyword.arg for keyword in call.keywords}
    assert calls(deepspeed.DeepSpeedEngineWrapper.backward, "step")


def test_sync_each_batch_is_kept_under_its_name():
    plugin = GradientAccumulationPlugin(sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    try:
        assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True
    finally:
        GradientState._reset_state()


# ---- hf/engine/evaluation.py: what preparing a model leaves on it


@pytest.mark.parametrize(
    ("precision", "left"),
    [
        ("no", {"_is_accelerate_prepared"}),
        ("bf16", {"forward", "_original_forward", "_is_accelerate_prepared"}),
    ],
)
def test_preparing_a_model_marks_it_and_lists_it(precision, left):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = nn.Linear(2, 2)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert accelerator._models == [model]
    assert vars(model)["_is_accelerate_prepared"] is True
    assert set(vars(model)) - set(vars(nn.Linear(2, 2))) == left


# ---- hf/engine/loaders.py: repeats are turned off by a flag and by exchanging a class


def test_even_batches_is_asked_for_at_every_pass():
    sampler = BatchSampler(SequentialSampler(range(3)), batch_size=1, drop_last=False)
    shard = BatchSamplerShard(sampler, num_processes=2, process_index=1)
    for is_even, batches in ((True, 2), (False, 1)):
        shard.even_batches = is_even
        assert len(list(shard)) == batches


def test_a_stream_s_shard_has_what_its_replacement_reads_and_no_slots():
    shard = IterableDatasetShard(range(3), batch_size=1, num_processes=2, process_index=1)
    read = {"dataset", "batch_size", "num_processes", "process_index", "split_batches"}
    assert read <= set(vars(shard))

    class Replaced(IterableDatasetShard):
        def __iter__(self):
            return iter("replaced")

    shard.__class__ = Replaced
    assert list(shard) == list("replaced")


# ---- pipeline/trainer/fsdp.py: accelerate forgets its own FSDP


def test_the_state_is_shared_and_its_kind_of_distribution_can_be_set():
    Accelerator(cpu=True)
    assert isinstance(AcceleratorState().distributed_type, DistributedType)
    assert "fsdp_plugin" in inspect.getsource(AcceleratorState)
    former = PartialState._shared_state["distributed_type"]
    try:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        assert PartialState().distributed_type is DistributedType.MULTI_CPU
    finally:
        PartialState._shared_state["distributed_type"] = former


def test_plugins_have_the_settings_that_are_read():
    refused = {"fsdp_version", "cpu_offload", "activation_checkpointing"}  # by stages
    refused |= {"cpu_ram_efficient_loading", "ignored_modules"}
    assert refused <= set(parameters(FullyShardedDataParallelPlugin))
    assert "zero_stage" in parameters(DeepSpeedPlugin)  # hf/model/facts.py
