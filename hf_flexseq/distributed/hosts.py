"""Which ranks share a machine.

1. All ranks say what their launcher has told them (LOCAL_WORLD_SIZE, which torchrun and accelerate
   set), and the name of their host.
2. Where launchers say nothing (srun, mpirun), ranks with the same host name share a node.
3. Otherwise what they say counts, and ranks of a node must have the same host name. Two nodes may
   have one name: they may be emulated on one machine.

All ranks see the same answers, so all of them refuse a topology that cannot be, or none.
"""

import os
import socket
from collections import Counter
from collections.abc import Sequence

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.transport import Transport

VARIABLE = "LOCAL_WORLD_SIZE"


def topology_of(transport: Transport) -> Topology:
    """Return the nodes of a job. Collective over the world.

    Raises ValueError, on all ranks alike, where nodes have different numbers of ranks, where ranks
    are not numbered node by node, and where launcher and hosts contradict each other.
    """
    own = (os.environ.get(VARIABLE), socket.gethostname())
    answers = transport.cpu_group.gather_values(own)
    sizes = [size for size, _ in answers]
    hosts = [host for _, host in answers]
    if all(size is None for size in sizes):
        return Topology.from_hosts(hosts)
    topology = Topology.from_world(len(hosts), _common_size(sizes, hosts))
    for node in topology.node_ranks():
        names = dict.fromkeys(hosts[rank] for rank in node)
        if len(names) > 1:
            raise ValueError(
                f"{VARIABLE}={topology.ranks_per_node} says that ranks {node[0]} to {node[-1]} "
                f"share a node, but they are on {', '.join(names)}: set it to the ranks of a host"
            )
    return topology


def _common_size(sizes: Sequence[str | None], hosts: Sequence[str]) -> int:
    """Return the number of ranks on a node that all launchers report.

    sizes, hosts: by rank. Raises ValueError where they differ, or where it is no number.
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
        raise ValueError(f"{VARIABLE}={size!r} is no number of ranks")
    return int(size)
