"""Gradients that DDP reduces while the last backward still runs.

DDP waits until a bucket is full, 25 MB by default. A model of not much more has all its gradients in one or two, whose
transfers begin when there is nothing left to hide them. So these have smaller ones; large models keep the default.
"""

from math import ceil

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

BUCKETS = 8  # at least, each of a MB or more


def fill_buckets_early(accelerator: Accelerator, model: nn.Module) -> None:
    """Before `accelerator.prepare`. A size that the user has chosen stays, if it is not the default."""
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if handler.bucket_cap_mb == DistributedDataParallelKwargs.bucket_cap_mb:
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        handler.bucket_cap_mb = min(handler.bucket_cap_mb, max(1, ceil(gradients / 2**20 / BUCKETS)))
        accelerator.ddp_handler = handler
