"""The cost model of a run that names none: measured on this machine, now or by an earlier run, or
only estimated.

A measurement takes seconds and is kept in `hf_flexseq` in the HuggingFace cache, one file for each
combination of all that it depends on. Rank 0 reads and writes; all ranks get its model.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub.constants import HF_HOME
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import broadcast_object
from hf_flexseq.hf.calibration.estimate import (
    estimated_cost_model,
    is_checkpointed,
    model_shape,
    zero_stage,
)
from hf_flexseq.hf.calibration.measure import Effort, device_name, measure
from hf_flexseq.hf.calibration.probe import ProbeSpec
from hf_flexseq.profiler.cache import cache_path, load_cached, save_whole
from hf_flexseq.topology import Topology

logger = logging.getLogger(__name__)

UNNAMED = ("auto", "estimate")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def unnamed_cost_model(
    name: str,
    model: PreTrainedModel,
    accelerator: Accelerator,
    communicator: Communicator,
    folder: Path | None = None,
    *,
    attention_remat: bool = True,
) -> CostModel:
    """The model for `name`: `estimate`, or `auto`, a measured one. Collective over the world.

    folder: of the cache. A measurement that makes no sense is dropped, with a warning, for the
    estimate.
    """
    estimate = estimated_cost_model(model, accelerator, communicator.topology)
    if name == "estimate":
        return estimate
    spec = replace(probe_spec(model, accelerator), attention_remat=attention_remat)
    shape, stage = model_shape(model), zero_stage(model, accelerator)
    key = {**fit_key(spec, shape, communicator.topology, accelerator.device), "zero_stage": stage}
    path = cache_path(folder or Path(HF_HOME) / "hf_flexseq", key)
    cached: CostModel | None = broadcast_object(
        communicator, load_cached(path) if communicator.rank == 0 else None
    )
    if cached is not None:
        logger.info("cost model measured earlier: %s", path)
        return with_memory_of(estimate, cached)
    measured = _measured(spec, shape, estimate, communicator, accelerator.device)
    if measured is None:
        return estimate
    cost = with_gathering(measured, shape, communicator.topology, stage)
    if communicator.rank == 0:
        _keep(cost, path)
    return cost


def _measured(
    spec: ProbeSpec,
    shape: ModelShape,
    estimate: CostModel,
    communicator: Communicator,
    device: torch.device,
) -> CostModel | None:
    """A fit made now; None, with a warning that says why, when it makes no sense."""
    began = time.perf_counter()
    try:
        fit = measure(spec, shape, estimate, communicator, device=device, effort=Effort())
        objection = fit.objection()
    except ValueError as error:
        objection = str(error)
    if objection is not None:
        logger.warning(
            "the cost model is an estimate, for its measurement makes no sense: %s", objection
        )
        return None
    seconds, error = time.perf_counter() - began, 100 * fit.hold_out_mean
    logger.info(
        "cost model measured in %.1f s; micro-batches held out are off by %.1f %% on average",
        seconds,
        error,
    )
    return fit.cost


def probe_spec(model: PreTrainedModel, accelerator: Accelerator) -> ProbeSpec:
    """What a copy of `model` is made from, under the arithmetic that accelerate is set up for."""
    # fully_shard turns the class of a model into one that cannot be made anew.
    kind = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ProbeSpec(
        kind=kind,
        config=model.config,
        dtype=model.dtype,
        autocast=AUTOCAST.get(accelerator.mixed_precision),
        checkpointing=is_checkpointed(model),
        frozen=2 * trained < sum(parameter.numel() for parameter in model.parameters()),
    )


def fit_key(
    spec: ProbeSpec, shape: ModelShape, topology: Topology, device: torch.device
) -> Mapping[str, object]:
    """All that a fit depends on, but for the sharding, as plain JSON values."""
    flags = {
        "checkpointing": spec.checkpointing,
        "attention_remat": spec.attention_remat,
        "frozen": spec.frozen,
        "threads": torch.get_num_threads(),
    }
    return flags | {
        "device": device_name(device),
        "topology": asdict(topology),
        "model": spec.kind.__name__,
        "shape": asdict(shape),
        "dtype": str(spec.dtype),
        "autocast": str(spec.autocast),
        "torch": torch.__version__,
        "constants": [field.name for field in fields(CostModel)],
    }


def with_memory_of(estimate: CostModel, cost: CostModel) -> CostModel:
    """`cost` with the bytes of `estimate`: how much memory there is may have changed since it was
    measured."""
    return replace(
        cost,
        token_bytes=estimate.token_bytes,
        state_bytes=estimate.state_bytes,
        sharded_state_bytes=estimate.sharded_state_bytes,
        budget_bytes=estimate.budget_bytes,
    )


def with_gathering(
    cost: CostModel, shape: ModelShape, topology: Topology, stage: int
) -> CostModel:
    """`cost` with what sharded parameters add to every micro-batch: gathered twice, and their
    gradients scattered. The copies that are timed are whole."""
    if stage < 3 or topology.world_size == 1:
        return cost
    moved = 3 * shape.params * shape.dtype_bytes
    return replace(
        cost,
        micro_batch_s=cost.micro_batch_s
        + moved / cost.bandwidth(topology.world_size, topology.nodes > 1),
    )


def _keep(cost: CostModel, path: Path) -> None:
    try:
        save_whole(cost, path)
    except OSError as error:
        logger.warning("the measured cost model is not kept for the next run: %s", error)
