"""A stand-in for torch.distributed: it writes down what it is asked for.

For NCCL it has the rules of torch 2.11 to 2.13 that matter here: a group that only its members
make is named by its ranks and by the number of groups that the process has had before, and members
must agree on the name. For gloo it has ranks that are gone: a message to or from one of them fails
when it is posted, and so does a batch with such a message.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hf_flexseq.distributed import connect
from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup


class StubJob:
    """The job's own group: a backend for each device type, with its timeout."""

    def __init__(self, **backends):
        self._backends = backends
        self._device_types = [torch.device(device) for device in backends]
        self.bound_device_id = None

    def _get_backend(self, device):
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        options = SimpleNamespace(_timeout=timedelta(seconds=1800))
        return SimpleNamespace(name=lambda: self._backends[device.type], options=options)


def nccl_options(is_high_priority_stream=False):
    """Stands for `ProcessGroupNCCL.Options`, which a CPU build of torch lacks."""
    config = SimpleNamespace(cga_cluster_size=None)
    return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config)


@dataclass
class StubGroup:
    """What `new_group` was called with, and what ran on the group, in order."""

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    options: SimpleNamespace | None  # of the backend
    local: bool  # made by its members alone
    name: str
    ran: list = field(default_factory=list)


class StubDistributed:
    """torch.distributed of one rank."""

    def __init__(self, monkeypatch, *, rank, world_size, job, gone=()):
        self.rank, self.world_size, self.groups, self.gone = rank, world_size, [], gone
        replaced = {
            "is_initialized": lambda: True,
            "get_rank": lambda: rank,
            "get_world_size": lambda: world_size,
            "new_group": self.new_group,
            "get_process_group_ranks": lambda group: list(group.ranks),
            "all_reduce": lambda tensor, group: group.ran.append("all_reduce"),
            "all_to_all_single": self.all_to_all_single,
            "ProcessGroupNCCL": SimpleNamespace(Options=nccl_options),
            "P2POp": lambda op, tensor, peer, group, tag: (op, peer, group),
            "batch_isend_irecv": self.batch,
            "isend": self.isend,
            "irecv": self.irecv,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(dist, name, value, raising=name != "ProcessGroupNCCL")
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: job)
        # All ranks have made equally many groups, and connect without an error.
        monkeypatch.setattr(connect, "_gather_in_store", lambda value: [value] * world_size)
        monkeypatch.setattr(
            GlooCpuGroup, "gather_values", lambda cpu_group, value: [value] * world_size
        )

    def new_group(
        self, ranks=None, *, backend, timeout, pg_options=None, use_local_synchronization=False
    ):
        ranks = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        number = len(self.groups)
        name = f"{ranks} after {number}" if use_local_synchronization else str(number)
        group = StubGroup(ranks, backend, timeout, pg_options, use_local_synchronization, name)
        self.groups.append(group)
        return group

    def all_to_all_single(self, received, sent, group):
        assert received.shape == sent.shape == (len(group.ranks),)
        group.ran.append("all_to_all")

    def batch(self, ops):
        """What torch returns for these messages, posted at once."""
        if any(peer in self.gone for _, peer, _ in ops):
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        names = {dist.isend: "send", dist.irecv: "recv"}
        ops[0][2].ran.append([(names[op], peer) for op, peer, _ in ops])
        return [SimpleNamespace(wait=lambda: None)]

    def isend(self, tensor, peer, group, tag):
        return self.batch([(dist.isend, peer, group)])[0]

    def irecv(self, tensor, peer, group, tag):
        return self.batch([(dist.irecv, peer, group)])[0]

    def by_backend(self, backend):
        return [group for group in self.groups if group.backend == backend]
