"""Note what the modules of a model return, token by token, wherever its tokens are."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

# Outputs of each module of a model, by name, for each sequence, [length, ...].
ModuleOutputs = dict[str, dict[int, torch.Tensor]]


@contextmanager
def noted_outputs(
    model: PreTrainedModel,
    places: Sequence[tuple[int, int, int]],
    lengths: Sequence[int],
    noted: ModuleOutputs,
) -> Iterator[None]:
    """Note the first output of every module that has a row for each token.

    places: (sequence, first token, tokens) of the row's parts, in their order. lengths: tokens of
    every sequence.
    """
    total = sum(tokens for _, _, tokens in places)
    seen: set[str] = set()

    def note(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if name in seen or not isinstance(output, torch.Tensor) or not output.dim():
            return
        seen.add(name)
        rows = output[0] if output.dim() > 2 and output.shape[0] == 1 else output
        if rows.shape[0] != total:
            return
        parts = rows.detach().double().split([tokens for _, _, tokens in places])
        for (sequence, start, tokens), part in zip(places, parts, strict=True):
            outputs = noted.setdefault(name, {})
            if sequence not in outputs:
                size = (lengths[sequence], *part.shape[1:])
                outputs[sequence] = part.new_full(size, torch.nan)
            outputs[sequence][start : start + tokens] = part

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(
                    lambda _module, _inputs, output, name=name: note(name, output)
                )
                hooks.callback(handle.remove)
        yield
