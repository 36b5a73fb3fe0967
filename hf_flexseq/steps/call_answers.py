"""Answers to calls of a model while a loss is computed."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def answered_by(
    model: nn.Module,
    answer: Callable[[dict[str, Any]], Any],
    *,
    is_paused: Callable[[], bool],
) -> Iterator[None]:
    """Answer calls of `model` inside the block by `answer`, from their keyword arguments. The
    model itself still runs calls on micro-batches, which have `seq_ctx`, and all calls while
    `is_paused`.

    To `isinstance`, and to code that unwraps it, the model is unchanged: only its class gets
    another `__call__`. Rejected: another `forward`, before which the hooks of FSDP and ZeRO would
    gather unused weights.
    """
    own = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "seq_ctx" in kwargs or is_paused():
            return own.__call__(self, *args, **kwargs)
        names = list(inspect.signature(own.forward).parameters)[1:]  # without self
        return answer(dict(zip(names, args, strict=False)) | kwargs)

    members = {"__call__": call, "__module__": own.__module__, "__doc__": own.__doc__}
    model.__class__ = type(own.__name__, (own,), members)
    try:
        yield
    finally:
        model.__class__ = own
