"""Random numbers that a model draws while it trains."""

import re
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_NOISE = re.compile("dropout|pdrop|drop_rate|drop_path|jitter")  # in the names of options


def has_noise(model: nn.Module, config: PreTrainedConfig) -> bool:
    """Tell whether `model` draws random numbers in training, by its modules or by `config`."""
    return dropout_module(model) is not None or noisy_option(config) is not None


def dropout_module(model: nn.Module) -> str | None:
    """Return the name of a module that draws dropout; None without one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return name
    return None


def noise_of_module(module: nn.Module) -> str | None:
    """Return what draws random numbers in a module, by a module or an attribute, in words; None
    where nothing does."""
    name = dropout_module(module)
    if name is not None:
        return f"dropout in {name}" if name else "dropout"
    for inner in module.modules():
        for option, value in vars(inner).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and value > 0 and _NOISE.search(option):
                return f"{option}={value}"
    return None


def noisy_option(config: PreTrainedConfig) -> str | None:
    """Return an option, with its value, for noise that models draw by functions: BioGPT's dropout,
    the jitter of routers; None without one."""
    pending: list[tuple[str, Any]] = [("config", config.to_dict())]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}.{name}", one) for name, one in value.items()]
        elif isinstance(value, (int, float)) and value > 0 and _NOISE.search(path):
            return f"{path}={value}"
    return None
