"""The training mode of a model, set once in a step.

The Trainer calls `model.train()` with every batch that it trains on, and so with every micro-batch
of a plan: a walk through all modules, about 2 microseconds for each, 0.8 ms for 32 layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode; inside the block `model.train()` is a no-op in that mode,
    and returns to it after `model.eval()`."""
    whole = model.train
    whole()

    def train(mode: bool = True) -> nn.Module:
        return model if model.training == mode else whole(mode)

    # Next to the attributes that wrappers such as torch.compile's pass on to the inner model.
    model.__dict__["train"] = train
    try:
        yield
    finally:
        del model.__dict__["train"]
