"""Measured: what the host does for the attention of one layer, forward and backward.

    python scripts/benchmarks/host_time.py
    python scripts/benchmarks/host_time.py --rounds 100 --profile zigzag-8

One rank of many, all alone: its messages are there at once (scripts/gpu_checks/stub.py), and its
kernel returns memory as it finds it. What is left is the host's own work, which on a GPU stands
beside kernels of 2 to 10 ms: Python, and operations of torch on so few rows that their size does
not matter. Milliseconds are CPU time of the thread. Operations are those that torch dispatches,
views left out; launches are those of the rank's programs, in which merging, adding and packing are
one each, as on CUDA with Triton, and the kernel calls count, too. Posts are batches of messages.
The last column is what it takes to lay out the micro-batch and to compile and bind the programs of
a layer, once for all of its layers and ahead.
"""

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import (
    ROOT,
    argument_parser,
    load_average,
    machine,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.programs import BACKWARD, FORWARD
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import heads
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.topology import Topology

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_checks.stub import Over, StubTransport

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 16
TOKENS = 64  # of the rank
COLUMNS = ("attention", "ms, p50", "least", "operations", "launches", "posts", "compile, ms")


class FreeKernel:
    """A kernel that does nothing: its results are whatever stood in the memory."""

    def __init__(self, real: Any) -> None:
        """real: the kernel whose other answers this one gives."""
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Any, *, scale: float
    ) -> Any:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens]."""
        return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype(q.dtype))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *rest: Any,
        scale: float,
    ) -> Any:
        """Return gradients shaped as q, k and v are."""
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class CountingTransport(StubTransport):
    """Counts what is posted."""

    __slots__ = ("posts",)

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.posts = 0

    def post(self, *args: Any, **kwargs: Any) -> Over:
        self.posts += 1
        return super().post(*args, **kwargs)


class CountingMode(TorchDispatchMode):
    """Counts operations that work on elements; views and new memory do not."""

    FREE = (
        "view",
        "slice",
        "unbind",
        "transpose",
        "t.",
        "split",
        "expand",
        "select.",
        "detach",
        "empty",
        "new_empty",
        "unsqueeze",
        "squeeze",
        "permute",
        "alias",
        "as_strided",
        "_unsafe_view",
        "reshape",
        "narrow",
    )

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.FREE):
            self.operations += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Work:
    """The attention of rank 0 of some ranks."""

    name: str
    strategy: str
    degree: int
    ranks_per_node: int
    pieces: int = 1
    """Into how many pieces Ulysses may cut the heads."""
    found: dict[str, Any] = field(default_factory=dict)


WORKS = (
    Work(name="local", strategy="local", degree=1, ranks_per_node=8),
    Work(name="ulysses-8", strategy="ulysses", degree=8, ranks_per_node=8),
    Work(name="ulysses-8, four pieces", strategy="ulysses", degree=8, ranks_per_node=8, pieces=4),
    Work(name="zigzag-8", strategy="zigzag", degree=8, ranks_per_node=8),
    Work(name="zigzag-8, two nodes", strategy="zigzag", degree=8, ranks_per_node=4),
    Work(name="balanced-8", strategy="balanced", degree=8, ranks_per_node=8),
    Work(name="allgather-8", strategy="allgather", degree=8, ranks_per_node=8),
    Work(name="hybrid-16", strategy="hybrid", degree=16, ranks_per_node=8),
    Work(name="zigzag-64", strategy="zigzag", degree=64, ranks_per_node=8),
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The attention of a layer, ready to run."""

    run: Callable[[], None]
    """Runs it forward and backward."""
    make: Callable[[], SequenceContext]
    """Makes its context anew, with its programs."""
    transport: CountingTransport
    context: SequenceContext


def layer(work: Work) -> Layer:
    """Return the attention of one layer of rank 0."""
    nodes = max(1, -(-work.degree // work.ranks_per_node))
    topology = Topology(nodes=nodes, ranks_per_node=work.ranks_per_node)
    transport = CountingTransport(0, topology.world_size)
    communicator = Communicator(topology, transport=transport)
    kernel = FreeKernel(choose_kernel(torch.device("cpu"), torch.float32, HEAD_DIM))
    own_heads = max(1, HEADS // work.degree)
    heads.PIECE_ROWS["cpu"] = TOKENS * work.degree * own_heads / work.pieces
    group = Group(ranks=tuple(range(work.degree)), sequences=(0,), strategy=work.strategy)
    shard = make_shard(MicroBatch(groups=(group,)), (TOKENS * work.degree,), 0)
    context = SequenceContext(shard, communicator, kernel, torch.device("cpu"))
    shape = LayerShape(HEADS, KV_HEADS, HEAD_DIM, "float32")

    def make() -> SequenceContext:
        made = SequenceContext(shard, communicator, kernel, torch.device("cpu"))
        made.programs.prepare([(FORWARD, shape), (BACKWARD, shape)])
        return made

    rows = shard.attention_tokens
    q = torch.randn(rows, HEADS, HEAD_DIM, requires_grad=True)  # [tokens, heads, head_dim]
    k = torch.randn(rows, KV_HEADS, HEAD_DIM, requires_grad=True)
    v = torch.randn(rows, KV_HEADS, HEAD_DIM, requires_grad=True)
    dout = torch.randn_like(q)

    def run() -> None:
        out = sequence_parallel_attention(q, k, v, context)
        torch.autograd.grad(out, (q, k, v), dout)

    return Layer(run=run, make=make, transport=transport, context=context)


def measured(work: Work, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round, and operations and posts of one."""
    found = layer(work)
    found.run()
    found.transport.posts = 0
    with CountingMode() as mode, torch.autograd.set_multithreading_enabled(False):
        found.run()
    posts = found.transport.posts
    with torch.autograd.set_multithreading_enabled(False):
        milliseconds = timed_ms(found.run, rounds)
    launches = 0
    for direction, shape in found.context.programs.keys:
        launches += found.context.programs.find(direction, shape).program.launches
    return {
        "milliseconds": milliseconds,
        "operations": mode.operations,
        "launches": launches,
        "posts": posts,
        "compile_ms": timed_ms(found.make, rounds),
    }


def timed_ms(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the milliseconds of the thread that each of some calls takes."""
    milliseconds = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        milliseconds.append(1e3 * (time.thread_time() - began))
    return milliseconds


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    names = [work.name for work in WORKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--profile", choices=names, help="show where the time of one goes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.profile:
        profiled = layer(WORKS[names.index(asked.profile)])
        profiled.run()
        with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as profile:
            for _ in range(asked.rounds):
                profiled.run()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    print(f"host_time.py {' '.join(sys.argv[1:])}\non {machine('torch')}, load {load_average()}")
    print(f"{TOKENS} tokens of the rank, {HEADS} heads over {KV_HEADS}\n")
    print(table_head(COLUMNS))
    figures = {}
    for work in WORKS:
        if work.name not in asked.only:
            continue
        found = measured(work, asked.rounds)
        figures[work.name] = found
        times = found["milliseconds"]
        cells = [work.name, f"{median(times):.2f}", f"{min(times):.2f}"]
        cells += [str(found[name]) for name in ("operations", "launches", "posts")]
        cells.append(f"{median(found['compile_ms']):.2f}")
        print(table_row(cells), flush=True)
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
