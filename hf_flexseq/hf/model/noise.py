"""Random numbers in a model while it trains: those that it draws by itself, and NEFTune's noise on
the embeddings of an attached model.

transformers' own hook for the latter draws from the device's generator, and divides by the length
of the row, which here holds parts of several sequences. `attach_noise` adds the noise of
`steps/embedding_noise.py` instead.
"""

import re
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.steps.embedding_noise import TokenNoise
from hf_flexseq.steps.forward_hooks import around_forward

_NOISE = re.compile("dropout|pdrop|drop_rate|drop_path|drop_prob|jitter")  # in names of options
# Options of heads for classes, which GPT-2 and GPT-NeoX have in every model: where there is such a
# head, its dropout is a module.
_OF_CLASSES = re.compile(r"\.(classifier|summary)_\w*$")


def dropout_in(model: nn.Module) -> str | None:
    """Return the module that draws dropout in a model, in words; None without one."""
    for name, module in model.named_modules():
        if _is_dropout(module):
            return f"dropout in {name}" if name else "dropout"
    return None


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def dropout_held_by(module: nn.Module) -> dict[str, float]:
    """Return the probabilities of dropout that a module itself holds, by attribute."""
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    numbers = {name: one for name, one in vars(module).items() if isinstance(one, (int, float))}
    return {n: one for n, one in numbers.items() if "drop" in n or (is_dropout and n == "p")}


def noise_of_module(module: nn.Module) -> str | None:
    """Return the module or attribute that draws random numbers in a module, in words; None where
    nothing does."""
    return dropout_in(module) or next(filter(None, map(_noisy_attribute, module.modules())), None)


def _noisy_attribute(module: nn.Module) -> str | None:
    """Return an attribute of a module, with its value, for noise that it draws by functions."""
    for option, value in vars(module).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and value > 0 and _NOISE.search(option):
            return f"{option}={value}"
    return None


def has_noise_of_its_own(module: nn.Module) -> bool:
    """Tell if a module draws random numbers in training, whatever the modules inside it do."""
    return _is_dropout(module) or _noisy_attribute(module) is not None


def noisy_option(config: PreTrainedConfig, *, of_text: bool = True) -> str | None:
    """Return an option, with its value, for noise that models draw by functions: BioGPT's dropout,
    the jitter of routers; None without one. of_text: False for options of other parts alone."""
    options = config.to_dict()
    if not of_text:
        text_config = config.get_text_config()
        for name in [name for name, value in vars(config).items() if value is text_config]:
            options.pop(name, None)
    pending: list[tuple[str, Any]] = [("config", options)]
    while pending:
        path, value = pending.pop()
        is_noise = _NOISE.search(path) and not _OF_CLASSES.search(path)
        if isinstance(value, dict):
            pending += [(f"{path}.{name}", one) for name, one in value.items()]
        elif isinstance(value, (int, float)) and value > 0 and is_noise:
            return f"{path}={value}"
    return None


# ---- NEFTune's noise


def attach_noise(model: PreTrainedModel) -> ExitStack:
    """Add the noise of each micro-batch to its embedded tokens, until the returned stack is
    closed. As in transformers, only a model in training mode has noise, also without gradients.
    model: without adapters."""
    attached = ExitStack()
    of_call: list[TokenNoise | None] = [None]  # while the model runs on a micro-batch

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        context = kwargs.get("seq_ctx")
        of_call[0] = None if context is None else context.noise

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        of_call[0] = None

    def add(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, [1, tokens, hidden], with noise in training mode."""
        noise = of_call[0]
        return embedded if noise is None or not module.training else noise.added_to(embedded)

    attached.callback(model.get_input_embeddings().register_forward_hook(add).remove)
    for entry in {model, model.base_model}:
        attached.enter_context(around_forward(entry, begin, end))
    return attached
