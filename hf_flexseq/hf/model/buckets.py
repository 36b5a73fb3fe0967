"""Let DDP reduce gradients while the last backward still runs.

DDP waits until a bucket is full, 25 MB by default. A model that is not much larger has all its
gradients in one or two buckets, whose transfers begin when no backward is left to hide them. Such
a model gets smaller buckets; large models keep the default.
"""

from dataclasses import replace
from math import ceil

from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

BUCKETS = 8  # buckets of a small model at most; each has a MB or more
MB = 2**20  # bytes


def early_buckets(
    asked: DistributedDataParallelKwargs | None, model: nn.Module
) -> DistributedDataParallelKwargs:
    """Return the options for DDP, from the user's. A bucket size other than the default stays."""
    asked = asked or DistributedDataParallelKwargs()
    if asked.bucket_cap_mb != DistributedDataParallelKwargs.bucket_cap_mb:
        return asked
    gradient_bytes = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient_bytes += parameter.numel() * parameter.element_size()
    bucket_mb = max(1, ceil(gradient_bytes / MB / BUCKETS))
    return replace(asked, bucket_cap_mb=min(asked.bucket_cap_mb, bucket_mb))
