"""Attention over sequences that this rank holds whole: varlen kernel calls without transfers.

One call is best for a rank without other work. With other zones the sequences are split
into a few calls of about equal work: every wait for a transfer has something to hide under.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import Value
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import SavesRows, Sinks


class LocalRun(NamedTuple):
    """A run of whole sequences, one after the other in the rows, that one kernel call takes."""

    start: int
    """First row of the zone that they fill."""

    stop: int

    call: int
    """Number of their lengths."""


class LocalZone(SavesRows):
    """Attention over the sequences of a group that consists of this rank alone."""

    __slots__ = ("rows", "runs")

    def __init__(
        self,
        rows: slice,
        lengths: Sequence[int],
        tables: Tables,
        *,
        most_runs: int = 1,
        reach: Reach = FULL,
    ) -> None:
        """Split the sequences into at most `most_runs` kernel calls.

        rows: where the sequences stand in the rank's rows. lengths: tokens of each sequence.
        reach: which keys a query reads.
        """
        self.rows = rows
        self.runs = _local_runs(lengths, most_runs, tables, reach)

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [heads, tokens]."""
        outs = []
        lses = []
        for number, run in enumerate(self.runs):
            # The first run begins at 0, under the first transfers of other zones.
            yield number / len(self.runs)
            run_q, run_k, run_v = (b.part(x, run.start, run.stop) for x in (q, k, v))
            out, lse = b.attend(run_q, run_k, run_v, run.call)
            outs.append(out)  # [tokens of the run, heads, head_dim]
            lses.append(lse)  # [heads, tokens of the run]
        whole_out = b.join(outs)
        whole_lse = b.join(lses, dim=1)
        if sinks is not None:
            sinks.apply(b, whole_out, whole_lse)
        return whole_out, (q, k, v, whole_out, whole_lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, k, v, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        dqs = []
        dks = []
        dvs = []
        for number, run in enumerate(self.runs):
            # The last run begins at 1, under the last gradients that other zones send back.
            yield (number + 1) / len(self.runs)
            dq, dk, dv = b.gradients(
                b.part(dout, run.start, run.stop),
                b.part(q, run.start, run.stop),
                b.part(k, run.start, run.stop),
                b.part(v, run.start, run.stop),
                b.part(out, run.start, run.stop),
                b.columns(lse, run.start, run.stop),
                run.call,
            )
            dqs.append(dq)
            dks.append(dk)
            dvs.append(dv)
        return b.join(dqs), b.join(dks), b.join(dvs)


def _local_runs(
    lengths: Sequence[int], most_runs: int, tables: Tables, reach: Reach
) -> tuple[LocalRun, ...]:
    """Cut the list of sequences into at most `most_runs` runs of about equal work.

    All pairs of tokens are divided into `most_runs` equal parts. A sequence joins the run of the
    part in which the first of its pairs lies, so that none is split.
    """
    # 1. the sequences of each run, in their order
    all_pairs = sum(reach.pairs(length) for length in lengths)
    pairs_before = 0
    last_part = -1
    by_run: list[list[int]] = []
    for length in lengths:
        part = pairs_before * most_runs // all_pairs
        if part != last_part:
            by_run.append([])
            last_part = part
        by_run[-1].append(length)
        pairs_before += reach.pairs(length)

    # 2. find the rows of every run
    runs = []
    start = 0
    for run_lengths in by_run:
        stop = start + sum(run_lengths)
        spans = [span.queries for length in run_lengths for span in reach.spans(0, length)]
        call = tables.call(spans, spans, causal=True, window=reach.window)
        runs.append(LocalRun(start, stop, call))
        start = stop
    return tuple(runs)
