"""Parts of accelerate that hf_flexseq sets, swaps or reads beyond what is documented."""

from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)

from tests.contracts.look import attributes, parameters

# ---- hf/engine/engine.py


def test_ddp_is_made_with_the_handler_that_the_accelerator_has_at_that_moment():
    assert Accelerator(cpu=True).ddp_handler is None
    given = DistributedDataParallelKwargs(bucket_cap_mb=3)
    assert Accelerator(cpu=True, kwargs_handlers=[given]).ddp_handler is given
    assert attributes(Accelerator.prepare_model, "ddp_handler") >= 1
    assert given.to_kwargs() == {"bucket_cap_mb": 3}
    assert DistributedDataParallelKwargs.bucket_cap_mb == 25


def test_plugins_have_the_settings_that_are_read():
    refused = {"fsdp_version", "cpu_offload", "activation_checkpointing"}  # by stages
    refused |= {"cpu_ram_efficient_loading", "ignored_modules"}
    assert refused <= set(parameters(FullyShardedDataParallelPlugin))
    assert "zero_stage" in parameters(DeepSpeedPlugin)  # hf/model/facts.py
