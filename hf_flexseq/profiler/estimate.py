"""Estimate a cost model from a model's sizes, the device and the sharding.

This is the cost model that `cost_model="estimate"` asks for, and the one that a measurement
(`cost_model="auto"`) starts from: bytes and memory are never measured.
"""

import logging
import os
from dataclasses import replace

import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, DeviceSpec, ModelShape, analytic_cost_model
from hf_flexseq.topology import Topology

logger = logging.getLogger(__name__)


def estimated_cost_model(
    shape: ModelShape,
    device: torch.device,
    topology: Topology,
    *,
    checkpointing: bool,
    zero_stage: int,
    replicas: int,
    chunked_loss: bool,
) -> CostModel:
    """Estimate what steps of a model cost on ranks with devices like `device`.

    checkpointing: whether layers are computed again in the backward.
    zero_stage: how training is sharded, in ZeRO's numbers; FSDP is 3.
    replicas: of what is sharded; more than 1 in HSDP.
    chunked_loss: whether the loss does without the logits of all tokens.
    """
    spec = device_spec(device, topology.ranks_per_node)
    cost = analytic_cost_model(
        shape,
        spec,
        topology,
        checkpointing=checkpointing,
        chunked_loss=chunked_loss,
        zero_stage=zero_stage,
        replicas=replicas,
    )
    logger.debug(
        "cost model estimated for %s with parameters sharded as in ZeRO stage %d",
        spec.name,
        zero_stage,
    )
    return cost


def device_spec(device: torch.device, ranks_per_node: int) -> DeviceSpec:
    """Return the figures of the device that a rank computes on, with the memory it really has.

    An unknown GPU gets the arithmetic of an A100, with a warning.
    """
    memory_bytes = device_memory_bytes(device, ranks_per_node)
    if device.type != "cuda":
        return replace(DEVICES["CPU"], memory_bytes=memory_bytes)

    name = torch.cuda.get_device_properties(device).name
    spec = _known_gpu(name)
    if spec is None:
        logger.warning(
            "no figures for %s; its speed is taken to be an A100's (calibrate a cost model)", name
        )
        spec = DEVICES["A100-80GB"]
    return replace(spec, name=name, memory_bytes=memory_bytes)


def device_memory_bytes(device: torch.device, ranks_per_node: int) -> float:
    """Return the memory that the device of a rank really has. Ranks of a node share the memory of
    a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_bytes / ranks_per_node


def _known_gpu(device_name: str) -> DeviceSpec | None:
    """Find the figures of a GPU by the name that CUDA gives it, such as NVIDIA A100-SXM4-80GB."""
    for name, spec in DEVICES.items():
        if name in device_name.replace(" ", "-"):
            return spec
    return None
