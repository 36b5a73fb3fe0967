"""Attention of one layer against ring-flash-attn's zigzag and yunchang's Ulysses.

    pip install --no-deps ring-flash-attn==0.1.8 yunchang==0.6.4
    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 1 --inter 133mbit -- \\
        python scripts/benchmarks/layers.py
    python scripts/emulated_cluster.py --nodes 2 --ranks-per-node 2 --inter 133mbit -- \\
        python scripts/benchmarks/layers.py

Forward and backward. The peers' own Python runs on the CPU kernel that hf_flexseq uses (see
peers/flash_attn_stand_in.py), on the same ranks and links, over the same sequences in bfloat16 (in
float32 ring-flash-attn's gradients are wrong: it adds up in the buffer that its kernel writes to).
All lengths are multiples of what the peers need, so that nobody pads.

    zigzag     all sequences on all ranks by our zigzag, against ring-flash-attn's (as it is, and
               with its receives posted first: gloo serialises the two directions of a slow link
               otherwise)
    ulysses    all sequences on all ranks by our Ulysses, against yunchang's (with a kernel for
               packed sequences)
    planned    as our planner lays them out for this link

Every method's result and gradients are first compared with plain softmax attention in float64, on
sequences a quarter as long. Then methods take turns within a round; seconds are the slowest
rank's, and ratios are taken within rounds.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from common import (
    argument_parser,
    machine,
    ratios,
    seconds_of,
    slowest_rank_s,
    spread,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.cost import PIECE_ROWS, CostModel
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.planner import make_plan
from peers import layers
from peers.layers import Call, Peers

DTYPE, HEAD_DIM, QUERY_HEADS = torch.bfloat16, 32, 8
WIDTHS = {"MHA": 8, "GQA": 4}  # key and value heads
SHARE = 64  # of which all lengths are multiples: of four (the check) times twice the ranks
OURS = {"zigzag": ("ring-flash-attn", "receives first"), "ulysses": ("yunchang",)}
COLUMNS = (
    "lengths",
    "heads",
    "zigzag, s",
    "ring-flash-attn over it",
    "its receives first",
    "ulysses, s",
    "yunchang over it",
    "planned, s",
    "the better peer over it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to compute the attention of all sequences."""

    calls: list[Call]
    """The attention calls of this rank, in order."""
    helped: bool = False
    """Whether ring-flash-attn posts its receives first."""


def mixes(tokens: int) -> dict[str, list[int]]:
    """Return the lengths of packed sequences by name of the mix, about `tokens` in each."""
    share = tokens // 16
    return {
        "one long": [tokens],
        "a few long": [6 * share, 5 * share, 3 * share, 2 * share],
        "many short": [2 * SHARE] * (tokens // (2 * SHARE)),
        "long-tailed": long_tailed(tokens),
        "all equal": [2 * share] * 8,
    }


def long_tailed(tokens: int) -> list[int]:
    """Return log-normal lengths with a median of a fortieth of all tokens."""
    rng = random.Random(0)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        drawn = rng.lognormvariate(0.0, 1.3) * tokens / 40
        lengths.append(min(left, max(SHARE, int(drawn) // SHARE * SHARE)))
        left -= lengths[-1]
    return lengths


# ---- methods


def methods(
    peers: Peers, lengths: Sequence[int], world: Communicator, cost: CostModel
) -> dict[str, Method]:
    """Return all methods by name, ours and the peers', for these sequences."""
    rank, degree = world.rank, world.world_size
    plan = make_plan(lengths, world.topology, cost, remap="off")
    zigzag = [layers.one_group("zigzag", lengths, world)]
    ulysses = [layers.one_group("ulysses", lengths, world)]
    their_ring = layers.zigzag_varlen_call(peers, lengths, rank, degree)
    their_ulysses = layers.ulysses_call(peers, lengths, rank, degree)
    return {
        "zigzag": Method(calls=layers.flexseq_calls(zigzag, lengths, world)),
        "ring-flash-attn": Method(calls=[their_ring]),
        "receives first": Method(calls=[their_ring], helped=True),
        "ulysses": Method(calls=layers.flexseq_calls(ulysses, lengths, world)),
        "yunchang": Method(calls=[their_ulysses]),
        "planned": Method(calls=layers.flexseq_calls(plan.micro_batches, lengths, world)),
    }


def cost_model(world: Communicator, kv_heads: int, bits_per_s: float) -> CostModel:
    """Return the cost model of a layer of attention alone, on these links. Collective.

    Attention is timed on this machine; links are taken as they are shaped.
    """
    n = 1024  # tokens of the sequence that is timed
    topology = world.topology
    q = 2 * HEAD_DIM * QUERY_HEADS  # bytes of a token's queries
    keys = 2 * 2 * HEAD_DIM * kv_heads  # bytes of a token's keys and values
    across = bits_per_s / 8 / topology.ranks_per_node
    inside = ((topology.ranks_per_node, 1e9),) if topology.ranks_per_node > 1 else ()
    seconds = torch.tensor(min(kernel_seconds(n, kv_heads) for _ in range(3)))
    dist.broadcast(seconds, src=0)
    return CostModel(
        name="measured",
        attention_s=float(seconds) / n**2,
        linear_s=1e-12,
        micro_batch_s=1e-3,
        group_s=2e-3,
        all_to_all_bytes=2 * (2 * q + keys),
        ring_bytes=3 * keys,
        query_bytes=q,
        ring_overlap=0.7,
        all_to_all_overlap=0.7,
        piece_rows=PIECE_ROWS["cpu"],
        bandwidths=(*inside, (topology.world_size, across)),
        heads=QUERY_HEADS,
        token_bytes=1.0,
        state_bytes=0.0,
        sharded_state_bytes=0.0,
        budget_bytes=1e9,
    )


def kernel_seconds(n: int, kv_heads: int) -> float:
    """Return the seconds of a forward and a backward of a sequence of n tokens."""
    kernel = CpuFlash()
    segments = Segments((n,), (n,), causal=True, device=layers.CPU)
    q = torch.randn(n, QUERY_HEADS, HEAD_DIM, dtype=DTYPE)  # [tokens, heads, head_dim]
    k = torch.randn(n, kv_heads, HEAD_DIM, dtype=DTYPE)

    def run() -> None:
        out, lse = kernel.forward(q, k, k, segments, scale=0.1)
        kernel.backward(out, q, k, k, out, lse, segments, scale=0.1)

    return seconds_of(run)


# ---- runs


def tensors(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the result, each [tokens, heads, head_dim].

    They hold all sequences and are the same on all ranks.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (QUERY_HEADS, kv_heads, kv_heads, QUERY_HEADS)
    return [torch.randn(tokens, h, HEAD_DIM, generator=generator).to(DTYPE) for h in heads]


def run(
    peers: Peers, method: Method, whole: Sequence[torch.Tensor]
) -> tuple[float, list[list[torch.Tensor]]]:
    """Return the seconds of the slowest rank, and each call's result and gradients. Collective.

    whole: q, k, v and the gradient of the result, each [tokens, heads, head_dim]; what is returned
    holds the rows of each call.
    """
    inputs = []
    for call in method.calls:
        inputs.append([x[call.rows].requires_grad_() for x in whole])
    comm = peers.ring_flash_attn.utils.RingComm
    if method.helped:
        comm = layers.receives_first(peers)
    results = []

    def attend() -> None:
        for call, (q, k, v, dout) in zip(method.calls, inputs, strict=True):
            out = call.attend(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), dout)
            results.append([out.detach(), *gradients])

    their_ring = sys.modules["ring_flash_attn.zigzag_ring_flash_attn_varlen"]
    with mock.patch.object(their_ring, "RingComm", comm):
        seconds = slowest_rank_s(attend)
    return seconds, results


def check(peers: Peers, ways: dict[str, Method], lengths: Sequence[int], kv_heads: int) -> float:
    """Return the largest relative error of any result or gradient, on any rank. Collective.

    Raises AssertionError beyond what bfloat16 explains.
    """
    whole = tensors(sum(lengths), kv_heads)
    worst = torch.zeros(())
    wanted = dense([x.double() for x in whole], lengths)
    for name, method in ways.items():
        _, results = run(peers, method, whole)
        for call, found in zip(method.calls, results, strict=True):
            for x, of_all in zip(found, wanted, strict=True):
                error = (x - of_all[call.rows]).norm() / of_all.norm()
                assert error < 1e-2, f"{name} is wrong by {float(error):.1e}"
                worst = torch.maximum(worst, error)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst.detach())


def dense(whole: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return result and gradients by plain softmax, each [tokens, heads, head_dim]."""
    q, k, v, dout = whole
    segments = Segments(lengths, lengths, causal=True, device=layers.CPU)
    kernel = Reference()
    scale = HEAD_DIM**-0.5
    out, lse = kernel.forward(q, k, v, segments, scale=scale)
    return [out, *kernel.backward(dout, q, k, v, out, lse, segments, scale=scale)]


def timed(
    peers: Peers, ways: dict[str, Method], whole: Sequence[torch.Tensor], rounds: int
) -> dict[str, list[float]]:
    """Return each method's seconds in each round, after one that does not count. Collective."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, method in ways.items():
            seconds, _ = run(peers, method, whole)
            if number:
                times[name].append(seconds)
    return times


# ---- the table


def row(mix: str, heads: str, times: dict[str, list[float]]) -> list[str]:
    """Return the cells of a mix: our seconds, and how many times as long the peers take."""
    cells = [mix, heads]
    for ours, theirs in OURS.items():
        cells.append(f"{statistics.median(times[ours]):.3f}")
        for peer in theirs:
            cells.append(spread(ratios(times[peer], times[ours]), digits=2))
    better = [min(a, b) for a, b in zip(times["receives first"], times["yunchang"], strict=True)]
    cells.append(f"{statistics.median(times['planned']):.3f}")
    cells.append(spread(ratios(better, times["planned"]), digits=2))
    return cells


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="about so many in all sequences together"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mixes", nargs="+", default=list(mixes(4096)), choices=mixes(4096))
    parser.add_argument("--heads", nargs="+", default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument(
        "--inter", type=float, default=133e6, help="bits per second between nodes, for the planner"
    )
    asked = parser.parse_args()
    try:
        peers = layers.import_peers()
    except ImportError as error:
        sys.exit(f"layers.py: {error}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    say(f"layers.py {' '.join(sys.argv[1:])}\non {machine('numpy', 'torch')}; {world.topology}\n")
    say(table_head(COLUMNS))
    worst = 0.0
    figures = []
    for heads in asked.heads:
        cost = cost_model(world, WIDTHS[heads], asked.inter)
        for mix in asked.mixes:
            lengths = mixes(asked.tokens)[mix]
            ways = partial(methods, peers, world=world, cost=cost)
            quarter = [n // 4 for n in lengths]
            worst = max(worst, check(peers, ways(lengths=quarter), quarter, WIDTHS[heads]))
            times = timed(
                peers, ways(lengths=lengths), tensors(sum(lengths), WIDTHS[heads]), asked.rounds
            )
            say(table_row(row(mix, heads, times)))
            figures.append({"mix": mix, "heads": heads, "lengths": lengths, "seconds": times})
    say(f"\nlargest relative error of a result or gradient against float64: {worst:.1e}")
    if world.rank == 0:
        write_record(asked.json, {"largest_relative_error": worst, "mixes": figures})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
