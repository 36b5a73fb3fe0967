"""Whether the rows of a model's steps may share prefixes, and why not.

A shared token is computed once for all of its rows. That is exact where whatever the model
computes of it depends on the tokens before it alone, and where the loss counts it as often as rows
have it.
"""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.router import asks_for_router_loss
from hf_flexseq.steps.token_columns import LENGTHS

OFF, GROUPS = "off", "groups"
KEEPS_OWN_LOSS = "the model keeps its own loss, which counts every token once"
_ROUTER_NOISE = ("router_jitter_noise", "router_jitter_eps", "jitter_noise")


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
    for find in _REASONS:
        reason = find(model, base)
        if reason is not None:
            return reason
    return None


def _dropout(model: nn.Module, base: PreTrainedModel) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} draws dropout, once for a shared token instead of once for each row"
    return None


def _router_noise(model: nn.Module, base: PreTrainedModel) -> str | None:
    config = base.config.get_text_config()
    for name in _ROUTER_NOISE:
        if getattr(config, name, 0):
            return f"config.{name} adds noise, once for a shared token"
    return None


def _router_loss(model: nn.Module, base: PreTrainedModel) -> str | None:
    if asks_for_router_loss(base):
        return "the model's router loss counts every token once"
    return None


def _lengths(model: nn.Module, base: PreTrainedModel) -> str | None:
    if LENGTHS in needed_columns(base):
        return "the rotary embedding depends on the length of the whole row"
    return None


_REASONS: tuple[Callable[[nn.Module, PreTrainedModel], str | None], ...] = (
    _dropout,
    _router_noise,
    _router_loss,
    _lengths,
)
