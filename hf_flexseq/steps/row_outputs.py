"""Give TRL's SFTTrainer the outputs of its head for every row of a token.

Its loss and its metrics are sums over fields of the outputs that have a value for each token:
log-probabilities, entropies, whether the likeliest token is the right one, and whether the token
has a label at all. Without a label all values are 0. The head computes a token that several rows
share once; the trainer gets its values once for every row in which the token has a label:

    tokens                              a    b    c    d    e
    rows in which each has a label      0    3    1    1    2
    values that the trainer gets        b b b c d e e

So all sums are sums over the rows, whatever the trainer computes from a value, and no TRL metric
is computed here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def outputs_of_rows(model: nn.Module) -> Iterator[None]:
    """Repeat the outputs of `model`, as a trainer has it, for the rows of each token inside the
    block."""
    hook = model.register_forward_hook(_repeated, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _repeated(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
    """Return outputs whose fields are [1, targets of rows] instead of [1, tokens]."""
    counts = getattr(kwargs.get("seq_ctx"), "target_counts", None)  # [tokens]
    if counts is None or kwargs.get("labels") is None:
        return outputs
    mask = getattr(outputs, "label_mask", None)
    if mask is None:
        raise NotImplementedError(
            f"{type(module).__name__} returns a loss of tokens that several rows share, each "
            "counted once: set shared_prefixes='off'"
        )
    fields: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            value = value.repeat_interleave(counts, dim=1)  # [1, tokens] -> [1, targets]
        fields[name] = value
    fields["loss"] = None  # it counts every token once, and the trainer reads the fields
    return type(outputs)(**fields)
