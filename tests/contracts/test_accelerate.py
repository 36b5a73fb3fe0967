"""Parts of accelerate that hf_flexseq sets, swaps or reads beyond what is documented."""

import inspect

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
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
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.contracts.look import attributes, calls, parameters

# ---- hf/engine.py


def test_ddp_is_made_with_the_handler_that_the_accelerator_has_at_that_moment():
    accelerator = Accelerator(cpu=True)
    assert accelerator.ddp_handler is None
    given = DistributedDataParallelKwargs(bucket_cap_mb=3)
    assert Accelerator(cpu=True, kwargs_handlers=[given]).ddp_handler is given
    assert attributes(Accelerator.prepare_model, "ddp_handler") >= 1
    assert given.to_kwargs() == {"bucket_cap_mb": 3}
    assert DistributedDataParallelKwargs.bucket_cap_mb == 25


def test_dispatch_batches_is_read_from_the_configuration_when_a_loader_is_prepared():
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=None)
    )
    assert accelerator.dispatch_batches is None
    accelerator.dataloader_config.dispatch_batches = False
    assert accelerator.dispatch_batches is False
    assert attributes(Accelerator.prepare_data_loader, "dispatch_batches") >= 1


def test_gradients_are_synchronised_as_the_gradient_state_says():
    state = GradientState()
    before = state.sync_gradients
    try:
        state._set_sync_gradients(False)
        assert state.sync_gradients is False
        assert Accelerator(cpu=True).sync_gradients is False
        state._set_sync_gradients(True)
        assert state.sync_gradients is True
    finally:
        state._set_sync_gradients(before)


def test_deepspeed_steps_its_optimizer_where_gradients_are_synchronised_and_nowhere_else():
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    assert "sync_gradients" in parameters(deepspeed.DeepSpeedEngineWrapper.backward)
    (call,) = calls(Accelerator.backward, "backward")[:1]
    assert "sync_gradients" in {keyword.arg for keyword in call.keywords}
    assert calls(deepspeed.DeepSpeedEngineWrapper.backward, "step")


def test_sync_each_batch_is_kept_under_its_name():
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True)
    )
    try:
        assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True
    finally:
        GradientState._reset_state()


def test_no_sync_takes_a_model():
    assert parameters(Accelerator.no_sync) == ["model"]


# ---- hf/evaluation.py: what preparing a model leaves on it


def test_preparing_a_model_marks_it_and_lists_it():
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert accelerator._models == [model]
    assert vars(model)["_is_accelerate_prepared"] is True
    assert "_original_forward" not in vars(model)


def test_mixed_precision_puts_a_forward_of_its_own_on_the_model():
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), nn.Linear(2, 2)
    accelerator.prepare_model(model, evaluation_mode=True)
    assert {"forward", "_original_forward", "_is_accelerate_prepared"} <= set(vars(model))
    new = set(vars(model)) - set(vars(nn.Linear(2, 2)))
    assert new == {"forward", "_original_forward", "_is_accelerate_prepared"}


# ---- hf/loaders.py: repeats are turned off by a flag and by exchanging a class


def test_even_batches_is_asked_for_at_every_pass():
    sampler = BatchSampler(SequentialSampler(range(3)), batch_size=1, drop_last=False)
    shard = BatchSamplerShard(sampler, num_processes=2, process_index=1)
    assert len(list(shard)) == 2
    shard.even_batches = False
    assert len(list(shard)) == 1


def test_a_stream_s_shard_has_what_its_replacement_reads_and_no_slots():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    shard = IterableDatasetShard(Stream(), batch_size=1, num_processes=2, process_index=1)
    assert {"dataset", "batch_size", "num_processes", "process_index", "split_batches"} <= set(
        vars(shard)
    )

    class Replaced(IterableDatasetShard):
        def __iter__(self):
            return iter("replaced")

    shard.__class__ = Replaced
    assert list(shard) == list("replaced")


def test_a_prepared_loader_has_its_sampler_under_the_usual_name():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_size=2))
    assert isinstance(loader, DataLoaderShard)
    assert hasattr(loader, "batch_sampler")
    assert hasattr(loader, "dataset")


def test_a_prepared_loader_asks_for_its_device_with_every_batch_and_hands_it_on_when_resuming():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(3), batch_size=1))
    assert loader.device == torch.device("cpu")
    batches = iter(loader)
    loader.device = torch.device("meta")
    assert next(batches).device.type == "meta"
    loader.device = None
    # accelerate is one batch ahead
    assert [batch.device.type for batch in batches] == ["cpu", "cpu"]
    assert skip_first_batches(loader, 1).device is None


# ---- hf/pipeline/fsdp.py: accelerate forgets its own FSDP


def test_the_state_is_shared_and_its_kind_of_distribution_can_be_set():
    Accelerator(cpu=True)
    state = AcceleratorState()
    assert "distributed_type" in PartialState._shared_state
    assert isinstance(state.distributed_type, DistributedType)
    assert "fsdp_plugin" in inspect.getsource(AcceleratorState)
    former = PartialState._shared_state["distributed_type"]
    try:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        assert PartialState().distributed_type is DistributedType.MULTI_CPU
    finally:
        PartialState._shared_state["distributed_type"] = former


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_version",
        "cpu_offload",
        "activation_checkpointing",
        "cpu_ram_efficient_loading",
        "ignored_modules",
    ],
)
def test_the_fsdp_plugin_has_the_settings_that_stages_refuse(name):
    assert name in parameters(FullyShardedDataParallelPlugin)


def test_deepspeed_s_plugin_tells_its_stage():
    # hf/model/facts.py
    assert "zero_stage" in parameters(DeepSpeedPlugin)
