"""Experts that transformers has spread over ranks (`DistributedConfig(ep_size=...)`).

Each rank of an expert group holds some experts of every layer. A layer sends its tokens to the
ranks of their experts, and gets the results back. It takes different tokens from each rank, so
groups that share sequences, and ranks without tokens, need no change in it.

    ExpertRanks             how experts lie over the ranks
    expert_ranks            reads it from a model
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_flexseq.hf.model.facts import distributed_config, expert_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRanks:
    """How the experts of a model lie over the ranks.

    There are replicas * efsdp_size * ep_size ranks. Ranks of one expert group are neighbours:
    group g is the ranks [g * ep_size, (g + 1) * ep_size).
    """

    ep_size: int
    """Ranks of an expert group, which together hold all experts."""
    efsdp_size: int
    """Expert groups of a replica; FSDP shards the experts of a rank over them."""
    replicas: int
    """Copies of the sharded state: more than one in HSDP."""
    experts: int
    """Experts of a layer."""
    top_k: int
    """Experts that work on a token."""


def expert_ranks(model: nn.Module) -> ExpertRanks | None:
    """Return how the experts of `model`, a transformers model without adapters around it, lie over
    the ranks; None if every rank works on its own tokens alone."""
    config = distributed_config(model)
    if config is None or config.ep_size == 1:
        return None
    counts = [parameter.shape[0] for parameter in _spread_parameters(model)]
    if not counts:
        return None
    _, top_k = expert_counts(model.config.get_text_config())
    return ExpertRanks(
        ep_size=config.ep_size,
        efsdp_size=config.efsdp_size,
        replicas=config.dp_replicate_size,
        experts=max(counts),
        top_k=top_k,
    )


def _spread_parameters(model: nn.Module) -> Iterator[DTensor]:
    """Yield the parameters whose experts lie on different ranks, [experts, ...] as a whole."""
    for parameter in model.parameters():
        data: Any = parameter.data
        if isinstance(data, DTensor) and "ep" in (data.device_mesh.mesh_dim_names or ()):
            yield data
