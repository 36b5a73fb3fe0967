"""Experts over ranks in copies of a model, for timing.

    put_over_ranks   a rank keeps its share of the experts of each layer, and reaches the others as
                     transformers does in training, over the process group of the user's own model
    leave_out        a layer does everything else alone, on ranks that do not wait for each other

Tokens go to all experts alike, whatever the router of a copy says, which has random weights: what
routers do to the spread is measured on the user's model (`imbalance.py`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_flexseq.hf.model.divided import distributed_config, expert_group_size

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PlaceExperts = Callable[[PreTrainedModel], "list[SpreadExperts]"]

# Styles of transformers' plans: of a module with experts, and of its weights.
DISPATCHES = "ep_dispatch_experts"
SPREAD = "grouped_gemm"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMeshes:
    """Meshes of the ranks over which transformers has put a model, as its experts need them."""

    experts: DeviceMesh
    """Ranks of the expert group of this rank."""
    same_tokens: DeviceMesh
    """Ranks that hold the same tokens: this one alone without tensor parallelism."""
    implementation: str
    """`ep_implementation` of the DistributedConfig: how tokens reach their experts."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ExpertMeshes | None":
        """Return those of a model; None where every rank computes experts for its tokens alone."""
        if expert_group_size(model) == 1 or model._mesh_manager is None:
            return None
        return cls(
            experts=model._mesh_manager.get_mesh("ep"),
            same_tokens=model._mesh_manager.get_mesh("tp"),
            implementation=distributed_config(model).ep_implementation,
        )

    @classmethod
    def made(cls, world_size: int, expert_ranks: int) -> "ExpertMeshes":
        """Make those of a model that FSDP shards over all ranks. Collective over the world."""
        # as all imports of the module here, of a newer transformers than is needed otherwise
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh

        config = DistributedConfig(fsdp_size=world_size, ep_size=expert_ranks)
        _, meshes = initialize_distributed_mesh(config)
        return cls(
            experts=meshes.get_mesh("ep"),
            same_tokens=meshes.get_mesh("tp"),
            implementation=config.ep_implementation,
        )


def expert_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules of a whole model whose experts can be on other ranks."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan = _plan_of(model)
    names = [name for name, _ in model.named_modules()]
    return [
        name for name in names if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCHES
    ]


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the styles of a model's experts and of their weights by name, with * for numbers."""
    config = distributed_config(model)
    users = None if config is None else config.ep_plan
    return {**(model.ep_plan or {}), **(users or {})}


def leave_as_they_are(model: PreTrainedModel) -> "list[SpreadExperts]":
    """Let every rank compute the experts of a copy for its own tokens."""
    return []


def leave_out(model: PreTrainedModel) -> "list[SpreadExperts]":
    """Let the experts of a copy give back what they are given, with its routing weights."""
    for name in expert_modules(model):
        module: Any = model.get_submodule(name)
        for of_weight in list(module._parameters):
            setattr(module, of_weight, None)
        module.forward = _without_experts
    return []


def _without_experts(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weight tokens [tokens, hidden] by [tokens, k], so that routers get gradients."""
    return hidden_states * top_k_weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)


def put_over_ranks(meshes: ExpertMeshes, model: PreTrainedModel) -> "list[SpreadExperts]":
    """Put the experts of a copy over the ranks of an expert group, layer by layer."""
    return [SpreadExperts(model, name, meshes) for name in expert_modules(model)]


class SpreadExperts:
    """The experts of one layer of a copy, over the ranks of an expert group."""

    def __init__(self, model: PreTrainedModel, name: str, meshes: ExpertMeshes) -> None:
        """Cut the experts of a module, by its name in the copy, to those of this rank."""
        from transformers.distributed.parallel_utils import (
            ALL_PARALLEL_STYLES,
            replace_layer_number_by_wildcard,
        )

        plan = _plan_of(model)
        self.module: Any = model.get_submodule(name)
        self._of_layer: int = self.module.num_experts
        ranks = meshes.experts.size()
        if self._of_layer % ranks:
            raise ValueError(f"{self._of_layer} experts of a layer over {ranks} ranks")
        own = self._of_layer // ranks
        self._first = own * meshes.experts.get_local_rank()  # of the experts of this rank
        for of_weight, weight in list(self.module.named_parameters(recurse=False)):
            if plan.get(replace_layer_number_by_wildcard(f"{name}.{of_weight}")) == SPREAD:
                part = weight.detach()[self._first : self._first + own].clone()
                setattr(self.module, of_weight, nn.Parameter(part))
        self.module.num_experts = own
        self.module._is_expert_parallel = True
        ALL_PARALLEL_STYLES[DISPATCHES].install_forward(
            self.module,
            ep_mesh=meshes.experts,
            tp_mesh=meshes.same_tokens,
            ep_implementation=meshes.implementation,
        )
        self._dispatch: Experts = self.module.forward
        self.module.forward = self._forward
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None  # arguments, of one token

    def _forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Send tokens to all experts alike: [tokens, hidden] and two [tokens, k] -> [tokens,
        hidden]."""
        if self._seen is None:
            self._seen = (hidden_states[:1].detach().clone(), top_k_weights[:1].detach().clone())
        return self._dispatch(hidden_states, self.even(top_k_index), top_k_weights)

    def even(self, top_k_index: torch.Tensor) -> torch.Tensor:
        """Return experts that get equally many tokens, from this rank's own on, in the shape of
        those that the router has chosen."""
        pairs = torch.arange(top_k_index.numel(), device=top_k_index.device)
        return ((self._first + pairs) % self._of_layer).view_as(top_k_index)

    def run(self, tokens: int, *, to_first: bool, checkpointed: bool) -> Callable[[], None]:
        """Return a function that runs the experts alone on so many tokens of this rank, forward
        and backward, on tensors like those of the copy, which has to run before.

        to_first: True for the experts of the first rank alone. checkpointed: True if the forward
        runs once more in the backward.
        """

        @functools.cache
        def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            assert self._seen is not None, "the copy has run"
            hidden, weights = (
                one.expand(tokens, -1).contiguous().requires_grad_() for one in self._seen
            )  # [tokens, hidden], [tokens, k]
            chosen = self.even(
                torch.empty(weights.shape, dtype=torch.int64, device=weights.device)
            )
            if to_first:
                chosen = chosen % self.module.num_experts
            return hidden, chosen, weights

        def forward_backward() -> None:
            hidden, chosen, weights = arguments()
            if checkpointed:
                output = checkpoint(self._dispatch, hidden, chosen, weights, use_reentrant=False)
            else:
                output = self._dispatch(hidden, chosen, weights)
            output.backward(torch.ones_like(output))

        return forward_backward
