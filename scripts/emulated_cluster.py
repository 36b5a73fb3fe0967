"""Run a command on every rank of an emulated cluster: real bytes over slow links, on one machine.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit -- \\
        python train.py
    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 4 --inter 133mbit \\
        --nic-per-rank -- python train.py

A node is a Linux network namespace in which torchrun starts the ranks: they reach each other at
full speed, and all other nodes over one link, shaped to --inter in both directions. With
--nic-per-rank every rank is a namespace with a shaped link of its own, and an unshaped one to the
ranks of its node; the launcher's variables (RANK, LOCAL_RANK, ...) are then set here. Every rank
has one thread, and GLOO_SOCKET_IFNAME names its link.

    node 0                     switch                     node 1
    ranks -- nic ==shaped==== [ wire ] ====shaped== nic -- ranks

The ranks of a node talk over its loopback. With --nic-per-rank there is a bridge for the links
between nodes, and one for the ranks of each node:

    rank 0   nic ==shaped==== [ wire ] ====shaped== nic   rank 2
    rank 0   mate ---------- [ mates0 ] ---------- mate   rank 1

Needs Linux, root and iproute2. All links lie inside namespaces, those of this machine are never
touched, and what was made is removed in the end, also after a failure or Ctrl-C. Exits as the
first rank that fails, with 2 where it cannot run at all.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

PORT = 29500  # in namespaces of their own: it cannot be taken
WIRE, NIC, MATE = "wire", "nic", "mate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A namespace with ranks in it: a node, or with a NIC for each rank a single rank."""

    index: int
    """Number among all hosts, from 0."""
    node: int
    """Number of its node, from 0."""
    namespace: str

    @property
    def address(self) -> str:
        """The address of its NIC."""
        return f"10.78.0.{self.index + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The cluster that is emulated."""

    nodes: int
    ranks_per_node: int
    inter: str
    """Rate of a link between nodes, as tc writes it: 133mbit."""
    nic_per_rank: bool
    """Whether each rank has a link of its own, and not each node."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts in the order of their ranks."""
        per_node = self.ranks_per_node if self.nic_per_rank else 1
        hosts = []
        for index in range(self.nodes * per_node):
            namespace = f"flexseq-{os.getpid()}-{index}"
            hosts.append(Host(index=index, node=index // per_node, namespace=namespace))
        return tuple(hosts)

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return f"flexseq-{os.getpid()}-switch"


# ---- the network


@contextmanager
def network(cluster: Cluster) -> Iterator[None]:
    """Make the namespaces and links of `cluster` for as long as the block runs.

    Raises RuntimeError when one of them cannot be made.
    """
    with ExitStack() as stack:
        for namespace in (cluster.switch, *(host.namespace for host in cluster.hosts)):
            run("ip", "netns", "add", namespace)
            stack.callback(remove, namespace)
        for bridge in (WIRE, *(f"mates{node}" for node in range(cluster.nodes))):
            run("ip", "-n", cluster.switch, "link", "add", bridge, "type", "bridge")
            run("ip", "-n", cluster.switch, "link", "set", bridge, "up")
        for host in cluster.hosts:
            connect(cluster, host)
        stack.callback(ignore_signals)
        yield


def connect(cluster: Cluster, host: Host) -> None:
    """Make the links of one host, its address, and the routes to the other ranks of its node."""
    ip = ("ip", "-n", host.namespace)
    run(*ip, "link", "set", "lo", "up")
    port = plug(cluster, host, NIC, WIRE)
    run(*ip, "address", "add", f"{host.address}/24", "dev", NIC)
    for namespace, device in ((host.namespace, NIC), (cluster.switch, port)):
        shape = ("tbf", "rate", cluster.inter, "burst", "256kb", "latency", "100ms")
        run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)
    mates = [mate for mate in cluster.hosts if mate.node == host.node and mate != host]
    if mates:
        plug(cluster, host, MATE, f"mates{host.node}")
    for mate in mates:
        run(*ip, "route", "add", f"{mate.address}/32", "dev", MATE, "src", host.address)


def plug(cluster: Cluster, host: Host, device: str, bridge: str) -> str:
    """Plug a cable from `device` of the host into a bridge; return the name of its end there."""
    port = f"{device}{host.index}"
    this_end = (device, "netns", host.namespace)
    other_end = (port, "netns", cluster.switch)
    run("ip", "link", "add", "name", *this_end, "type", "veth", "peer", "name", *other_end)
    run("ip", "-n", cluster.switch, "link", "set", port, "master", bridge, "up")
    run("ip", "-n", host.namespace, "link", "set", device, "up")
    return port


def remove(namespace: str) -> None:
    """End what still runs in the namespace and remove it; its links go with it."""
    # again: what is ended may just have started others
    while pids := run("ip", "netns", "pids", namespace).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    run("ip", "netns", "delete", namespace)


def run(*command: str) -> str:
    """Run a command and return what it printed. Raises RuntimeError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# ---- the ranks


def launch(cluster: Cluster, command: Sequence[str]) -> int:
    """Run the command on all ranks; return the exit status of the first that fails, or 0."""
    running = []
    for host in cluster.hosts:
        words, environment = on_host(cluster, host, command)
        inside = ("ip", "netns", "exec", host.namespace, *words)
        running.append(subprocess.Popen(inside, env=os.environ | environment))
    while running:
        time.sleep(0.05)
        ended = [process for process in running if process.poll() is not None]
        failed = [process.returncode for process in ended if process.returncode]
        if failed:
            # ended by a signal: as a shell says it
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        running = [process for process in running if process not in ended]
    return 0


def on_host(
    cluster: Cluster, host: Host, command: Sequence[str]
) -> tuple[Sequence[str], dict[str, str]]:
    """Return what to start in a host's namespace, and the variables it needs."""
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": NIC}
    master = cluster.hosts[0].address
    if not cluster.nic_per_rank:
        options = {
            "nnodes": cluster.nodes,
            "node-rank": host.node,
            "nproc-per-node": cluster.ranks_per_node,
            "master-addr": master,
            "master-port": PORT,
            "local-addr": host.address,
        }
        words = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
        words += [f"--{name}={value}" for name, value in options.items()]
        return [*words, *command], variables
    coordinates = {
        "RANK": host.index,
        "LOCAL_RANK": host.index % cluster.ranks_per_node,
        "LOCAL_WORLD_SIZE": cluster.ranks_per_node,
        "WORLD_SIZE": cluster.nodes * cluster.ranks_per_node,
        "MASTER_ADDR": master,
        "MASTER_PORT": PORT,
    }
    return command, variables | {name: str(value) for name, value in coordinates.items()}


# ---- the command line


def why_not() -> str | None:
    """Return why no cluster can be emulated here; None when one can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"it needs {' and '.join(missing)} of iproute2 (apt-get install iproute2)"
    return None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument("--ranks-per-node", type=positive, default=2)
    parser.add_argument(
        "--inter", type=rate, default="133mbit", help="rate of a link, as tc writes it: 133mbit"
    )
    parser.add_argument(
        "--nic-per-rank", action="store_true", help="a link of its own for every rank"
    )
    parser.add_argument("command", nargs="+", help="after --: what every rank runs")
    args = parser.parse_args()
    if args.nodes * args.ranks_per_node > 250:
        parser.error("at most 250 ranks")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def rate(text: str) -> str:
    if re.fullmatch(r"\d+[kmg]?bit", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 133mbit or 10gbit")
    return text


def interrupted(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def ignore_signals() -> None:
    """Ignore Ctrl-C from here on: all is taken down, and a second one would leave half behind."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def main() -> int:
    args = parsed()
    reason = why_not()
    if reason is not None:
        print(f"no cluster can be emulated here: {reason}", file=sys.stderr)
        return 2
    # a shell's background jobs ignore the first
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupted)
    cluster = Cluster(
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        inter=args.inter,
        nic_per_rank=args.nic_per_rank,
    )
    try:
        with network(cluster):
            return launch(cluster, args.command)
    except RuntimeError as error:
        print(f"no cluster can be emulated here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
