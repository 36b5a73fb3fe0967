"""Whether the rows of a model's steps may share prefixes, and why not.

A shared token is computed once for all of its rows. That is exact where whatever the model
computes of it depends on the tokens before it alone, and where the loss counts it as often as rows
have it.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.noise import dropout_in, noisy_option
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.steps.token_columns import LENGTHS

OFF, GROUPS = "off", "groups"
KEEPS_OWN_LOSS = "the model keeps its own loss, which counts every token once"
GIVES_SUMS = "the head of this version of TRL counts every token once"
USERS_CODE = "code of the trainer, or of yours in the model, reads the tokens of a micro-batch"


def reason_not_shared(
    model: nn.Module, base: PreTrainedModel, args: FlexSeqArguments
) -> str | None:
    """Return why rows may not share prefixes, in a few words; None if they may.

    model: to be trained, with adapters. base: the model of transformers inside.
    """
    if args.shared_prefixes == OFF:
        return "shared_prefixes='off'"
    if not PLANNERS[args.planner].takes_units:
        return f"planner={args.planner!r} plans rows"
    noise = dropout_in(model) or noisy_option(base.config)
    if noise is not None:
        return f"{noise} is drawn once for a shared token instead of once for each row"
    if LENGTHS in needed_columns(base):
        return "the rotary embedding depends on the length of the whole row"
    return None


# ---- noise that nothing announces


def refuse_noise(base: PreTrainedModel) -> ExitStack:
    """Let a forward raise NotImplementedError if it draws random numbers for tokens that several
    rows share, as an adapter or a hook may, until the returned stack is closed."""
    before: list[torch.Tensor] = []  # states of the generators

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.clear()
        if getattr(kwargs.get("seq_ctx"), "target_counts", None) is not None:
            before.extend(_generators(base.device))

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        if before and not all(map(torch.equal, before, _generators(base.device))):
            raise NotImplementedError(
                f"{type(base).__name__} draws random numbers, once for a token that several rows "
                "share: set shared_prefixes='off'"
            )

    hooks = ExitStack()
    hooks.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    hooks.callback(base.register_forward_hook(end).remove)
    return hooks


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators of a device and of the CPU, without waiting."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
