"""FSDP2 as a Trainer's user asks for it (`fsdp=True` with `fsdp_config`, or a configuration of
`accelerate launch`), for the stages of a pipeline.

accelerate shards one model over all ranks. A stage is on some of them, so its engine shards it,
and here accelerate is made to forget its own FSDP. On CPU it does so anyway: there its FSDP
silently is DDP, so FSDP's settings are read from the training arguments.

Stages take only the dtype of the gathered parameters from accelerate's mixed precision; gradients
are summed in the dtype of the optimizer's parameters, whatever FSDP policy accelerate derives.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_flexseq.hf.model.facts import autocast_dtype
from hf_flexseq.pipeline.trainer.checks import check_fsdp_of_stages


def check_fsdp(trainer: Any) -> bool:
    """Tell if a trainer asks for FSDP. Raises NotImplementedError for a setting that stages cannot
    follow."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None) or _asked_for(trainer.args)
    if plugin is not None:
        check_fsdp_of_stages(plugin, autocast_dtype(trainer.accelerator))
    return plugin is not None


def take_over_fsdp(trainer: Any) -> bool:
    """Decide if the stages are to be sharded; accelerate then never touches them, as a cut model
    stays cut. Raises as `check_fsdp` does."""
    state = trainer.accelerator.state
    if not check_fsdp(trainer):
        return False
    if state.distributed_type == DistributedType.FSDP:
        # accelerate has no way to change its mind: all its states share what is set here.
        state.distributed_type = DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = state.distributed_type
    state.fsdp_plugin = None
    trainer.is_fsdp_enabled = False
    return True


def _asked_for(args: Any) -> FullyShardedDataParallelPlugin | None:
    """Return FSDP's settings in the training arguments, which accelerate drops on CPU, or None."""
    options: Mapping[str, Any] | None = getattr(args, "fsdp_plugin_args", None)
    if options is None:
        return None
    return FullyShardedDataParallelPlugin(**options)
