"""Measure how unevenly a model's own routers spread tokens over the ranks of an expert group.

The user's model runs forward once, on a thousand tokens of the user's rows, different ones on
every rank, or on random tokens where there are no rows. Each layer tells how many of its rows go
to the experts of each rank; those of the busiest rank over the mean are the imbalance of the
layer. The mean over layers is that of the model, for ranks of an expert group wait for the busiest
one in every layer.

Random tokens are not text. Words that are frequent in text go to the same experts each time, so
that new routers spread text less evenly; those that were trained to balance text spread it more
evenly.

Nothing is left on the model: no gradients and no hooks, modes and random numbers as they were, and
parameters that FSDP2 keeps whole after a forward are sharded again.
"""

import inspect
from collections.abc import Iterator, Sized
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
    rows: Any = None,
) -> float:
    """Return the tokens that the busiest rank of an expert group gets over the mean of its ranks,
    1 to ranks, the same on every rank. Collective over the world.

    model: with its own attention. autocast: its dtype in training; None without. rows: a
    dataset of `datasets` with a column input_ids; random tokens stand in for anything else.
    """
    ranks = meshes.experts.size()
    of_rank = expert_counts(model.config.get_text_config())[0] // ranks  # experts of a layer
    counts: list[torch.Tensor] = []  # of each layer, rows for each rank of the group: [ranks]

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts.append(torch.bincount(chosen.flatten() // of_rank, minlength=ranks))

    tokens = _tokens(rows, communicator.rank, communicator.world_size)
    if tokens is None:
        vocabulary = model.config.get_text_config().vocab_size
        tokens = _random_tokens(vocabulary, communicator.rank)
    inputs = _inputs(model, tokens.to(device))
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
    routed = torch.tensor(of_all).sum(dim=0).view_as(by_layer).double()  # of all ranks' tokens
    return round(float((routed.amax(dim=1) / routed.mean(dim=1)).mean()), DIGITS)


def has_tokens(rows: Any) -> bool:
    """Tell whether `rows` is a dataset of `datasets` whose rows can be read by number, and have
    tokens."""
    return isinstance(rows, Sized) and "input_ids" in (getattr(rows, "column_names", None) or ())


def _tokens(rows: Any, rank: int, ranks: int) -> torch.Tensor | None:
    """Return tokens of this rank's part of the rows, one row after the other:
    [SEQUENCES, LENGTH]; None if the rows have none."""
    if not has_tokens(rows):
        return None
    rows = rows.with_format(None)  # without a function of the user's, which may draw numbers
    wanted = SEQUENCES * LENGTH
    first = rank * len(rows) // ranks
    tokens: list[int] = []
    for index in range(first, first + wanted):
        if len(tokens) >= wanted or not len(rows):
            break
        tokens += rows[index % len(rows)]["input_ids"][:wanted]
    if len(tokens) < wanted:
        return None
    return torch.tensor(tokens[:wanted]).view(SEQUENCES, LENGTH)


def _random_tokens(vocabulary: int, rank: int) -> torch.Tensor:
    """Return random tokens of this rank: [SEQUENCES, LENGTH]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(vocabulary, (SEQUENCES, LENGTH), generator=generator)


def _inputs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a call on `tokens` that makes next to no logits."""
    inputs: dict[str, Any] = {"input_ids": tokens}
    takes = inspect.signature(type(model).forward).parameters
    if "position_ids" in takes:  # some models would remember those that they make themselves
        positions = torch.arange(LENGTH, device=tokens.device)
        inputs["position_ids"] = positions.expand(SEQUENCES, -1)
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
