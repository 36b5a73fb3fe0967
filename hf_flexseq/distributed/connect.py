"""Finds the backend of a job, and makes its transport once per process.

Backends are asked for by device, never by the name of the job's group: that may be "undefined", or
"cuda:nccl,cpu:gloo" where a job has one for each device.

A process may have any number of trainers, one after the other. They share one transport, and with
it all groups and lanes, as long as the job's own process group lives.

If one machine alone allows too few descriptors, all ranks refuse. hf_flexseq has no groups yet
then, so ranks exchange the refusal in the store of the job's rendezvous.
"""

import json
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.gloo import GlooTransport
from hf_flexseq.distributed.lone_rank import LoneTransport
from hf_flexseq.distributed.nccl import NcclTransport
from hf_flexseq.distributed.process_groups import reserve_descriptors
from hf_flexseq.distributed.transport import Capabilities, Transport

# The transports of this process, by device and timeout, and the job's group they belong to.
_transports: dict[tuple[torch.device, timedelta], Transport] = {}
_job: dist.ProcessGroup | None = None

# Numbers the exchanges in the store. It goes on with the next job, whose store may be the same.
_exchanges = count()


def connect(device: torch.device | None = None, *, timeout: timedelta | None = None) -> Transport:
    """Return this process's transport for tensors on `device`. Collective over the world when it
    is made, which is the first time.

    device: None takes the current CUDA device if the job has a backend for it, else the CPU.
    timeout: of every exchange; None takes the job's own.
    Raises ValueError for a timeout that is not positive, for a device whose backend cannot carry
    the exchanges of plans, and, on all ranks, where one of them may not open enough descriptors.
    """
    global _job
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(
            f"a timeout of {timeout.total_seconds():g} s leaves no time for any exchange: give a "
            "ddp_timeout of more than 0 seconds"
        )
    if _is_alone():
        _transports.clear()
        _job = None
        return LoneTransport()
    job = dist.distributed_c10d._get_default_group()
    if job is not _job:
        _transports.clear()
        _job = job
    device = device or _device_of(job)
    backend = backend_of(job, device)
    timeout = timeout or backend.options._timeout
    key = (device, timeout)
    if key not in _transports:
        kind = _transport_kind(backend, device)
        with ErrorCapture() as reserving:
            reserve_descriptors(kind.meshes * dist.get_world_size())
        reserving.raise_on_all_ranks(_gather_in_store, "connecting to the others")
        _transports[key] = kind(timeout, device)
    return _transports[key]


def _gather_in_store(value: Any) -> list[Any]:
    """Return the value of every rank, by rank: plain JSON values. Collective over the world.

    Rank 0 collects them: the work grows with the number of ranks, not with its square.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"hf_flexseq/{next(_exchanges)}"
    rank = dist.get_rank()
    store.set(f"{name}/{rank}", json.dumps(value))
    if rank == 0:
        ranks = range(dist.get_world_size())
        values = [json.loads(store.get(f"{name}/{other}")) for other in ranks]
        store.set(f"{name}/all", json.dumps(values))
    gathered: list[Any] = json.loads(store.get(f"{name}/all"))
    return gathered


def capabilities_on(device: torch.device) -> Capabilities:
    """Return the promises of `connect(device)`. Makes nothing, and raises the same errors."""
    if _is_alone():
        return LoneTransport.capabilities
    job = dist.distributed_c10d._get_default_group()
    return _transport_kind(backend_of(job, device), device).capabilities


def _is_alone() -> bool:
    """Return whether this process is the only rank of its job."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def backend_of(group: dist.ProcessGroup, device: torch.device) -> "dist.Backend":
    """Return the backend that `group` has for tensors on `device`.

    Raises ValueError, naming what to change, where it has none.
    """
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(
            f"the job's process group has no backend for tensors on {device.type}: start it with "
            'init_process_group("cuda:nccl,cpu:gloo"), or with the one of your device'
        ) from error


def _device_of(job: dist.ProcessGroup) -> torch.device:
    """Return the current CUDA device if the job has a backend for it, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if device in job._device_types or torch.device("cuda") in job._device_types:
            return device
    return torch.device("cpu")


def _transport_kind(
    backend: "dist.Backend", device: torch.device
) -> type[GlooTransport] | type[NcclTransport]:
    """Return the transport over a backend of the job for tensors on `device`."""
    match backend.name(), device.type:
        case "gloo", "cpu":
            return GlooTransport
        case "nccl", "cuda":
            return NcclTransport
    # gloo takes CUDA tensors, too, but not those of messages.
    raise ValueError(
        f"the backend {backend.name()!r} cannot carry the messages of plans on {device.type}: "
        'start the job with init_process_group("cuda:nccl,cpu:gloo"), or on the CPU with "gloo"'
    )
