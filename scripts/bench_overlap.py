"""Attention of one layer over three zones on real links: the zones together, against one after the
other.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit -- python
    scripts/bench_overlap.py

On every rank: a part of a long sequence that all ranks share, one of a sequence that the ranks of
a node share, and sequences of its own. One forward and one backward in float32, median of the
rounds over all ranks' slowest; the ways take turns within a round.

    together       as the product does it
    zone by zone   each zone to its end before the next, with the overlap inside a zone
    no overlap     and every transfer is waited for where it is posted
    all STRATEGY   all sequences on all ranks by one strategy
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from hf_flexseq.attention import SequenceContext, function, sequence_parallel_attention
from hf_flexseq.attention.weave import Result, ZoneSteps, run_zones
from hf_flexseq.distributed import all_to_all, communicator
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard

CPU = torch.device("cpu")
HEADS, HEAD_DIM = 8, 32
WHOLE = ("ulysses", "zigzag", "allgather", "hybrid")


def waiting(posted: type) -> type:
    """The same, but that it waits where it is posted."""

    class Waiting(posted):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            super().wait()

        def wait(self) -> None:
            pass

    return Waiting


@contextmanager
def way(name: str) -> Iterator[None]:
    with ExitStack() as patches:
        if name in ("zone by zone", "no overlap"):
            patches.enter_context(mock.patch.object(function, "run_zones", one_by_one))
        if name == "no overlap":
            blocking = waiting(communicator.Transfers)
            for module in (communicator, all_to_all):
                patches.enter_context(mock.patch.object(module, "Transfers", blocking))
            patches.enter_context(
                mock.patch.object(all_to_all, "Collective", waiting(all_to_all.Collective))
            )
        yield


def one_by_one(zones: Sequence[ZoneSteps[Result]]) -> list[Result]:
    return [run_zones([zone])[0] for zone in zones]


def three_zones(world: Communicator, asked: argparse.Namespace) -> tuple[MicroBatch, list[int]]:
    """The micro-batch and its sequences' lengths."""
    topology = world.topology
    groups, lengths = (
        [Group(ranks=tuple(range(world.world_size)), sequences=(0,), strategy=asked.wide)],
        [asked.long],
    )
    for start in range(0, world.world_size, topology.ranks_per_node):
        ranks = tuple(range(start, start + topology.ranks_per_node))
        groups.append(Group(ranks=ranks, sequences=(len(lengths),), strategy=asked.within))
        lengths.append(asked.middle)
    for rank in range(world.world_size):
        own = tuple(range(len(lengths), len(lengths) + asked.shorts))
        groups.append(Group(ranks=(rank,), sequences=own, strategy="local"))
        lengths += [asked.short] * asked.shorts
    return MicroBatch(groups=tuple(groups)), lengths


def seconds(
    world: Communicator, micro_batch: MicroBatch, lengths: list[int], kv_heads: int
) -> float:
    """Of a forward and a backward, on the slowest rank."""
    shard = make_shard(micro_batch, lengths, world.rank)
    seq_ctx = SequenceContext(shard, world, choose_kernel(CPU, torch.float32, HEAD_DIM), CPU)
    q, k, v = (
        torch.randn(shard.attention_tokens, h, HEAD_DIM, requires_grad=True)
        for h in (HEADS, kv_heads, kv_heads)
    )
    dist.barrier()
    start = time.perf_counter()
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(torch.ones_like(out))
    found = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--long", type=int, default=4096, help="tokens of the sequence that all ranks share"
    )
    parser.add_argument(
        "--middle", type=int, default=2048, help="tokens of the sequence that a node shares"
    )
    parser.add_argument(
        "--short", type=int, default=2048, help="tokens of a sequence that a rank has alone"
    )
    parser.add_argument("--shorts", type=int, default=3, help="how many of them a rank has")
    parser.add_argument("--kv-heads", type=int, default=8, help=f"of {HEADS}")
    parser.add_argument("--wide", default="zigzag", help="strategy of all ranks")
    parser.add_argument("--within", default="ulysses", help="strategy of a node's ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only-zones", action="store_true", help="leave out the single strategies"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()
    zones, lengths = three_zones(world, asked)
    everything = {"ranks": tuple(range(world.world_size)), "sequences": tuple(range(len(lengths)))}
    ways = dict.fromkeys(("together", "zone by zone", "no overlap"), zones)
    ways |= {
        f"all {name}": MicroBatch(groups=(Group(**everything, strategy=name),))
        for name in (() if asked.only_zones else WHOLE)
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, micro_batch in ways.items():
            with way(name):
                times[name].append(seconds(world, micro_batch, lengths, asked.kv_heads))
    if world.rank == 0:
        for name, found in times.items():
            ratios = [other / own for other, own in zip(found, times["together"], strict=True)]
            print(
                f"{name:13} {statistics.median(found):6.2f} s, {statistics.median(ratios):5.2f} x "
                f"together",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
