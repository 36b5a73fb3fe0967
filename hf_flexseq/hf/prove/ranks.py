"""How many ranks a machine proves with."""

import torch

CPU_RANKS = 2


def default_ranks() -> int:
    """Return one rank for each GPU, or two on a CPU."""
    return torch.cuda.device_count() or CPU_RANKS
