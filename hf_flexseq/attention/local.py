"""Attention over sequences that this rank holds whole: varlen kernel calls without transfers.

One call is best where the rank has nothing else to do. Beside other zones the sequences are dealt
to a few calls of about equal work, so that every wait for a transfer has something to hide under.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.types import Saved, Tensors, joined
from hf_flexseq.attention.weave import ZoneSteps
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments


class LocalRun(NamedTuple):
    """A run of whole sequences, one after the other in the rows, that one kernel call takes."""

    rows: slice  # the rows of the zone that they fill
    segments: Segments  # their lengths


class LocalZone:
    """Attention over the sequences of a group that consists of this rank alone."""

    __slots__ = ("kernel", "rows", "runs")

    def __init__(
        self,
        rows: slice,
        lengths: Sequence[int],
        kernel: Kernel,
        device: torch.device,
        *,
        most_runs: int = 1,
    ) -> None:
        """Deal the sequences to at most `most_runs` kernel calls.

        rows: where the sequences stand in the rank's rows. lengths: tokens of each sequence.
        """
        self.rows = rows
        self.kernel = kernel
        self.runs = _local_runs(lengths, most_runs, device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [heads, tokens].

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        outs = []
        lses = []
        for number, run in enumerate(self.runs):
            # The first run begins at 0, under the first transfers of other zones.
            yield number / len(self.runs)
            out, lse = self.kernel.forward(
                q[run.rows], k[run.rows], v[run.rows], run.segments, scale=scale
            )
            outs.append(out)  # [tokens of the run, heads, head_dim]
            lses.append(lse)  # [heads, tokens of the run]
        whole_out = joined(outs, dim=0)
        return whole_out, Saved((q, k, v, whole_out, joined(lses, dim=1)))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, k, v, out, lse = saved.tensors
        dqs = []
        dks = []
        dvs = []
        for number, run in enumerate(self.runs):
            # The last run begins at 1, under the last gradients that other zones send back.
            yield (number + 1) / len(self.runs)
            dq, dk, dv = self.kernel.backward(
                dout[run.rows],
                q[run.rows],
                k[run.rows],
                v[run.rows],
                out[run.rows],
                lse[:, run.rows],
                run.segments,
                scale=scale,
            )
            dqs.append(dq)
            dks.append(dk)
            dvs.append(dv)
        return joined(dqs, dim=0), joined(dks, dim=0), joined(dvs, dim=0)

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return what `backward` does; these are the tensors that `forward` saves.

        q, out, dout: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim]. lse: [heads,
        tokens].
        """
        return self.backward(dout, Saved((q, k, v, out, lse)), scale)


def _local_runs(
    lengths: Sequence[int], most_runs: int, device: torch.device
) -> tuple[LocalRun, ...]:
    """Cut the list of sequences into at most `most_runs` runs of about equal work.

    All pairs of tokens are divided into `most_runs` equal parts. A sequence joins the run of the
    part in which the first of its pairs lies, so that none is split.
    """
    # 1. deal the sequences, in their order
    all_pairs = sum(length * length for length in lengths)
    pairs_before = 0
    last_part = -1
    dealt: list[list[int]] = []
    for length in lengths:
        part = pairs_before * most_runs // all_pairs
        if part != last_part:
            dealt.append([])
            last_part = part
        dealt[-1].append(length)
        pairs_before += length * length

    # 2. find the rows of every run
    runs = []
    start = 0
    for run_lengths in dealt:
        stop = start + sum(run_lengths)
        segments = Segments(run_lengths, run_lengths, causal=True, device=device)
        runs.append(LocalRun(slice(start, stop), segments))
        start = stop
    return tuple(runs)
