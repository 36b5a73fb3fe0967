"""Measure the cost model of a model from its configuration; weights are not needed.

    record = calibrate("meta-llama/Llama-3.1-8B", dtype="bfloat16", output="cost.json")

This is the command `flexseq calibrate`. It runs in one process for one device, or under `torchrun`
for all of its ranks and their links.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.choose import (
    CostSubject,
    RunWide,
    measured,
    with_counted_bytes,
)
from hf_flexseq.hf.calibration.expert_copies import ExpertMeshes, expert_modules
from hf_flexseq.hf.calibration.layer_trial import CountedBytes, count_bytes
from hf_flexseq.hf.model.facts import ModelFacts, model_shape
from hf_flexseq.hf.model.towers import trained_parts
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.profiler.design import THOROUGH, Effort
from hf_flexseq.profiler.estimate import device_spec
from hf_flexseq.profiler.measure import device_name

DTYPES = ("float32", "bfloat16", "float16", "float64")


def calibrate(
    model: str | Mapping[str, Any],
    *,
    dtype: str = "auto",
    output: str | Path | None = None,
    checkpointing: bool = True,
    zero_stage: int = 0,
    expert_ranks: int = 1,
    effort: Effort = THOROUGH,
) -> dict[str, Any]:
    """Measure, fit, and write the cost model to `output`. Collective over the world.

    model: hub id or folder of a model or a config.json, or the config's values with its
    `model_type`. dtype: dtype of the parameters; auto: bfloat16 on a GPU, float32 on a CPU.
    zero_stage: sharding of the training (FSDP: 3). expert_ranks: neighbouring ranks that hold all
    experts together; how unevenly routers spread tokens over them is not measured. Returns plain
    JSON values, the same on every rank: the cost model, its errors on held-out micro-batches, and
    the setup of the measurement.
    Raises ValueError for an unknown model, dtype or sharding, for experts that cannot lie so, and
    for implausible timings; OSError if the config cannot be read or the result cannot be written.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    communicator = Communicator()
    topology = communicator.topology
    device = accelerator.device
    empty = _empty(_config(model), _dtype(dtype, device))
    facts = _facts(empty, checkpointing, zero_stage, expert_ranks)
    host_bytes = device_spec(device, topology.ranks_per_node).host_bytes
    as_set = MemoryChoice(recomputed_layers=facts.shape.layers if checkpointing else 0)
    subject = CostSubject(
        facts=facts,
        has_chunked_loss=True,
        topology=topology,
        device=device,
        model=empty,
        run_wide=RunWide(as_set, host_bytes),
    )
    if expert_ranks > 1:
        subject = _with_meshes(subject)
    calibration = measured(subject, communicator, effort)
    counted = with_counted_bytes(calibration.cost, subject)
    calibration = replace(calibration, cost=counted)
    if output is not None and communicator.rank == 0:
        calibration.cost.save(output)
    return {
        **calibration.to_record(),
        "device": device_name(device),
        "topology": [topology.nodes, topology.ranks_per_node],
        "model": facts.kind.__name__,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _config(model: str | Mapping[str, Any]) -> PreTrainedConfig:
    if isinstance(model, str):
        # None would prompt on the terminal before running a model's own code
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    if "model_type" not in model:
        raise ValueError("a model given as a config needs a model_type, such as llama")
    return AutoConfig.for_model(**model)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {name!r}")
    return getattr(torch, name)


def read_model(model: str, dtype: str) -> tuple[ModelShape, CountedBytes | None]:
    """Return the sizes of the model that a hub id or a folder names, or a config.json, and the
    bytes that its layers are counted to hold of a token in `dtype`; None where that cannot be
    tried. Raises as `calibrate` does."""
    numbers = _dtype(dtype, torch.device("cpu"))
    made = _empty(_config(model), numbers)
    return model_shape(made), count_bytes(made, dtype=numbers)


def _empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the causal language model that `config` describes, with a vision tower or without, on
    the meta device."""
    with torch.device("meta"):
        return _kind(config)(config).to(dtype)


def _facts(
    model: PreTrainedModel, checkpointing: bool, zero_stage: int, expert_ranks: int
) -> ModelFacts:
    """Collect the facts about a model without memory."""
    return ModelFacts(
        kind=type(model),
        config=model.config,
        shape=model_shape(model),
        dtype=model.dtype,
        autocast=None,
        checkpointing=checkpointing,
        frozen=False,
        zero_stage=zero_stage,
        expert_ranks=expert_ranks,
        trained_tower=trained_parts(model),
    )


def _with_meshes(subject: CostSubject) -> CostSubject:
    """Return `subject` with process groups for its experts, as transformers would make them.
    Collective over the world. Raises ValueError for experts that cannot lie on several ranks."""
    facts = subject.facts
    assert subject.model is not None, "the command makes an empty one"
    if facts.shape.experts is not None and not expert_modules(subject.model):
        raise ValueError(
            f"expert_ranks={facts.expert_ranks}: transformers has no plan for experts of "
            f"{facts.kind.__name__} on several ranks; use expert_ranks=1"
        )
    _ = subject.estimate  # raises for ranks that experts cannot lie on
    meshes = ExpertMeshes.made(subject.topology.world_size, facts.expert_ranks)
    return replace(subject, meshes=meshes)


def _kind(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of AutoModelForCausalLM, or else one with a vision tower."""
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping and not config.is_encoder_decoder:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in mapping:
        raise ValueError(
            f"model_type={config.model_type!r} is not a causal language model of transformers"
        )
    kind: type[PreTrainedModel] = mapping[type(config)]
    return kind
