"""Tiny mixtures of experts that transformers spreads over ranks, and how far their steps are from
those of one process. `scripts/benchmarks/experts.py` uses this, too."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.distributed import DistributedConfig

from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from hf_flexseq.plan import Plan
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_exactness import LENGTHS, own_batches, whole
from tests.hf.test_fsdp_policies import figures_for
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.test_router import COEFFICIENT, router_loss_of
from tests.hf.tiny import (
    RandomPlanEngine,
    any_choice,
    documents,
    reference_gradients,
    reference_loss,
    relative_errors,
    taken_gradients,
)

# Eight experts of each family, by the names of its configuration.
EXPERTS: dict[str, dict[str, int]] = {
    "Qwen3Moe": {"num_experts": 8},
    "Qwen3_5Moe": {"num_experts": 8},
    "GptOss": {"num_local_experts": 8},
    "DeepseekV3": {"n_routed_experts": 8},
    "Glm4Moe": {"n_routed_experts": 8},
    "Mixtral": {"num_local_experts": 8},
    "NemotronH": {"n_routed_experts": 8},
    "KimiLinear": {"num_local_experts": 8},
}
# Families that add a router loss to their own.
ROUTED = ("Qwen3Moe", "Qwen3_5Moe", "GptOss", "Mixtral")

# Ranks, and what `DistributedConfig` is given.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "2 ranks": (2, {"fsdp_size": 2, "ep_size": 2}),
    "4 ranks": (4, {"fsdp_size": 4, "ep_size": 4}),
    "4 ranks in 2 groups": (4, {"fsdp_size": 4, "ep_size": 2}),
    "2 replicas": (4, {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}),
}
POLICIES = (PLAIN, FsdpPolicy(reduces_each=False, regathers=False))


def make(family: str, **others: Any) -> Any:
    """A tiny model of a family, in one process; others: of its configuration."""
    maker = make_hybrid if family in HYBRIDS else make_model
    return maker(family, **{**EXPERTS.get(family, {}), **others})


def with_router_loss(family: str) -> dict[str, Any]:
    """Options by which a family adds a router loss to its own."""
    return {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def save(family: str, folder: Path, **others: Any) -> Path:
    """Save the model of `make`; return where. transformers puts some rows of Kimi Linear into
    another order when it shards a checkpoint in its published form."""
    path = folder / "-".join((family, *others))
    if not path.exists():
        make(family, **others).save_pretrained(path, save_original_format=family != "KimiLinear")
    return path


def spread(
    path: Path, kind: Any, config: Mapping[str, int], dtype: torch.dtype = torch.float64, **others
) -> Any:
    """The model that was saved at `path`, of class `kind`, sharded at load. config: of
    `DistributedConfig`. others: for `from_pretrained`."""
    model = kind.from_pretrained(
        path,
        dtype=dtype,
        distributed_config=DistributedConfig(**config),
        **{"experts_implementation": "eager", **others},
    )
    for buffer in model.buffers():  # which transformers makes in float32, whatever the dtype
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model.train()


def has_all_degrees(world_size: int, plan: Plan) -> bool:
    """Tell if a plan has groups of 1, 2 and, on four ranks, 4 ranks, and a micro-batch in which a
    rank has no tokens."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    degrees = {group.degree for group in groups}
    idle = False
    for micro_batch in plan.micro_batches:
        working = {rank for group in micro_batch.groups for rank in group.ranks}
        idle |= len(working) < world_size
    return idle and {1, 2, world_size} <= degrees


def reference(model: Any, examples: Any, *, router_loss: bool) -> tuple[float, Any]:
    """Loss and gradients of one process that has the step as one batch."""
    if not router_loss:
        return reference_gradients(model, examples, "eager")
    model.set_attn_implementation("eager")
    loss = reference_loss(model, examples) + COEFFICIENT * router_loss_of(model, examples)
    loss.backward()
    return float(loss.detach()), taken_gradients(model)


def errors_of_steps(
    rank: int,
    world_size: int,
    folder: Path,
    family: str,
    config: Mapping[str, int],
    *,
    checkpointing: bool = False,
    router_loss: bool = False,
    choices: bool = False,
    steps: int = 2,
) -> dict[str, float]:
    """The largest relative errors of the loss and of the gradients of experts and of all others,
    over some steps in float64. Each has groups of all degrees and a rank without tokens, and every
    second one gathers and reduces once. choices: each micro-batch has one for its activations."""
    with ExitStack() as patches:
        keep_float64(patches.enter_context(pytest.MonkeyPatch.context()))
        options = with_router_loss(family) if router_loss else {}
        examples = documents(LENGTHS)
        whole_model = make(family, **options)
        wanted_loss, wanted = reference(whole_model, examples, router_loss=router_loss)
        model = spread(save_once(rank, family, folder, options), type(whole_model), config)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = model.config.get_text_config().num_hidden_layers
        engine = RandomPlanEngine(
            Accelerator(cpu=True),
            seed=world_size,
            accepts=partial(has_all_degrees, world_size),
            choose=partial(any_choice, layers) if choices else lambda rng: None,
            cost_model="estimate",  # which knows activations
        )
        engine.attach(model)
        worst = {"loss": 0.0, "experts": 0.0, "others": 0.0}
        for number in range(steps):
            engine.executor.fsdp.figures = figures_for(POLICIES[number % len(POLICIES)])
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(model)
            torch.distributed.all_reduce(loss)
            errors = relative_errors(whole_gradients(model), wanted)
            for name, error in errors.items():
                part = "experts" if ".experts." in name else "others"
                worst[part] = max(worst[part], error)
            worst["loss"] = max(worst["loss"], abs(float(loss) / world_size / wanted_loss - 1))
        engine.detach()
        return worst


def save_once(rank: int, family: str, folder: Path, options: Mapping[str, Any]) -> Path:
    """Save a model on rank 0; return where. Collective over the world."""
    if rank == 0:
        save(family, folder, **options)
    torch.distributed.barrier()
    return save(family, folder, **options)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """All gradients, whole, by parameter name; the model has none afterwards. Collective over the
    world."""
    found = {name: whole(gradient) for name, gradient in taken_gradients(model).items()}
    return {name: gradient.double() for name, gradient in found.items()}
