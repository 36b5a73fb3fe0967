"""Transfers between nodes over all of their NICs, against straight ones, on real links.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit --nic-per-rank
    -- \ python scripts/bench_routing.py

First the links are measured, as a cost model is. Then, each way in turn within a round, and as the
median over the rounds of the ratio of their seconds (on the slowest rank):

    hop        one transfer between nodes, all other NICs idle: routed / straight
    busy       every rank sends to the other node at once: what is decided, and why
    remap      rank 0 gives its surplus to the ranks of the other node: with routing / without
    gather     keys and values of an all-gather: once per node and on from there / straight from
               the owners
    zigzag, balanced S
               forward and backward of a ring, a step of which attends S times as long as a rank's
               keys and values
               would travel: with routing / without. Attention only waits, as if a device computed
               it

Without --nic-per-rank the ranks of a node share one NIC, and nothing must be routed.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist

from hf_flexseq.attention import SequenceContext, allgather, sequence_parallel_attention
from hf_flexseq.attention.allgather import AllGatherZone
from hf_flexseq.attention.remap import TokenRemap
from hf_flexseq.distributed.communicator import Channel, Communicator, Exchange, unnamed
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.remap import Move
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.profiler.measure import measured_nics, median_seconds
from hf_flexseq.schedule.gather import gather_hops
from hf_flexseq.schedule.routing import NicFigures, Routing, Transfer, make_routing

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 8, 8, 64
MEASURED = ("hop", "busy", "remap", "gather", "zigzag", "balanced")
PROBE_BYTES, PROBE_ROUNDS = 4_000_000, 3


def measured_links(world: Communicator) -> NicFigures:
    """By one hop beside others, and by transfers between the ranks of a node."""
    nics, transfer_s = measured_nics(
        world, bytes_moved=PROBE_BYTES, device=CPU, rounds=PROBE_ROUNDS
    )
    per_node = world.topology.ranks_per_node

    def hop(target: int) -> Callable[[], None]:
        return lambda: move(world, (Transfer(0, target, PROBE_BYTES),), Routing())

    inside, across = (
        max(x) / PROBE_BYTES
        for x in median_seconds([hop(1), hop(per_node)], world, CPU, PROBE_ROUNDS)
    )
    found = NicFigures(
        ranks_per_node=per_node,
        nics_per_node=nics,
        inside_s=inside,
        across_s=across,
        transfer_s=transfer_s,
    )
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def move(world: Communicator, transfers: tuple[Transfer, ...], routing: Routing) -> None:
    """All of `transfers`, as `routing` says."""
    exchange = RoutedExchange(unnamed, routing, world, CPU) if routing.paths else Exchange(unnamed)
    for source, target, nbytes in transfers:
        if source == world.rank:
            exchange.send([torch.zeros(nbytes, dtype=torch.uint8)], target)
        if target == world.rank:
            exchange.recv([torch.empty(0, dtype=torch.uint8)], nbytes, source)
    exchange.post(world, tag=0)
    exchange.wait()


def seconds(run: Callable[[], object]) -> float:
    """On the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    found = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def compared(run: Callable[[], object], straight: Callable[[], object], rounds: int) -> str:
    """Medians of both, and the ratio."""
    ways, times = {"run": run, "straight": straight}, {"run": [], "straight": []}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(seconds(way))
    times = {name: found[1:] for name, found in times.items()}  # the first round connects
    ratios = sorted(a / b for a, b in zip(times["run"], times["straight"], strict=True))
    medians = [statistics.median(times[name]) for name in ways]
    return (
        f"{medians[0]:6.3f} s against {medians[1]:6.3f} s straight: "
        f"{statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def hop(world: Communicator, links: NicFigures, asked: argparse.Namespace) -> str:
    transfers = (Transfer(0, links.ranks_per_node, asked.bytes),)
    routing = make_routing(transfers, links)
    if not routing.paths:
        return f"off: {routing.why_not}"
    predicted = f"predicted {routing.routed_s / routing.direct_s:.2f}, {routing.packets} packets"
    found = compared(
        lambda: move(world, transfers, routing),
        lambda: move(world, transfers, Routing()),
        asked.rounds,
    )
    return f"{found}; {predicted}"


def busy(world: Communicator, links: NicFigures, asked: argparse.Namespace) -> str:
    size, width = world.world_size, links.ranks_per_node
    transfers = tuple(Transfer(rank, (rank + width) % size, asked.bytes) for rank in range(size))
    routing = make_routing(transfers, links)
    took = statistics.median(seconds(lambda: move(world, transfers, routing)) for _ in range(3))
    return f"{took:6.3f} s; {'on' if routing.paths else f'off: {routing.why_not}'}"


def remap(world: Communicator, links: NicFigures, asked: argparse.Namespace) -> str:
    """From the groups to the even layout."""
    width = links.ranks_per_node
    rows = asked.bytes // (4 * HEAD_DIM) // width
    moves = tuple(Move(source=0, target=width + place, tokens=rows) for place in range(width))
    ways = [
        TokenRemap(Shard(rank=world.rank, zones=(), moves=moves), world, over)
        for over in (links, None)
    ]
    x = torch.zeros(rows * width if world.rank == 0 else 0, 1, HEAD_DIM)
    return compared(*(partial(way.attention_to_linear, (x,)) for way in ways), asked.rounds)


def gather(world: Communicator, links: NicFigures, asked: argparse.Namespace) -> str:
    """A sequence of which a rank holds keys and values of `bytes`."""
    tokens = asked.bytes // (2 * HEAD_DIM * 4) * world.world_size
    group = Group(ranks=tuple(range(world.world_size)), sequences=(0,), strategy="allgather")
    (zone,) = make_shard(MicroBatch(groups=(group,)), [tokens], world.rank).zones
    kernel, channel = choose_kernel(CPU, torch.float32, HEAD_DIM), Channel(world, group, 0)
    relayed = AllGatherZone(zone, channel, kernel, CPU)
    with mock.patch.object(
        allgather, "gather_hops", lambda cuts, degree, _: gather_hops(cuts, degree, degree)
    ):
        straight = AllGatherZone(zone, channel, kernel, CPU)
    for made in (relayed, straight):
        # what is done with the keys once they are here is no transfer
        made.key_rows = torch.arange(0)
    kv = torch.zeros(zone.stop, 2, 1, HEAD_DIM)

    def gathered(zone: AllGatherZone) -> None:
        for _ in zone._gather(kv, until=1.0):
            pass

    return compared(lambda: gathered(relayed), lambda: gathered(straight), asked.rounds)


class WaitingKernel:
    """Attention that takes its time but no processor's, as on a device: the ranks share the cores
    of this machine."""

    wide_gradients = False

    def __init__(self, seconds_per_pair: float) -> None:
        self.name, self.seconds_per_pair = "waiting", seconds_per_pair

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ):
        self._wait(segments, passes=1)
        return q.clone(), torch.zeros(q.shape[1], q.shape[0])

    def backward(self, dout, q, k, v, out, lse, segments: Segments, *, scale: float):  # type: ignore[no-untyped-def]
        self._wait(segments, passes=2)
        return q.clone(), k.clone(), v.clone()

    def _wait(self, segments: Segments, passes: int) -> None:
        pairs = sum(q * k for q, k in zip(segments.q_lens, segments.k_lens, strict=True))
        time.sleep(passes * self.seconds_per_pair * pairs / (2 if segments.causal else 1))


def ring(
    world: Communicator, links: NicFigures, asked: argparse.Namespace, strategy: str, share: float
) -> str:
    """Of a sequence of which a rank holds keys and values of `ring_bytes`. share: of the seconds
    of a hop of these that a step's attention takes in the forward."""
    held = asked.ring_bytes // (2 * HEAD_DIM * 4 * KV_HEADS)
    group = Group(ranks=tuple(range(world.world_size)), sequences=(0,), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), [held * world.world_size], world.rank)
    kernel = WaitingKernel(share * asked.ring_bytes * links.across_s / (held * held / 2))
    q, k, v = (
        torch.zeros(shard.attention_tokens, h, HEAD_DIM, requires_grad=True)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    )

    def step(links: NicFigures | None) -> None:
        seq_ctx = SequenceContext(shard, world, kernel, CPU, links=links)
        sequence_parallel_attention(q, k, v, seq_ctx).sum().backward()

    return compared(lambda: step(links), lambda: step(None), asked.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bytes", type=int, default=16_000_000, help="of a hop, and that a rank lends in a gather"
    )
    parser.add_argument(
        "--ring-bytes", type=int, default=2_000_000, help="of a rank's keys and values in a ring"
    )
    parser.add_argument("--only", nargs="*", choices=MEASURED, default=MEASURED)
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=[0, 0.5, 1],
        help="of a hop, that attention takes",
    )
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()
    links = measured_links(world)
    report(
        world,
        f"links   {links.nics_per_node} NIC(s) per node, {1e-6 / links.across_s:.1f} MB/s each, "
        f"inside nodes "
        f"{1e-6 / links.inside_s:.0f} MB/s, {1e6 * links.transfer_s:.0f} us a transfer; "
        f"{os.cpu_count()} cores",
    )
    for name, measure in (("hop", hop), ("busy", busy), ("remap", remap), ("gather", gather)):
        if name in asked.only:
            report(world, f"{name:8} {measure(world, links, asked)}")
    for strategy, share in product(("zigzag", "balanced"), asked.shares):
        if strategy in asked.only:
            report(world, f"{strategy:8} {share:4} {ring(world, links, asked, strategy, share)}")
    dist.barrier()
    dist.destroy_process_group()


def report(world: Communicator, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
