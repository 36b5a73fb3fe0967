"""Recurrent layers on one device, in 16 bits: scans by the kernels that are chosen there, and
convolutions.

    recurrent    their errors, with ranks that are threads
    scans        milliseconds of a scan over several ranks beside one

The truth is the same layer in float32, on one rank, by torch's operations. One rank in 16 bits has
an error against it, too; several ranks may have 1.3 times that. States travel in float32, so what
ranks add is the rounding of what a kernel is given. Kernels take the first of their configurations
that runs (`tuning.py`).

Seconds are those of a whole document on one rank, forward and backward, and of the two summaries
that a rank of several makes: the end state with the transition in the forward, and the gradient of
the state before it in the backward. Kernels are tuned first, except in a quick run.
"""

from typing import Any
from unittest import mock

import torch

from gpu_checks.kernels import median_s
from gpu_checks.report import Section, Setting, table, verdict
from gpu_checks.tuning import compiled_side_by_side, first_configurations
from hf_flexseq.attention import SequenceContext, recurrent
from hf_flexseq.attention.recurrent.scan import run_scan
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.scans import Scan, Tensors
from hf_flexseq.kernels.scans.choose import GATED_DELTA, KIMI_DELTA, MAMBA2, choose_scan
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.kernels.reference import Reference
from tests.threads import ThreadHub, ThreadTransport

RANKS = 4
TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
STRATEGIES = ("ulysses", "zigzag", "balanced")
MOST_OF_ONE_RANK = 1.3
HEADS, SIZE, WIDTH = 8, 128, 4
LENGTHS = (4099, 1, 513, 2048)
SHORT_LENGTHS = (131, 1, 70)
LONG, SHORT_LONG = 16384, 256
KINDS = ("convolution", GATED_DELTA, KIMI_DELTA, MAMBA2)
HUB_S = 600.0


def recurrent_section(setting: Setting) -> Section:
    """Hold the error of several ranks against that of one, kind by kind."""
    rows = []
    holds = True
    for kind in KINDS:
        true = _on_ranks(setting, kind, "local", torch.float32)
        with first_configurations():
            alone = _error(_on_ranks(setting, kind, "local", torch.bfloat16), true)
            errors = []
            for strategy in STRATEGIES:
                errors.append(_error(_on_ranks(setting, kind, strategy, torch.bfloat16), true))
        is_close = max(errors) <= MOST_OF_ONE_RANK * alone
        holds = holds and is_close
        ratios = [f"{error / alone:.2f}" for error in errors]
        rows.append([kind, _chosen(setting, kind), f"{alone:.1e}", *ratios, verdict(is_close)])
    columns = ["layer", "scan", "error of one rank", *STRATEGIES, ""]
    return Section(
        title=f"Recurrent layers on {RANKS} ranks as threads: errors over that of one rank (at "
        f"most {MOST_OF_ONE_RANK})",
        lines=table(columns, rows),
        holds=holds,
    )


def scans_section(setting: Setting) -> Section:
    """Time a scan of a long document, and the summaries that ranks who share it make."""
    rows = []
    with first_configurations() if setting.quick else compiled_side_by_side():
        for kind in KINDS[1:]:
            seconds = [f"{1e3 * one:.1f}" for one in _seconds(setting, kind)]
            rows.append([kind, _chosen(setting, kind), *seconds])
    tokens = SHORT_LONG if setting.rehearse else LONG
    how = "not tuned" if setting.quick else "tuned"
    return Section(
        title=f"Scans: ms of a document of {tokens:,} tokens, forward and backward, and of its "
        f"summaries; kernels {how}",
        lines=table(["layer", "scan", "ms", "summary", "backward"], rows),
    )


def _chosen(setting: Setting, kind: str) -> str:
    """Return the name of the scan that is chosen for a layer; "-" for a convolution."""
    if kind == "convolution":
        return "-"
    return choose_scan(kind, setting.device, torch.bfloat16, SIZE)


def _on_ranks(setting: Setting, kind: str, strategy: str, dtype: torch.dtype) -> Tensors:
    """Run a layer over all sequences, and return its output and the gradient of its input for all
    tokens, in float32 in the order of the sequences."""
    lengths = SHORT_LENGTHS if setting.rehearse else LENGTHS
    ranks = 1 if strategy == "local" else RANKS
    topology = Topology(nodes=1, ranks_per_node=1) if ranks == 1 else TOPOLOGY
    group = Group(
        ranks=tuple(range(ranks)), sequences=tuple(range(len(lengths))), strategy=strategy
    )
    x, dout = _drawn(setting, sum(lengths)), _drawn(setting, sum(lengths))
    out, dx = torch.zeros_like(x), torch.zeros_like(x)

    def run(transport: ThreadTransport) -> None:
        shard = make_shard(MicroBatch(groups=(group,)), lengths, transport.rank)
        communicator = Communicator(topology, transport=transport)
        seq_ctx = SequenceContext(shard, communicator, Reference(), setting.device)
        parts = [torch.arange(0)]
        for part in shard.slices:
            start = sum(lengths[: part.sequence])
            parts.append(torch.arange(start + part.start, start + part.stop))
        rows = torch.cat(parts).to(setting.device)
        leaf = x[rows].to(dtype).requires_grad_()
        found = layer(kind, leaf, seq_ctx)
        found.backward(dout[rows].to(dtype))
        out[rows] = found.detach().float()
        dx[rows] = leaf.grad.float()

    ThreadHub(ranks).run(run, seconds=HUB_S)
    return out, dx


def layer(kind: str, x: torch.Tensor, seq_ctx: SequenceContext) -> torch.Tensor:
    """Return what a layer makes of x [tokens, HEADS x SIZE], in the same shape."""
    if kind == "convolution":
        weight = torch.linspace(-1, 1, x.shape[1] * WIDTH, device=x.device).view(-1, WIDTH)
        return recurrent.causal_convolution(x, weight.to(x.dtype), None, seq_ctx)
    heads = x.view(-1, HEADS, SIZE)
    first = heads[..., 0].float()
    if kind == MAMBA2:
        A = -torch.linspace(0.05, 1, HEADS, device=x.device)
        step = torch.sigmoid(first)  # [tokens, HEADS]
        B, C = heads[:, :1], heads[:, 1:2]
        return recurrent.mamba2_scan(heads, step, A, B, C, seq_ctx).flatten(1)
    g = -0.05 * torch.sigmoid(heads.float() if kind == KIMI_DELTA else first)
    options: dict[str, Any] = {"l2norm": True}
    rule = recurrent.kimi_delta_rule if kind == KIMI_DELTA else recurrent.gated_delta_rule
    keys = heads.flip(1)
    out = rule(heads, keys, heads, g, torch.sigmoid(first).to(x.dtype), seq_ctx, **options)
    return out.flatten(1)


def _seconds(setting: Setting, kind: str) -> tuple[float, float, float]:
    """Return the seconds of a layer over a long document, forward and backward, and of its
    summaries in the forward and in the backward."""
    tokens = SHORT_LONG if setting.rehearse else LONG
    shard = make_shard(
        MicroBatch(groups=(Group(ranks=(0,), sequences=(0,), strategy="local"),)), [tokens], 0
    )
    x = _drawn(setting, tokens).to(torch.bfloat16).requires_grad_()
    seen: list[tuple[Scan, Tensors]] = []
    taken: list[float] = []

    def run(transport: ThreadTransport) -> None:
        topology = Topology(nodes=1, ranks_per_node=1)
        communicator = Communicator(topology, transport=transport)
        seq_ctx = SequenceContext(shard, communicator, Reference(), setting.device)

        def note(
            scan: Scan, inputs: Tensors, context: SequenceContext, **options: Any
        ) -> torch.Tensor:
            seen.append((scan, tuple(y if y is None else y.detach() for y in inputs)))
            return run_scan(scan, inputs, context, **options)

        with mock.patch.object(recurrent.layers, "run_scan", note):
            layer(kind, x, seq_ctx)
        scan, inputs = seen[0]

        def whole() -> None:
            layer(kind, x, seq_ctx).sum().backward()

        def summary() -> None:
            scan.summarise(inputs, (0,), (0,))

        taken.append(median_s(whole, setting.device))
        taken.append(median_s(summary, setting.device))
        out, _, saved = scan.forward(inputs, None)
        taken.append(
            median_s(lambda: scan.summarise_backward(out, inputs, saved, (0,)), setting.device)
        )

    ThreadHub(1).run(run, seconds=HUB_S)
    whole_s, summary_s, backward_s = taken
    return whole_s, summary_s, backward_s


def _drawn(setting: Setting, tokens: int) -> torch.Tensor:
    """Return numbers [tokens, HEADS x SIZE], rounded to bfloat16 in float32."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HEADS * SIZE, generator=generator)
    return x.to(torch.bfloat16).float().to(setting.device)


def _error(found: Tensors, true: Tensors) -> float:
    """Return the largest relative error of a tensor."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, true, strict=True))
