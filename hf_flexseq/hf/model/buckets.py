"""Gradients that DDP reduces while the last backward still runs.

DDP waits until a bucket is full, 25 MB by default. A model of not much more has all its gradients
in one or two, whose transfers begin when there is nothing left to hide them. So these have smaller
ones; large models keep the default.
"""

from dataclasses import replace
from math import ceil

from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

BUCKETS = 8  # at most, each of a MB or more


def early_buckets(
    asked: DistributedDataParallelKwargs | None, model: nn.Module
) -> DistributedDataParallelKwargs:
    """What DDP should be made with. A bucket size that the user has chosen stays, if it is not the
    default."""
    asked = asked or DistributedDataParallelKwargs()
    if asked.bucket_cap_mb != DistributedDataParallelKwargs.bucket_cap_mb:
        return asked
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return replace(
        asked, bucket_cap_mb=min(asked.bucket_cap_mb, max(1, ceil(gradients / 2**20 / BUCKETS)))
    )
