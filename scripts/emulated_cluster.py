"""Run a command on every rank of an emulated cluster: real bytes over slow links, on one machine.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit -- \\
        python train.py

A node is a Linux network namespace in which torchrun starts the ranks: they reach each other at
full speed over its loopback, and all other nodes over one link, shaped to --inter in both
directions. Every rank has one thread, and GLOO_SOCKET_IFNAME names the link.

    node 0                     switch                     node 1
    ranks -- nic ==shaped==== [ wire ] ====shaped== nic -- ranks

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
WIRE, NIC = "wire", "nic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A namespace in which ranks run."""

    index: int
    """Number of the node, from 0."""

    @property
    def namespace(self) -> str:
        """Name of the namespace."""
        return f"flexseq-{os.getpid()}-{self.index}"

    @property
    def address(self) -> str:
        """Address of the NIC."""
        return f"10.78.0.{self.index + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The emulated cluster."""

    nodes: int
    ranks_per_node: int
    inter: str
    """Rate of a link between nodes, as tc writes it: 133mbit."""

    @property
    def hosts(self) -> tuple[Node, ...]:
        """All nodes, in the order of their ranks."""
        return tuple(Node(index=index) for index in range(self.nodes))

    @property
    def switch(self) -> str:
        """Name of the bridge's namespace."""
        return f"flexseq-{os.getpid()}-switch"


# ---- the network


@contextmanager
def network(cluster: Cluster) -> Iterator[None]:
    """Make the namespaces and links of `cluster` for as long as the block runs.

    Raises RuntimeError when one of them cannot be made.
    """
    with ExitStack() as stack:
        for namespace in (cluster.switch, *(node.namespace for node in cluster.hosts)):
            run("ip", "netns", "add", namespace)
            stack.callback(remove, namespace)
        run("ip", "-n", cluster.switch, "link", "add", WIRE, "type", "bridge")
        run("ip", "-n", cluster.switch, "link", "set", WIRE, "up")
        for node in cluster.hosts:
            connect(cluster, node)
        stack.callback(ignore_signals)
        yield


def connect(cluster: Cluster, node: Node) -> None:
    """Make the link of a node to the switch, with its address and its rate."""
    ip = ("ip", "-n", node.namespace)
    port = f"{NIC}{node.index}"
    run(*ip, "link", "set", "lo", "up")
    this_end = (NIC, "netns", node.namespace)
    other_end = (port, "netns", cluster.switch)
    run("ip", "link", "add", "name", *this_end, "type", "veth", "peer", "name", *other_end)
    run("ip", "-n", cluster.switch, "link", "set", port, "master", WIRE, "up")
    run(*ip, "link", "set", NIC, "up")
    run(*ip, "address", "add", f"{node.address}/24", "dev", NIC)
    for namespace, device in ((node.namespace, NIC), (cluster.switch, port)):
        shape = ("tbf", "rate", cluster.inter, "burst", "256kb", "latency", "100ms")
        run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": NIC}
    running = []
    for node in cluster.hosts:
        words = ("ip", "netns", "exec", node.namespace, *torchrun(cluster, node), *command)
        running.append(subprocess.Popen(words, env=environment))
    while running:
        time.sleep(0.05)
        ended = [process for process in running if process.poll() is not None]
        failed = [process.returncode for process in ended if process.returncode]
        if failed:
            # ended by a signal: as a shell says it
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        running = [process for process in running if process not in ended]
    return 0


def torchrun(cluster: Cluster, node: Node) -> list[str]:
    """Return the words that start a command on the ranks of a node."""
    options = {
        "nnodes": cluster.nodes,
        "node-rank": node.index,
        "nproc-per-node": cluster.ranks_per_node,
        "master-addr": cluster.hosts[0].address,
        "master-port": PORT,
        "local-addr": node.address,
    }
    words = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    return [*words, *(f"--{name}={value}" for name, value in options.items())]


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
    cluster = Cluster(nodes=args.nodes, ranks_per_node=args.ranks_per_node, inter=args.inter)
    try:
        with network(cluster):
            return launch(cluster, args.command)
    except RuntimeError as error:
        print(f"no cluster can be emulated here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
