"""Experts that are chosen by the token alone.

In 16 bits two orders of a sum may send a token to other experts, and gradients then differ by far
more than rounding. So a router's input is shifted by a constant of the token: by the shift its
logits are `MARGIN` larger for as many neighbouring experts as work on a token, and these win, on
one process and on ranks alike. Routers still compute logits, and have gradients.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.hf.model.facts import expert_counts

MARGIN = 8.0  # of the logits of experts that are chosen, over the norm of a router's largest row


def pin_routers(model: PreTrainedModel) -> int:
    """Choose experts by tokens in all calls of a model and of its copies, one after the other.
    Return the number of its routers; 0 where none is known."""
    tokens: list[torch.Tensor] = []  # of the call that runs, [tokens]
    routers = _routers(model)
    for router in routers:
        _pin(router, expert_counts(model.config.get_text_config()), tokens)
    if routers:
        model.get_input_embeddings().register_forward_pre_hook(_noting(tokens))
    return len(routers)


def _routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules beside experts that have a row of weights for each of them."""
    experts, _ = expert_counts(model.config.get_text_config())
    found = []
    for block in model.modules():
        children = dict(block.named_children())
        if experts < 2 or "experts" not in children:
            continue
        for child in children.values():
            weight = getattr(child, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2 and len(weight) == experts:
                found.append(child)
    return found


def _noting(tokens: list[torch.Tensor]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        tokens[:] = [args[0].reshape(-1)]

    return note


def _pin(router: nn.Module, counts: tuple[int, int], tokens: list[torch.Tensor]) -> None:
    shifts = _shifts(router.weight.detach().to(torch.float32), *counts)  # [experts, width]

    def shift(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args  # [..., width] of all tokens
        own = shifts[tokens[0] % len(shifts)]  # [tokens, width]
        return (hidden + own.view(hidden.shape).to(hidden.dtype), *others)

    router.register_forward_pre_hook(shift)


def _shifts(weight: torch.Tensor, experts: int, active: int) -> torch.Tensor:
    """Return the shifts of a router's input, [experts, width]: shift e makes it choose expert e
    and its successors, `active` in all. weight: of the router, [experts, width]."""
    every = torch.arange(experts, device=weight.device)
    chosen = (every[:, None] + every[:active]) % experts  # [experts, active]
    wanted = torch.zeros(experts, experts, device=weight.device)
    wanted.scatter_(1, chosen, float(MARGIN * weight.norm(dim=1).max()))
    return wanted @ torch.linalg.pinv(weight).T
