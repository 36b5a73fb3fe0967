"""The ranks of each machine.

1. All ranks gather the number of ranks per node that their launcher has set (LOCAL_WORLD_SIZE, by
   torchrun and accelerate), and the name of their host.
2. If launchers set nothing (srun, mpirun), ranks with the same host name share a node.
3. Otherwise the launcher's number counts, and ranks of a node must have the same host name. Two
   nodes may have one name: they may be emulated on one machine.

All ranks see the same answers, so all of them refuse an impossible topology, or none.
"""

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence

import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.transport import Transport

VARIABLE = "LOCAL_WORLD_SIZE"
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before what torch reports of a rank
ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|LostRank)\b")
LAUNCHER_ERROR = "ChildFailedError"  # says that a rank has failed, and not why
LAST_LINES = 3  # of what ranks say, where no line is an error
CPU_RANKS = 2  # of a machine without GPUs, where no launcher says how many


def topology_of(transport: Transport) -> Topology:
    """Return the nodes of a job. Collective over the world.

    Raises ValueError, on all ranks alike, where nodes have different numbers of ranks, where ranks
    are not numbered node by node, and where launcher and hosts contradict each other.
    """
    own = (os.environ.get(VARIABLE), socket.gethostname())
    answers = transport.cpu_group.gather_values(own)
    sizes = [size for size, _ in answers]
    hosts = [host for _, host in answers]
    is_told = any(size is not None for size in sizes)
    ranks_per_node = _common_size(sizes, hosts) if is_told else hosts.count(hosts[0])
    topology = Topology.from_world(len(hosts), ranks_per_node)
    for node in topology.node_ranks():
        names = list(dict.fromkeys(hosts[rank] for rank in node))
        if is_told and len(names) > 1:
            raise ValueError(
                f"{VARIABLE}={ranks_per_node} says that ranks {node[0]} to {node[-1]} share a "
                f"node, but they are on {', '.join(names)}: set it to the ranks of a host"
            )
        if not is_told and (len(names) > 1 or hosts.count(names[0]) != ranks_per_node):
            raise ValueError(
                f"ranks {node[0]} to {node[-1]} should share a machine, but the hosts of all "
                f"ranks are {', '.join(hosts)}: start the same number of processes on every "
                "node, and number them node by node"
            )
    return topology


def _common_size(sizes: Sequence[str | None], hosts: Sequence[str]) -> int:
    """Return the number of ranks on a node that all launchers report.

    sizes, hosts: by rank. Raises ValueError if sizes differ or are not a number.
    """
    size = sizes[0]
    if any(other != size for other in sizes):
        ranks = ", ".join(f"{host}: {count}" for host, count in Counter(hosts).items())
        raise ValueError(
            f"{VARIABLE} differs from rank to rank ({', '.join(map(str, dict.fromkeys(sizes)))}), "
            f"with these ranks on the hosts: {ranks}; start the same number of processes on every "
            "node"
        )
    if size is None or not size.isdecimal():
        raise ValueError(f"{VARIABLE}={size!r}: expected a number of ranks")
    return int(size)


def ranks_of_machine() -> int:
    """Return how many ranks use this machine: one for each GPU, or two on a CPU."""
    return torch.cuda.device_count() or CPU_RANKS


def last_error(said: str) -> str:
    """Return the last error that the ranks of a launcher have written to stderr, as one line.

    said: everything on stderr. Returns the last lines where none is an error, and "" for no text.
    """
    lines = [RANK_PREFIX.sub("", line).strip() for line in said.splitlines()]
    for line in reversed(lines):
        if ERROR_LINE.match(line) and LAUNCHER_ERROR not in line:
            return line
    return " / ".join([line for line in lines if line][-LAST_LINES:])
