"""FSDP2 as a Trainer's user asks for it (`fsdp=True` with `fsdp_config`, or a configuration of
`accelerate launch`), for the stages of a pipeline.

accelerate shards one model over all ranks. A stage is on some of them, so its engine shards it,
and here accelerate is made to forget its own FSDP. On CPU it has done so by itself: there its FSDP
silently is DDP, and what the training arguments ask for is read from them.

Of FSDP's mixed precision only the dtype of the gathered parameters is the stages' own, that of
accelerate's mixed precision; gradients are summed in the dtype of the optimizer's parameters,
whatever the policy that accelerate makes up says.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_flexseq.hf.model.facts import autocast_dtype
from hf_flexseq.hf.trainer_checks import Refusal, refuse


def take_over_fsdp(trainer: Any) -> bool:
    """Decide if the stages are to be sharded; accelerate then leaves them alone for good, since a
    model that is cut stays cut.

    Raises NotImplementedError, naming it, for a setting of FSDP that stages cannot follow.
    """
    state = trainer.accelerator.state
    plugin = getattr(state, "fsdp_plugin", None) or _asked_for(trainer.args)
    if plugin is None:
        return False
    cast_dtype = autocast_dtype(trainer.accelerator)
    refuse(NotImplementedError, _settings(plugin, cast_dtype), where=" (pipeline_parallel_size)")
    if state.distributed_type == DistributedType.FSDP:
        # accelerate has no way to change its mind: all its states share what is set here.
        state.distributed_type = DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = state.distributed_type
    state.fsdp_plugin = None
    trainer.is_fsdp_enabled = False
    return True


def _asked_for(args: Any) -> FullyShardedDataParallelPlugin | None:
    """Return what the training arguments ask for, which accelerate drops on CPU; None for no
    FSDP."""
    options: Mapping[str, Any] | None = getattr(args, "fsdp_plugin_args", None)
    if options is None:
        return None
    return FullyShardedDataParallelPlugin(**options)


def _settings(
    plugin: FullyShardedDataParallelPlugin, cast_dtype: torch.dtype | None
) -> list[Refusal]:
    """Return the settings of FSDP that stages cannot follow.

    cast_dtype: of accelerate's mixed precision, in which parameters are gathered; None without
    """
    param_dtype = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    return [
        Refusal(
            when=plugin.fsdp_version != 2,
            message=f"version {plugin.fsdp_version} of FSDP; set version=2 in fsdp_config",
        ),
        Refusal(
            when=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            message="FSDP's cpu_offload; leave it out",
        ),
        Refusal(
            when=plugin.activation_checkpointing,
            message="FSDP's own activation_checkpointing; ask for it in the training arguments",
        ),
        Refusal(
            when=plugin.cpu_ram_efficient_loading,
            message="FSDP's cpu_ram_efficient_loading, which leaves stages without values; give "
            "FlexSeqTrainer the model's name, and every rank loads its own stage alone",
        ),
        Refusal(
            when=param_dtype not in (None, cast_dtype),
            message=f"FSDP's mixed_precision_policy with param_dtype={param_dtype}, beside a "
            f"mixed precision in {cast_dtype}; leave the policy out, and set bf16=True if wanted",
        ),
        Refusal(
            when=plugin.ignored_modules,
            message="FSDP's ignored_modules; leave them out",
        ),
    ]
