"""Measured: the memory that the attention of one layer takes, in its forward and its backward.

    python scripts/benchmarks/peak_bytes.py
    python scripts/benchmarks/peak_bytes.py --only zigzag-8 --plain --tokens 512

One rank of many, all alone: its messages are there at once, but their tensors live until they are
waited for, as on every transport (scripts/gpu_checks/stub.py). Its kernel returns memory as it
finds it, in bfloat16, and takes none for itself. Bytes are those that torch allocates on the CPU,
as its profiler reports them, without q, k, v and the gradient of the result. A *unit* is what q
takes. Merging, adding and packing take no memory, as in Triton; with `--plain` they are torch's
own operations, which do. Turns of rings are joined as on CUDA: below about 2,000 tokens of a rank.

    forward    the most that is alive at once
    saved      what is alive between forward and backward
    backward   the most that is alive at once, what was saved included
    replayed   the same in the backward of a checkpointed layer, which has saved its own rows alone
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from common import (
    ROOT,
    argument_parser,
    machine,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.attention import SequenceContext, replay, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import heads, turns
from hf_flexseq.topology import Topology
from host_time import FreeKernel

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_checks.stub import Over, StubGroup, StubTransport

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
DTYPE = torch.bfloat16
ROW_BYTES = HEADS * HEAD_DIM * DTYPE.itemsize  # of q
COLUMNS = ("attention", "forward", "saved", "backward", "replayed")
FIGURES = COLUMNS[1:]


# ---- a rank that is all alone


class NarrowKernel(FreeKernel):
    """A kernel that does nothing, and leaves gradients in 16 bits, as those of CUDA do."""

    wide_gradients = False


class FreeFused:
    """Merges, adds and packs without memory, and does nothing."""

    name = "free"

    def nothing(self, *args: Any) -> None:
        """Write nothing."""

    merge = add = gather = pack = unpack = nothing


class Keeping(Over):
    """Something that was over when it was posted, and keeps its tensors until it is waited for."""

    __slots__ = ("_kept",)

    def __init__(self, *kept: Any) -> None:
        self._kept = kept

    def wait(self) -> None:
        """Let the tensors go."""
        self._kept = ()


class KeepingGroup(StubGroup):
    """Collectives that keep their tensors."""

    __slots__ = ()

    def all_to_all(self, *args: Any, **kwargs: Any) -> Keeping:
        """Leave what is received as it is."""
        return Keeping(args)


class KeepingTransport(StubTransport):
    """Messages that keep their tensors."""

    __slots__ = ()

    def open_group(self, parts: Sequence[Sequence[int]], **kwargs: Any) -> KeepingGroup | None:
        """See `Transport.open_group`; nothing is made."""
        group = super().open_group(parts, **kwargs)
        return None if group is None else KeepingGroup(group.ranks)

    def post(self, *args: Any, **kwargs: Any) -> Keeping:
        """See `Transport.post`; nothing moves."""
        return Keeping(args, kwargs)


# ---- what is measured


@dataclass(frozen=True, kw_only=True)
class Work:
    """The attention of a rank in a group of one strategy."""

    name: str
    strategy: str
    degree: int
    sequences: int = 1
    """Sequences of the group, of about equal lengths; of several, rows do not stand together."""
    pieces: int = 1
    """Into how many pieces Ulysses may cut the heads."""


WORKS = (
    Work(name="local", strategy="local", degree=1),
    Work(name="ulysses-8", strategy="ulysses", degree=8),
    Work(name="ulysses-8, four pieces", strategy="ulysses", degree=8, pieces=4),
    Work(name="zigzag-8", strategy="zigzag", degree=8),
    Work(name="zigzag-8, four sequences", strategy="zigzag", degree=8, sequences=4),
    Work(name="balanced-8", strategy="balanced", degree=8),
    Work(name="balanced-8, four sequences", strategy="balanced", degree=8, sequences=4),
    Work(name="allgather-8", strategy="allgather", degree=8),
    Work(name="hybrid-16", strategy="hybrid", degree=16),
    Work(name="hybrid-16, four sequences", strategy="hybrid", degree=16, sequences=4),
)


def context_of(work: Work, tokens: int, rank: int) -> SequenceContext:
    """Return what a rank of the group must know."""
    topology = Topology(nodes=-(-work.degree // 8), ranks_per_node=8)
    transport = KeepingTransport(rank, topology.world_size)
    communicator = Communicator(topology, transport=transport)
    kernel = NarrowKernel(choose_kernel(torch.device("cpu"), DTYPE, HEAD_DIM))
    own_heads = max(1, HEADS // work.degree)
    heads.PIECE_ROWS["cpu"] = tokens * work.degree * own_heads / work.pieces
    group = Group(
        ranks=tuple(range(work.degree)),
        sequences=tuple(range(work.sequences)),
        strategy=work.strategy,
    )
    lengths = (tokens * work.degree // work.sequences,) * work.sequences
    shard = make_shard(MicroBatch(groups=(group,)), lengths, rank)
    return SequenceContext(shard, communicator, kernel, torch.device("cpu"))


def measured(work: Work, tokens: int, rank: int) -> dict[str, int]:
    """Return the bytes of each figure, of one rank with so many tokens."""
    context = context_of(work, tokens, rank)
    rows = context.linear_tokens
    q = torch.zeros(rows, HEADS, HEAD_DIM, dtype=DTYPE, requires_grad=True)
    k = torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=DTYPE, requires_grad=True)
    v = torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=DTYPE, requires_grad=True)
    dout = torch.zeros_like(q)

    def attend() -> torch.Tensor:
        return sequence_parallel_attention(q, k, v, context)

    def checkpointed() -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            sequence_parallel_attention, q, k, v, context, use_reentrant=False
        )
        return out

    figures = {}
    for run in (attend, checkpointed):
        torch.autograd.grad(run(), (q, k, v), dout)  # programs are compiled here
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            out = run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            grads = torch.autograd.grad(out, (q, k, v), dout)
        forward_peak, saved = _peak_and_rest(forward)
        backward_peak, _ = _peak_and_rest(backward)
        if run is attend:
            figures["forward"] = forward_peak
            figures["saved"] = saved
            figures["backward"] = saved + backward_peak
        else:
            figures["replayed"] = saved + backward_peak
        del out, grads
    return figures


def _peak_and_rest(run: profile) -> tuple[int, int]:
    """Return the most bytes that were alive at once, of those allocated in a run, and those that
    are alive at its end."""
    events = []
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            events.append((event.start_ns(), event.nbytes()))
    alive = 0
    peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        alive += nbytes
        peak = max(peak, alive)
    return peak, alive


@contextmanager
def free_fused() -> Iterator[None]:
    """Merge, add and pack without memory."""
    choose = replay.choose_fused
    replay.choose_fused = lambda device: FreeFused()
    try:
        yield
    finally:
        replay.choose_fused = choose


def most_of_ranks(work: Work, tokens: int) -> dict[str, int]:
    """Return the bytes of each figure, of the rank that has most of it."""
    of_ranks = [measured(work, tokens, rank) for rank in range(work.degree)]
    return {figure: max(one[figure] for one in of_ranks) for figure in FIGURES}


def main() -> None:
    parser = argument_parser(__doc__)
    names = [work.name for work in WORKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--plain", action="store_true", help="merge and pack by torch's own")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    asked = parser.parse_args()
    turns.WORTHY_PAIRS["cpu"] = turns.WORTHY_PAIRS["cuda"]
    torch.set_num_threads(1)
    print(f"peak_bytes.py {' '.join(sys.argv[1:])}\non {machine('torch')}")
    unit = ROW_BYTES * asked.tokens
    print(f"{asked.tokens:,} tokens of the rank, {HEADS} heads over {KV_HEADS}, of {HEAD_DIM}")
    print(f"the rank with most, in units of {unit:,} bytes\n")
    print(table_head(COLUMNS))
    found = {}
    for work in WORKS:
        if work.name not in asked.only:
            continue
        if asked.plain:
            found[work.name] = most_of_ranks(work, asked.tokens)
        else:
            with free_fused():
                found[work.name] = most_of_ranks(work, asked.tokens)
        units = [f"{found[work.name][figure] / unit:.2f}" for figure in FIGURES]
        print(table_row([work.name, *units]), flush=True)
    write_record(asked.json, found)


if __name__ == "__main__":
    main()
