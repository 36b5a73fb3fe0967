"""FSDP2 as a Trainer's user asks for it (`fsdp=True` with `fsdp_config`, or a configuration of
`accelerate launch`), for the stages of a pipeline.

accelerate shards one model over all ranks. A stage is on some of them, so its engine shards it,
and here accelerate is made to forget its own FSDP. On CPU it has done so by itself: there its FSDP
silently is DDP, and what the training arguments ask for is read from them.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy


def take_over_fsdp(trainer: Any) -> bool:
    """Whether the stages are to be sharded; accelerate then leaves them alone.

    Raises NotImplementedError, naming it, for a setting of FSDP that stages cannot follow.
    """
    state = trainer.accelerator.state
    plugin = getattr(state, "fsdp_plugin", None) or _asked_for(trainer.args)
    if plugin is None:
        return False
    _refuse(plugin)
    if state.distributed_type == DistributedType.FSDP:
        state.distributed_type = DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = state.distributed_type
    state.fsdp_plugin, trainer.is_fsdp_enabled = None, False
    return True


def _asked_for(args: Any) -> FullyShardedDataParallelPlugin | None:
    """What the training arguments ask for, which accelerate drops on CPU."""
    options: Mapping[str, Any] | None = getattr(args, "fsdp_plugin_args", None)
    return None if options is None else FullyShardedDataParallelPlugin(**options)


def _refuse(plugin: FullyShardedDataParallelPlugin) -> None:
    for what, there in {
        f"version {plugin.fsdp_version} of FSDP; set version=2 in fsdp_config": plugin.fsdp_version
        != 2,
        "FSDP's cpu_offload; leave it out": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "FSDP's activation_checkpointing; set gradient_checkpointing=True instead": (
            plugin.activation_checkpointing
        ),
        "FSDP's cpu_ram_efficient_loading, which leaves stages without values; give "
        "FlexSeqTrainer the model's name, "
        "and every rank loads its own stage alone": plugin.cpu_ram_efficient_loading,
        "FSDP's ignored_modules; leave them out": plugin.ignored_modules,
    }.items():
        if there:
            raise NotImplementedError(
                f"hf_flexseq does not support {what} (pipeline_parallel_size)"
            )
