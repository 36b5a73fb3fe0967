"""Steps of a loop under random plans: what each gives on any number of ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.tiny import RandomPlanEngine, relative_errors, taken_gradients


def own_batches(examples: Any, rank: int, world_size: int) -> list[Any]:
    """What a rank's dataloader gives: every world_size-th example, two batches of them."""
    mine = examples[rank::world_size]
    half = len(mine) // 2
    collate = DataCollatorForFlexSeq()
    return [collate(part) for part in (mine[:half], mine[half:]) if part]


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def sharded(model: Any) -> Any:
    """The model under FSDP2, with a unit for each layer and one for the rest."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """All gradients, whole, by parameter name; the model has none afterwards. Collective over the
    world."""
    found = {name: whole(gradient) for name, gradient in taken_gradients(model).items()}
    return {name: gradient.double() for name, gradient in found.items()}


def random_steps(
    engine: RandomPlanEngine, model: Any, batches: list[Any], *, ddp: Any = None, plans: int = 1
) -> Iterator[tuple[Any, float, dict[str, torch.Tensor]]]:
    """Yield each step of `batches` under so many random plans, one step of two batches at a time,
    with its loss over all ranks and whole gradients; and detach the engine.

    ddp: options of DDP around the model; None for a model without it.
    """
    wrapped = model if ddp is None else DistributedDataParallel(model, **ddp)
    world_size = engine.communicator.world_size
    for _ in range(plans):
        for item in engine.steps(batches, 2):
            loss = item.backward(wrapped).clone()  # the step reads its own again
            if world_size > 1:
                dist.all_reduce(loss)
            yield item, float(loss) / world_size, whole_gradients(model)
    engine.detach()


def attached(model: Any, seed: int, **options: Any) -> RandomPlanEngine:
    """An engine of random plans that the model is attached to."""
    engine = RandomPlanEngine(Accelerator(cpu=True), seed, **options)
    engine.attach(model)
    return engine


def errors(loss: float, gradients: Any, wanted: tuple[float, Any]) -> dict[str, float]:
    """Relative errors of a loss and of the worst gradient. wanted: both of one process."""
    apart = relative_errors(gradients, wanted[1])
    return {"loss": abs(loss / wanted[0] - 1), "gradients": max(apart.values())}


def worst_of(found: Iterator[dict[str, float]]) -> dict[str, float]:
    """The largest of each of some errors."""
    found = list(found)
    return {name: max(one[name] for one in found) for name in found[0]}
