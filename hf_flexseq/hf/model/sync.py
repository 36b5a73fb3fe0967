"""Decide if all ranks run every micro-batch together (lockstep) or meet in their groups alone.

Experts over ranks need lockstep: each of their layers exchanges tokens between all ranks of an
expert group (docs/architecture.md says why). transformers shards every such model by FSDP2, since
`ep_size` divides `fsdp_size` x `tp_size`, and models with tp_size > 1 are refused.
"""

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.sharding_kind import is_fully_sharded, zero_stage


def resolve_sync(
    args: FlexSeqArguments,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    lockstep: bool,
    is_ordered: bool,
) -> bool:
    """Return True if all ranks run every micro-batch together. Raises ValueError if sync='free'
    forbids it. lockstep: True if users' code needs it. is_ordered: True if transfers run in launch
    order."""
    reason = None
    is_sharded = is_fully_sharded(model, accelerator) or zero_stage(model, accelerator) >= 2
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    if is_sharded or each or lockstep:
        reason = (
            "needs ranks that run different numbers of micro-batches, but here they meet in every "
            "one (FSDP, experts over ranks, ZeRO-2/3, sync_each_batch, or a compute_loss of your "
            "own)"
        )
    elif is_ordered and _reduces_by_itself(accelerator):
        reason = (
            "needs one place in the plan where all ranks reduce gradients, but here each does so "
            "in its own last micro-batch (DeepSpeed, or a DDP comm_hook), which can hang on NCCL"
        )
    if reason is not None and args.sync == "free":
        raise ValueError(f"sync='free' {reason}: use sync='auto'")
    return reason is not None or args.sync == "lockstep"


def _reduces_by_itself(accelerator: Accelerator) -> bool:
    """Return True if DeepSpeed or a DDP hook reduces gradients, instead of `reduction.py`."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return True
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    return bool(hook != DDPCommunicationHookType.NO)
