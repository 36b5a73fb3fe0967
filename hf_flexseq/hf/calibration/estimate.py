"""The cost model of a run that names none: estimated from the model's configuration, the device
and the sharding."""

import logging
import os
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, DeviceSpec, ModelShape, analytic_cost_model
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.topology import Topology

logger = logging.getLogger(__name__)


def estimated_cost_model(
    model: nn.Module, accelerator: Accelerator, topology: Topology
) -> CostModel:
    """An estimate of what steps of `model` cost on this device, sharded as accelerate is set up to
    do."""
    device = device_spec(accelerator.device, topology.ranks_per_node)
    stage = zero_stage(model, accelerator)
    cost = analytic_cost_model(
        model_shape(model),
        device,
        topology,
        checkpointing=is_checkpointed(model),
        chunked_loss=has_chunkable_loss(model),
        zero_stage=stage,
    )
    logger.info(
        "cost model estimated for %s with parameters sharded as in ZeRO stage %d",
        device.name,
        stage,
    )
    return cost


def is_checkpointed(model: nn.Module) -> bool:
    """Whether activation checkpointing is on. Layers carry the flag in every version of
    transformers; the model's own property changes its name."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def model_shape(model: nn.Module) -> ModelShape:
    """The sizes of a decoder-only HF model, read from its configuration."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab=config.vocab_size,
        params=sum(_numel(parameter) for parameter in model.parameters()),
        dtype_bytes=next(model.parameters()).element_size(),
    )


def _numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter; ZeRO-3 leaves an empty one in its place and keeps the size
    beside it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def device_spec(device: torch.device, ranks_per_node: int) -> DeviceSpec:
    """What is known of the device; its own memory, and for an unknown GPU the arithmetic of an
    A100."""
    if device.type != "cuda":
        cpu = DEVICES["CPU"]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_node
        return _with_memory(cpu, cpu.name, memory)
    properties = torch.cuda.get_device_properties(device)
    known = next(
        (spec for name, spec in DEVICES.items() if name in properties.name.replace(" ", "-")), None
    )
    if known is None:
        logger.warning(
            "no figures for %s; its speed is taken to be an A100's (calibrate a cost model)",
            properties.name,
        )
    return _with_memory(known or DEVICES["A100-80GB"], properties.name, properties.total_memory)


def _with_memory(spec: DeviceSpec, name: str, memory_bytes: float) -> DeviceSpec:
    return replace(spec, name=name, memory_bytes=memory_bytes)


def zero_stage(model: nn.Module, accelerator: Accelerator) -> int:
    """How much of the model's state is sharded, in DeepSpeed's numbering; FSDP is 3 (2 without
    resharding)."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return int(accelerator.state.deepspeed_plugin.zero_stage)
    return 3 if is_fully_sharded(model, accelerator) else 0


def is_fully_sharded(model: nn.Module, accelerator: Accelerator) -> bool:
    """Whether FSDP shards, or will shard, the model: by accelerate, by transformers at load, or by
    the user."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return True
    return any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
