"""Measure how unevenly a model's own routers spread tokens over the ranks of an expert group.

The user's model runs forward once, on a few sequences of random tokens, different ones on every
rank. Each layer tells how many of its rows go to the experts of each rank; those of the busiest
rank over the mean are the imbalance of the layer. The mean over layers is that of the model, for
ranks of an expert group wait for the busiest one in every layer.

Random tokens are not text. Routers that were trained to balance text may spread them less evenly,
and experts that text of one kind prefers do not show. Tokens of the user's data are not drawn yet
when a model is attached.

Nothing is left on the model: no gradients and no hooks, modes and random numbers as they were, and
parameters that FSDP2 keeps whole after a forward are sharded again.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.expert_copies import ExpertMeshes, expert_modules
from hf_flexseq.hf.model.facts import expert_counts

SEQUENCES = 4
"""Sequences of a rank."""
LENGTH = 256
"""Tokens of each; a thousand in all decide the imbalance to within some percent."""

DIGITS = 3  # behind the point; there are no more in so few tokens


def measured_imbalance(
    model: PreTrainedModel,
    meshes: ExpertMeshes,
    communicator: Communicator,
    device: torch.device,
    *,
    autocast: torch.dtype | None,
) -> float:
    """Return the tokens that the busiest rank of an expert group gets over the mean of its ranks,
    1 to ranks, the same on every rank. Collective over the world.

    model: with its own attention. autocast: its dtype in training; None without.
    """
    ranks = meshes.experts.size()
    of_rank = expert_counts(model.config.get_text_config())[0] // ranks  # experts of a layer
    counts: list[torch.Tensor] = []  # of each layer, rows for each rank of the group: [ranks]

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts.append(torch.bincount(chosen.flatten() // of_rank, minlength=ranks))

    inputs = _inputs(model, communicator.rank, device)
    with ExitStack() as stack:
        stack.enter_context(_undisturbed(model, device))
        for name in expert_modules(model):
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, autocast, enabled=autocast is not None))
        model(**inputs, use_cache=False)
    by_layer = torch.stack(counts).cpu()  # [layers, ranks]
    of_all = communicator.cpu_group.gather_ints(by_layer.flatten().tolist())
    rows = torch.tensor(of_all).sum(dim=0).view_as(by_layer).double()  # for all tokens
    return round(float((rows.amax(dim=1) / rows.mean(dim=1)).mean()), DIGITS)


def _inputs(model: PreTrainedModel, rank: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a call: random tokens of this rank, and next to no logits."""
    generator = torch.Generator().manual_seed(rank)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (SEQUENCES, LENGTH), generator=generator)
    inputs: dict[str, Any] = {"input_ids": tokens.to(device)}
    takes = inspect.signature(type(model).forward).parameters
    if "position_ids" in takes:  # some models would remember those that they make themselves
        inputs["position_ids"] = torch.arange(LENGTH, device=device).expand(SEQUENCES, -1)
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    return inputs


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a block run the model in evaluation mode, and leave it and random numbers as they
    were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
