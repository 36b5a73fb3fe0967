"""Transfers between nodes over all of their NICs, against straight ones, on real links.

    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit \\
        --nic-per-rank -- python scripts/benchmarks/routing.py

First the links are measured, as a cost model is. Then each way takes its turn within a round, and
the figure is the median over the rounds of the ratio of their seconds (on the slowest rank):

    hop        one transfer between nodes, all other NICs idle: routed / straight
    busy       every rank sends to the other node at once: what is decided, and why
    remap      rank 0 gives its surplus to the ranks of the other node: with routing / without
    gather     keys and values of an all-gather: once per node and on from there / straight from
               the owners
    zigzag S, balanced S
               forward and backward of a ring whose steps attend S times as long as a rank's keys
               and values would travel: with routing / without. Attention only waits, as if a
               device computed it

Without --nic-per-rank the ranks of a node share one NIC, and nothing must be routed.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import torch
import torch.distributed as dist

from common import argument_parser, ratios, slowest_rank_s, spread, write_record
from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.programs import BACKWARD, FORWARD, layer_shape
from hf_flexseq.attention.replay import BoundProgram
from hf_flexseq.attention.uploads import Uploads
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.layers import Scores
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.remap import Move
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.profiler.measure import measured_nics, median_seconds
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.gathered import all_gather_zone
from hf_flexseq.program.instructions import BYTES, LayerShape, Rows, Value
from hf_flexseq.program.remap import TokenRemap
from hf_flexseq.program.weave import run_zones
from hf_flexseq.schedule.routing import NicFigures, Routing, Transfer, make_routing
from hf_flexseq.schedule.transfers import aligned

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 8, 8, 64
ROW_BYTES = 4 * HEAD_DIM  # of one head of a token, in float32
MEASURED = ("hop", "busy", "remap", "gather", "zigzag", "balanced")
PROBE_BYTES, PROBE_ROUNDS = 4_000_000, 3
Figures = dict[str, object]


# ---- programs


def builder(world: Communicator) -> Builder:
    """Return the builder of a program that moves rows of one head and computes nothing."""
    shape = LayerShape(query_heads=1, kv_heads=1, head_dim=HEAD_DIM, dtype="float32")
    return Builder(Tables(), shape, rank=world.rank, wide=False)


def compiled(b: Builder, outputs: Values, world: Communicator) -> Callable[[], object]:
    """Return a function that runs the program that was built, on zeros. It is collective."""
    program = b.program(outputs)
    kernel = choose_kernel(CPU, torch.float32, HEAD_DIM)
    uploads = Uploads(b.tables, CPU)
    uploads.bring()
    bound = BoundProgram(program, uploads, world, kernel, torch.float32)
    inputs = []
    for value in program.inputs:
        dtype = torch.uint8 if value.dtype == BYTES else torch.float32
        inputs.append(torch.zeros(value.shape, dtype=dtype))
    return lambda: bound.run(inputs, Scores(1.0))


# ---- links and transfers


def measured_links(world: Communicator) -> NicFigures:
    """Measure the links: one hop beside others, and transfers between the ranks of a node.

    Collective; all ranks return rank 0's figures.
    """
    nics, transfer_s = measured_nics(
        world, bytes_moved=PROBE_BYTES, device=CPU, rounds=PROBE_ROUNDS
    )
    per_node = world.topology.ranks_per_node

    def hop_to(target: int) -> Callable[[], object]:
        return mover(world, (Transfer(0, target, PROBE_BYTES),), Routing())

    inside_by_rank, across_by_rank = median_seconds(
        [hop_to(1), hop_to(per_node)], world, CPU, PROBE_ROUNDS
    )
    box = [
        NicFigures(
            ranks_per_node=per_node,
            nics_per_node=nics,
            inside_s=max(inside_by_rank) / PROBE_BYTES,
            across_s=max(across_by_rank) / PROBE_BYTES,
            transfer_s=transfer_s,
        )
    ]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def mover(
    world: Communicator, transfers: tuple[Transfer, ...], routing: Routing
) -> Callable[[], object]:
    """Return a function that does all `transfers` as `routing` says. It is collective."""
    b = builder(world)
    label = Label(None, lambda peer, sent: "a transfer of a benchmark")
    exchange = Exchange(b, 0, label, routing=routing)
    like = b.empty((0,), BYTES)
    received: list[Value] = []
    for source, target, nbytes in transfers:
        if source == world.rank:
            exchange.send([b.input((nbytes,), BYTES)], target)
        if target == world.rank:
            received += exchange.recv([like], nbytes, source)
    post(b, [exchange])
    exchange.wait()
    return compiled(b, tuple(received), world)


def compared(
    run: Callable[[], object], straight: Callable[[], object], rounds: int, figures: Figures
) -> str:
    """Run both in turn, and return their medians and the ratio. Collective.

    figures: the seconds of every round are added to it.
    """
    run_s, straight_s = [], []
    for _ in range(rounds + 1):
        run_s.append(slowest_rank_s(run))
        straight_s.append(slowest_rank_s(straight))
    # the first round connects
    run_s, straight_s = run_s[1:], straight_s[1:]
    figures |= {"run_s": run_s, "straight_s": straight_s}
    return (
        f"{statistics.median(run_s):6.3f} s against {statistics.median(straight_s):6.3f} s "
        f"straight: {spread(ratios(run_s, straight_s), digits=2)}"
    )


# ---- what is measured


def hop(
    world: Communicator, links: NicFigures, asked: argparse.Namespace, figures: Figures
) -> str:
    """Send from one rank to another node while the other NICs are idle."""
    transfers = (Transfer(0, links.ranks_per_node, aligned(asked.bytes)),)
    routing = make_routing(transfers, links)
    if not routing.paths:
        return f"off: {routing.why_not}"
    predicted = routing.routed_s / routing.direct_s
    found = compared(
        mover(world, transfers, routing),
        mover(world, transfers, Routing()),
        asked.rounds,
        figures,
    )
    return f"{found}; predicted {predicted:.2f}, {routing.packets} packets"


def busy(
    world: Communicator, links: NicFigures, asked: argparse.Namespace, figures: Figures
) -> str:
    """Send from every rank to the other node at once."""
    transfers = []
    for rank in range(world.world_size):
        target = (rank + links.ranks_per_node) % world.world_size
        transfers.append(Transfer(rank, target, aligned(asked.bytes)))
    routing = make_routing(tuple(transfers), links)
    run = mover(world, tuple(transfers), routing)
    found = [slowest_rank_s(run) for _ in range(3)]
    figures["seconds"] = found
    decided = "on" if routing.paths else f"off: {routing.why_not}"
    return f"{statistics.median(found):6.3f} s; {decided}"


def remap(
    world: Communicator, links: NicFigures, asked: argparse.Namespace, figures: Figures
) -> str:
    """Move rank 0's surplus from the groups' layout to the even one."""
    width = links.ranks_per_node
    tokens = asked.bytes // ROW_BYTES // width
    moves = []
    for index in range(width):
        moves.append(Move(source=0, target=width + index, tokens=tokens))
    shard = Shard(rank=world.rank, zones=(), moves=tuple(moves))
    surplus = tokens * width if world.rank == 0 else 0

    def moved(links: NicFigures | None) -> Callable[[], object]:
        b = builder(world)
        x = b.input((surplus, 1, HEAD_DIM))  # [tokens, heads, head_dim]
        return compiled(b, TokenRemap(shard, links).attention_to_linear(b, (x,)), world)

    return compared(moved(links), moved(None), asked.rounds, figures)


def gather(
    world: Communicator, links: NicFigures, asked: argparse.Namespace, figures: Figures
) -> str:
    """Gather a sequence of which each rank holds `--bytes` of keys and values."""
    tokens = asked.bytes // (2 * ROW_BYTES) * world.world_size
    group = Group(ranks=tuple(range(world.world_size)), sequences=(0,), strategy="allgather")
    (zone,) = make_shard(MicroBatch(groups=(group,)), [tokens], world.rank).zones

    def gathered(ranks_per_node: int) -> Callable[[], object]:
        b = builder(world)
        attention = all_gather_zone(zone, Channel(group, 0), b.tables, ranks_per_node)
        # what is done with the keys once they are here is no transfer
        attention.key_rows = Rows(0, start=0)
        kv = b.input((zone.stop, 2, 1, HEAD_DIM))  # [tokens, keys and values, heads, head_dim]
        keys = run_zones([attention._gather(b, kv, until=1.0)])
        return compiled(b, tuple(keys), world)

    # on a single node every rank reads from the owners
    relayed, straight = gathered(links.ranks_per_node), gathered(world.world_size)
    return compared(relayed, straight, asked.rounds, figures)


class WaitingKernel:
    """Attention that takes time but no processor, as on a device.

    The ranks share the cores of this machine, which real attention would keep busy.
    """

    wide_gradients = False

    def __init__(self, seconds_per_pair: float) -> None:
        self.name = "waiting"
        self.seconds_per_pair = seconds_per_pair

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
        if segments.causal:
            pairs /= 2
        time.sleep(passes * self.seconds_per_pair * pairs)


def ring(
    world: Communicator,
    links: NicFigures,
    asked: argparse.Namespace,
    figures: Figures,
    strategy: str,
    share: float,
) -> str:
    """Run a ring over a sequence of which each rank holds `--ring-bytes` of keys and values.

    share: of the seconds that these take for a hop, how much a step's attention takes forward.
    """
    tokens = asked.ring_bytes // (2 * ROW_BYTES * KV_HEADS)  # of a rank
    group = Group(ranks=tuple(range(world.world_size)), sequences=(0,), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), [tokens * world.world_size], world.rank)
    hop_s = asked.ring_bytes * links.across_s
    kernel = WaitingKernel(share * hop_s / (tokens * tokens / 2))
    rows = shard.attention_tokens
    q = torch.zeros(rows, HEADS, HEAD_DIM, requires_grad=True)  # [tokens, heads, head_dim]
    k = torch.zeros(rows, KV_HEADS, HEAD_DIM, requires_grad=True)
    v = torch.zeros(rows, KV_HEADS, HEAD_DIM, requires_grad=True)

    def step(links: NicFigures | None) -> Callable[[], object]:
        seq_ctx = SequenceContext(shard, world, kernel, CPU, links=links)
        shape = layer_shape(q, k)
        # once for all layers of a micro-batch, so before the clock starts
        seq_ctx.programs.prepare(((FORWARD, shape), (BACKWARD, shape)))
        return lambda: sequence_parallel_attention(q, k, v, seq_ctx).sum().backward()

    return compared(step(links), step(None), asked.rounds, figures)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
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
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()
    links = measured_links(world)
    report(
        world,
        f"links   {links.nics_per_node} NIC(s) per node, {1e-6 / links.across_s:.1f} MB/s each, "
        f"inside nodes {1e-6 / links.inside_s:.0f} MB/s, {1e6 * links.transfer_s:.0f} us a "
        f"transfer; {os.cpu_count()} cores",
    )
    found: dict[str, Figures] = {}
    for name, measure in (("hop", hop), ("busy", busy), ("remap", remap), ("gather", gather)):
        if name in asked.only:
            found[name] = {}
            report(world, f"{name:8} {measure(world, links, asked, found[name])}")
    for strategy, share in product(("zigzag", "balanced"), asked.shares):
        if strategy in asked.only:
            figures = found[f"{strategy} {share}"] = {}
            line = ring(world, links, asked, figures, strategy, share)
            report(world, f"{strategy:8} {share:4} {line}")
    if world.rank == 0:
        write_record(asked.json, {"links": asdict(links), "measured": found})
    dist.barrier()
    dist.destroy_process_group()


def report(world: Communicator, line: str) -> None:
    """Print a line on rank 0."""
    if world.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
