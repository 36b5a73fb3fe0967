"""Attention of one layer over three zones on real links: together, and one after the other.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit -- \\
        python scripts/benchmarks/overlap.py

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from common import argument_parser, ratios, slowest_rank_s, write_record
from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.programs import BACKWARD, FORWARD, layer_shape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program.builder import Builder
from hf_flexseq.program.weave import ZoneSteps, run_zones

CPU = torch.device("cpu")
HEADS, HEAD_DIM = 8, 32
STRATEGIES = ("ulysses", "zigzag", "allgather", "hybrid")
Result = TypeVar("Result")


# ---- the ways


@contextmanager
def way(name: str) -> Iterator[None]:
    """Compile attention as `name` says for as long as the block runs."""
    with ExitStack() as patches:
        if name in ("zone by zone", "no overlap"):
            weave = mock.patch("hf_flexseq.program.compile.run_zones", one_by_one)
            patches.enter_context(weave)
        if name == "no overlap":
            for post in (Builder.post, Builder.all_to_all):
                patches.enter_context(mock.patch.object(Builder, post.__name__, waiting(post)))
        yield


def one_by_one(zones: Sequence[ZoneSteps[Result]]) -> list[Result]:
    """Run each zone to its end before the next one begins."""
    return [run_zones([zone])[0] for zone in zones]


def waiting(post: Callable[..., int]) -> Callable[..., int]:
    """Return a method that posts transfers as `post` does and waits for them at once."""

    def post_and_wait(builder: Builder, *constants: object) -> int:
        number = post(builder, *constants)
        builder.wait(number)
        return number

    return post_and_wait


# ---- the work


def three_zones(world: Communicator, asked: argparse.Namespace) -> tuple[MicroBatch, list[int]]:
    """Return the micro-batch and its sequences' lengths."""
    per_node = world.topology.ranks_per_node
    # one sequence on all ranks
    everyone = tuple(range(world.world_size))
    groups = [Group(ranks=everyone, sequences=(0,), strategy=asked.wide)]
    lengths = [asked.long]
    # one sequence on the ranks of each node
    for start in range(0, world.world_size, per_node):
        ranks = tuple(range(start, start + per_node))
        groups.append(Group(ranks=ranks, sequences=(len(lengths),), strategy=asked.within))
        lengths.append(asked.middle)
    # some sequences on each rank alone
    for rank in range(world.world_size):
        sequences = tuple(range(len(lengths), len(lengths) + asked.shorts))
        groups.append(Group(ranks=(rank,), sequences=sequences, strategy="local"))
        lengths += [asked.short] * asked.shorts
    return MicroBatch(groups=tuple(groups)), lengths


def attention_s(
    world: Communicator, micro_batch: MicroBatch, lengths: list[int], kv_heads: int, name: str
) -> float:
    """Return the seconds of a forward and a backward on the slowest rank. Collective.

    name: of the way. Programs are compiled before the clock starts, as they are once for all
    layers of a micro-batch.
    """
    shard = make_shard(micro_batch, lengths, world.rank)
    seq_ctx = SequenceContext(shard, world, choose_kernel(CPU, torch.float32, HEAD_DIM), CPU)
    tokens = shard.attention_tokens
    q = torch.randn(tokens, HEADS, HEAD_DIM, requires_grad=True)  # [tokens, heads, head_dim]
    k = torch.randn(tokens, kv_heads, HEAD_DIM, requires_grad=True)
    v = torch.randn(tokens, kv_heads, HEAD_DIM, requires_grad=True)
    shape = layer_shape(q, k)
    with way(name):
        seq_ctx.programs.prepare(((FORWARD, shape), (BACKWARD, shape)))

    def run() -> None:
        out = sequence_parallel_attention(q, k, v, seq_ctx)  # [tokens, heads, head_dim]
        out.backward(torch.ones_like(out))

    return slowest_rank_s(run)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
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
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()
    zones, lengths = three_zones(world, asked)
    ways = dict.fromkeys(("together", "zone by zone", "no overlap"), zones)
    if not asked.only_zones:
        everyone = tuple(range(world.world_size))
        everything = tuple(range(len(lengths)))
        for strategy in STRATEGIES:
            group = Group(ranks=everyone, sequences=everything, strategy=strategy)
            ways[f"all {strategy}"] = MicroBatch(groups=(group,))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, micro_batch in ways.items():
            found = attention_s(world, micro_batch, lengths, asked.kv_heads, name)
            seconds[name].append(found)
    if world.rank == 0:
        for name, of_way in seconds.items():
            ratio = statistics.median(ratios(of_way, seconds["together"]))
            print(f"{name:13} {statistics.median(of_way):6.2f} s, {ratio:5.2f} x together")
        write_record(asked.json, {"seconds": seconds})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
