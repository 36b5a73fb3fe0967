"""Try a loss function that the user has set on a model: `model.loss_function = own`.

Such a model keeps its loss, and gets it computed on parts of sequences whose labels are shifted
already. This is exact for a sum over tokens that reads `shift_labels`, and the source does not say
whether a function is one. So it is called on a few random logits, once as the plain Trainer calls
it and once on two parts, and both must agree.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.model.loss import ChunkedLoss

Loss = Callable[..., torch.Tensor]

TOKENS = 8
TOLERANCE = 1e-3  # relative: functions may round to 16 bits


def own_loss_of(model: nn.Module) -> Loss | None:
    """Return the loss function that the user has set on a model; None for transformers' own."""
    own: Loss | None = getattr(model, "_loss_function", None)
    if own is ForCausalLMLoss or isinstance(getattr(own, "__self__", None), ChunkedLoss):
        return None
    return own


def check_own_loss(model: Any) -> None:
    """Raise NotImplementedError for a model, not an adapter, with a loss function of the user's
    that is not known to be exact on parts of sequences."""
    own = own_loss_of(model)
    if own is None:
        return
    name = f"{type(model).__name__}: its loss_function {getattr(own, '__name__', own)}"
    with ErrorCapture() as trying, torch.random.fork_rng(devices=[]):
        whole, parts = _tried(own, model)
    if trying.error is not None:
        raise NotImplementedError(
            f"{name} could not be called on a part of a sequence ({trying.error}): take "
            "shift_labels, num_items_in_batch and **kwargs"
        ) from trying.error
    if abs(whole - parts) > TOLERANCE * abs(whole):
        raise NotImplementedError(
            f"{name} gives {whole:.4g} on a sequence and {parts:.4g} on two parts of it: use "
            "shift_labels where they are given, and divide the sum over tokens by "
            "num_items_in_batch"
        )


def _tried(own: Loss, model: Any) -> tuple[float, float]:
    """Return the loss of a random sequence as a whole, and the sum of the losses of its parts."""
    device = next(model.parameters()).device
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, vocab, generator=generator).to(device)  # [1, T, V]
    labels = torch.randint(vocab, (1, TOKENS), generator=generator).to(device)  # [1, T]
    labels[0, 2] = IGNORE_INDEX
    targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]  # [1, T]
    items = (targets != IGNORE_INDEX).sum()
    whole = own(logits, labels, vocab_size=vocab, num_items_in_batch=items)
    parts = torch.zeros((), device=device)
    for part in (slice(0, 3), slice(3, TOKENS)):
        parts = parts + own(
            logits[:, part],
            targets[:, part],
            vocab_size=vocab,
            shift_labels=targets[:, part],
            num_items_in_batch=items,
            seq_ctx=None,
        )
    return float(whole), float(parts)
