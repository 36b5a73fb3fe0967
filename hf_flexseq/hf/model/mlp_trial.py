"""Find the modules of a model's layers that treat every token alone, as MLPs do.

A model of a few narrow layers, of the same class and the same kinds of layers, is made on the CPU.
Each module of its layers whose forward takes one tensor is called on random hidden states
[1, tokens, hidden]. It treats tokens alone if

    its result has the shape of its input
    the result of a piece of the tokens is that piece of the result
    it writes nothing to its input

and if it holds at least two matrices: a single one makes nothing that is wider than its input and
its result. Modules in attention and recurrent mixers are not looked at, for the forward of these
takes more than hidden states. Experts group tokens by themselves, and stay as they are; of a
mixture of experts only the MLP that all tokens share is taken.

A layer that calls its matrices itself, as OPT's, has no such module.
"""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_flexseq.hf.model.rehearsal import (
    FAULTS,
    TOKENS,
    in_one_line,
    once_for_equal_models,
    without_sharding,
)
from hf_flexseq.hf.model.sharding import is_experts, unsharded_class
from hf_flexseq.hf.model.small import plain_options, small_config

_PIECE = slice(20, 33)  # of the tokens
_MOST_ERROR = 1e-5  # relative; a part of a module may compute in float32
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class Place(NamedTuple):
    """Where a layer has a module that treats tokens alone."""

    name: str
    """Its name in the layer, such as `mlp.shared_expert`."""
    kind: type[nn.Module]
    """Its class."""


class UnknownMlps(Exception):
    """It cannot be tried which modules treat tokens alone; the message is the reason."""


def text_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model's text decoder, which may be checkpointed, with their names in
    the decoder."""
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module


@once_for_equal_models
def token_wise_places(model: PreTrainedModel) -> frozenset[Place]:
    """Return where layers of the class and configuration of `model` have modules that treat tokens
    alone. Raises UnknownMlps for a model of which no small one can be made."""
    small = small_like(model)
    width = small.config.get_text_config().hidden_size
    hidden = torch.randn(1, TOKENS, width, dtype=torch.float64, generator=torch.Generator())
    places = set()
    for _, layer in text_layers(small):
        for name, module in _candidates(layer):
            if _treats_tokens_alone(module, hidden):
                places.add(Place(name, type(module)))
    return frozenset(places)


def small_like(model: PreTrainedModel) -> PreTrainedModel:
    """Return a small model of the class of `model`, in float64 on the CPU, in training mode."""
    kind = unsharded_class(model)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), without_sharding():
            config = small_config(kind, plain_options(model.config.to_diff_dict()))
            small: PreTrainedModel = kind._from_config(config, experts_implementation="eager")
    except FAULTS as error:
        what = in_one_line(error)
        raise UnknownMlps(f"no small {kind.__name__} could be made ({what})") from error
    return small.double().train()


def _candidates(parent: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules without experts that take hidden states alone, with their names
    in the layer."""
    for name, child in parent.named_children():
        path = prefix + name
        is_container = isinstance(child, _CONTAINERS)
        if _is_experts(name, child) or not (is_container or takes_one_tensor(child)):
            continue
        if is_container or holds_experts(child):
            yield from _candidates(child, f"{path}.")
        elif sum(parameter.dim() == 2 for parameter in child.parameters()) > 1:
            yield path, child


def _is_experts(name: str, module: nn.Module) -> bool:
    return name == "experts" or is_experts(module)


def holds_experts(module: nn.Module) -> bool:
    """Tell if a module has experts inside."""
    return any(
        _is_experts(name.rpartition(".")[2], inner) for name, inner in module.named_modules()
    )


def takes_one_tensor(module: nn.Module) -> bool:
    """Tell if the forward of a module has one parameter."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # not self
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


@torch.no_grad()
def _treats_tokens_alone(module: nn.Module, hidden: torch.Tensor) -> bool:
    """Tell if a module does as the page says on hidden [1, tokens, hidden]."""
    given = hidden.clone()
    try:
        whole = module(given)  # [1, tokens, hidden]
        piece = module(hidden[:, _PIECE].clone())  # [1, tokens of the piece, hidden]
    except FAULTS:
        return False
    if not isinstance(whole, torch.Tensor) or not isinstance(piece, torch.Tensor):
        return False
    if whole.shape != hidden.shape or not torch.equal(given, hidden):
        return False
    wanted = whole[:, _PIECE]
    return piece.shape == wanted.shape and bool(
        (piece - wanted).norm() <= _MOST_ERROR * wanted.norm()
    )
