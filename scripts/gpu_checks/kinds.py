"""Windows, chunks, sinks, blocks that see both ways, softcaps and values of another size: every
strategy on one device, with ranks that are threads, in the 16-bit arithmetic of the device's own
kernels.

The truth is the plain softmax in float32. A single kernel call, on one rank that has the whole
sequence, has an error against it, too; a strategy's may be 1.3 times that. Strategies merge and
sum in float32, so what they add is the rounding of what travels.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gpu_checks.report import Section, Setting, table, verdict
from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.blocks import SEE_BLOCKS
from hf_flexseq.plan.shard import Slice, make_shard
from tests.kernels.reference import Reference
from tests.threads import ThreadHub, ThreadTransport

RANKS = 4
TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
STRATEGIES = ("ulysses", "zigzag", "balanced", "hybrid")
MOST_OF_A_CALL = 1.3
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LENGTHS = (4099, 1, 513, 2048)
SHORT_LENGTHS = (67, 1, 20)
HUB_S = 600.0

Tensors = tuple[torch.Tensor, ...]  # out, dq, dk, dv and, with sinks, dsinks


class Kind(NamedTuple):
    """What a layer computes."""

    reach: Reach = FULL
    sinks: bool = False
    softcap: float | None = None
    value_dim: int = HEAD_DIM
    both_ways: bool = False

    def computes(self, strategy: str) -> bool:
        """Return True if this strategy computes such a layer."""
        return strategy in SEE_BLOCKS or not self.both_ways


KINDS = {
    "window 16": Kind(Reach(window=16)),
    "window 1,024": Kind(Reach(window=1024)),
    "window 128 with sinks": Kind(Reach(window=128), sinks=True),
    "chunk 512": Kind(Reach(chunk=512)),
    "sinks": Kind(sinks=True),
    "blocks": Kind(both_ways=True),
    "blocks, window 128": Kind(Reach(window=128), both_ways=True),
    "softcap": Kind(softcap=20.0),
    "values of 32 numbers": Kind(value_dim=32),
}


def kinds_section(setting: Setting) -> Section:
    """Hold the error of every strategy against that of a single kernel call, kind by kind."""
    rows = []
    holds = True
    for name, kind in KINDS.items():
        try:
            kernel = choose_kernel(
                setting.device,
                torch.bfloat16,
                HEAD_DIM,
                window=kind.reach.window is not None,
                softcap=kind.softcap is not None,
            )
        except ValueError as reason:
            rows.append([name, *["-"] * (len(STRATEGIES) + 1), str(reason)])
            continue
        true = _on_ranks(setting, kind, Reference(), "local", torch.float32)
        alone = _error(_on_ranks(setting, kind, kernel, "local", torch.bfloat16), true)
        ratios = []
        for strategy in filter(kind.computes, STRATEGIES):
            found = _on_ranks(setting, kind, kernel, strategy, torch.bfloat16)
            ratios.append(_error(found, true) / alone)
        is_close = max(ratios) <= MOST_OF_A_CALL
        holds = holds and is_close
        cells = [f"{ratio:.2f}" for ratio in ratios]
        cells += ["-"] * (len(STRATEGIES) - len(ratios))  # ulysses is the first of them
        rows.append([name, f"{alone:.1e}", *cells, verdict(is_close)])
    columns = ["layers", "error of a call", *STRATEGIES, ""]
    return Section(
        title=f"Kinds of layers on {RANKS} ranks as threads: errors over that of a kernel call "
        f"(at most {MOST_OF_A_CALL})",
        lines=tuple(table(columns, rows)),
        holds=holds,
    )


def _on_ranks(
    setting: Setting, kind: Kind, kernel: Kernel, strategy: str, dtype: torch.dtype
) -> Tensors:
    """Attend to all sequences, and return the tensors of all tokens in float32, rank after rank in
    the order of the sequences."""
    lengths = SHORT_LENGTHS if setting.rehearse else LENGTHS
    ranks = 1 if strategy == "local" else RANKS
    topology = Topology(nodes=1, ranks_per_node=1) if ranks == 1 else TOPOLOGY
    group = Group(
        ranks=tuple(range(ranks)), sequences=tuple(range(len(lengths))), strategy=strategy
    )
    micro_batch = MicroBatch(groups=(group,))
    blocks = {}  # half of each sequence, in two of them
    if kind.both_ways:
        for sequence, length in enumerate(lengths):
            if length > 3:
                fourth = length // 4
                blocks[sequence] = ((1, 1 + fourth), (length - fourth, length))
    given = _given(setting, kind, lengths)
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in given.outputs]

    def run(transport: ThreadTransport) -> torch.Tensor | None:
        shard = make_shard(micro_batch, lengths, transport.rank)
        communicator = Communicator(topology, transport=transport)
        seq_ctx = SequenceContext(shard, communicator, kernel, setting.device, blocks=blocks)
        rows = given.rows(shard.slices)
        leaves = [x[rows].to(dtype).requires_grad_() for x in (given.q, given.k, given.v)]
        sinks = given.sinks.clone().requires_grad_() if kind.sinks else None
        out = sequence_parallel_attention(
            *leaves,
            seq_ctx,
            softcap=kind.softcap,
            reach=kind.reach,
            sinks=sinks,
            both_ways=kind.both_ways,
        )
        out.backward(given.dout[rows].to(dtype))
        for total, x in zip(totals, (out.detach(), *(x.grad for x in leaves)), strict=False):
            total[rows] = x.float()
        return None if sinks is None else sinks.grad

    for of_sinks in ThreadHub(ranks).run(run, seconds=HUB_S):
        if of_sinks is not None:
            totals[-1] += of_sinks
    return tuple(totals)


class Given(NamedTuple):
    """Tensors of all tokens, sequence after sequence, rounded to bfloat16 in float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor
    starts: tuple[int, ...]
    outputs: Tensors
    """Tensors of the shapes of what is compared."""

    def rows(self, slices: Iterable[Slice]) -> torch.Tensor:
        """Return the rows of some slices: int64 [tokens]."""
        parts = [torch.arange(0)]
        for part in slices:
            start = self.starts[part.sequence]
            parts.append(torch.arange(start + part.start, start + part.stop))
        return torch.cat(parts).to(self.q.device)


def _given(setting: Setting, kind: Kind, lengths: tuple[int, ...]) -> Given:
    """Draw the tensors."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, size: int) -> torch.Tensor:
        x = torch.randn(sum(lengths), heads, size, generator=generator)
        return x.to(torch.bfloat16).float().to(setting.device)

    q = drawn(HEADS, HEAD_DIM)
    k = drawn(KV_HEADS, HEAD_DIM)
    v = drawn(KV_HEADS, kind.value_dim)
    dout = drawn(HEADS, kind.value_dim)
    sinks = torch.linspace(-1, 2, HEADS, device=setting.device)
    starts = tuple(sum(lengths[:index]) for index in range(len(lengths)))
    outputs: Tensors = (dout, q, k, v)
    if kind.sinks:
        outputs = (*outputs, sinks)
    return Given(q, k, v, dout, sinks, starts, outputs)


def _error(found: Tensors, true: Tensors) -> float:
    """Return the largest relative error of a tensor."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, true, strict=True))
