"""Hooks around the forward of a module."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn


def around_forward(
    module: nn.Module, begin: Callable[..., Any], end: Callable[..., Any]
) -> ExitStack:
    """Call begin(module, args, kwargs) before the other hooks of a forward, and end(module, args,
    outputs) after it, also after an error, until the returned stack is closed."""
    hooks = ExitStack()
    first = module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
    hooks.callback(first.remove)
    hooks.callback(module.register_forward_hook(end, always_call=True).remove)
    return hooks
