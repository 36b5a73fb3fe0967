"""Measure the cost model of a model that need not exist: only its sizes matter.

    record = calibrate("meta-llama/Llama-3.1-8B", dtype="bfloat16", output="cost.json")

Alone, for one device, or under `torchrun`, for all of its ranks and their links.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.choose import with_gathering
from hf_flexseq.hf.calibration.estimate import device_spec, model_shape
from hf_flexseq.hf.calibration.measure import THOROUGH, Calibration, Effort, device_name, measure
from hf_flexseq.hf.calibration.probe import ProbeSpec

DTYPES = ("float32", "bfloat16", "float16", "float64")


def calibrate(
    model: str | Mapping[str, Any],
    *,
    dtype: str = "auto",
    output: str | Path | None = None,
    checkpointing: bool = True,
    zero_stage: int = 0,
    effort: Effort = THOROUGH,
) -> dict[str, Any]:
    """Measure, fit, and write the cost model to `output`. Collective over the ranks that torchrun
    started.

    model: hub id or folder of a model or a config.json, or the config's sizes with its
    `model_type`. dtype: of its parameters; auto: bfloat16 on a GPU, float32 on a CPU. zero_stage:
    how training will be sharded (FSDP: 3). Returns plain JSON values, the same on every rank: the
    cost model, its errors on micro-batches held out of the fit, and what was measured on. Raises
    ValueError for an unknown model, dtype or sharding, and when the timings, or their errors, make
    no sense; OSError when the config cannot be read or the result not written.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    communicator = Communicator()
    config, device = _config(model), accelerator.device
    spec = _spec(config, _dtype(dtype, device), checkpointing)
    with torch.device("meta"):
        shape = model_shape(spec.kind(config).to(spec.dtype))
    topology = communicator.topology
    machine = device_spec(device, topology.ranks_per_node)
    estimate = analytic_cost_model(
        shape, machine, topology, checkpointing=checkpointing, zero_stage=zero_stage
    )
    found = measure(spec, shape, estimate, communicator, device=device, effort=effort)
    found = replace(found, cost=with_gathering(found.cost, shape, topology, zero_stage))
    if found.objection() is not None:
        raise ValueError(
            f"the measurement makes no sense: {found.objection()}; measure on an idle machine"
        )
    if output is not None and communicator.rank == 0:
        found.cost.save(output)
    return _record(found, spec, communicator, device)


def _record(
    found: Calibration, spec: ProbeSpec, communicator: Communicator, device: torch.device
) -> dict[str, Any]:
    topology = communicator.topology
    return found.to_record() | {
        "device": device_name(device),
        "topology": [topology.nodes, topology.ranks_per_node],
        "model": spec.kind.__name__,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _config(model: str | Mapping[str, Any]) -> PreTrainedConfig:
    if isinstance(model, str):
        return AutoConfig.from_pretrained(model)
    if "model_type" not in model:
        raise ValueError("a model given by its sizes needs its model_type, such as llama")
    return AutoConfig.for_model(**model)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is none of auto, {', '.join(DTYPES)}")
    return getattr(torch, name)


def _spec(config: PreTrainedConfig, dtype: torch.dtype, checkpointing: bool) -> ProbeSpec:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type={config.model_type!r} is no causal language model of transformers"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return ProbeSpec(
        kind=kind,
        config=config,
        dtype=dtype,
        autocast=None,
        checkpointing=checkpointing,
        frozen=False,
    )
