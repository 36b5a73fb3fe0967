"""Attention over whole sequences, all of whose rows are at hand: varlen kernel calls without
transfers.

    sequences    one causal call, or a few of about equal work where the rank has other zones:
                 every wait for a transfer has something to hide under
    units        a few calls of shared prefixes, merged (`unit_calls.py`)
    blocks       one more call for tokens that see each other both ways, such as an image's

A *block* in rows 4 to 7:

                      causal           and of the block
              4       .. 3 4           7 6 5
              5       .. 3 4 5         7 6
              6       .. 3 4 5 6       7
              7       .. 3 4 5 6 7

1. The attention of all sequences, their blocks included, is causal as ever: with its windows,
   units and runs.
2. One more call takes the blocks alone, and each from its last token to its first. In this order
   the later keys come first, so it is causal, too: queries 6 5 4 over keys 7 6 5.
3. The results of calls about the same query are merged by their log-sum-exps. So every pair is
   computed once, without a mask. The last query of a block is not concerned.

Copies are made of the blocks' rows alone. In the backward every call reads the merged result, and
the gradients of all calls are added.
"""

from collections.abc import Sequence

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import INPUT, RowsSpec, Value
from hf_flexseq.program.sums import RunningResult, Total
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.unit_calls import RowsCall, calls_of_units
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import LayerRows, Sinks


class CallsZone:
    """Attention by kernel calls over this rank's rows; a rank without work has no calls.

    Its `forward` saves q, k, v, out and the log-sum-exp [heads, tokens] as they are in these rows:
    the replay of a checkpointed layer has them, too.
    """

    __slots__ = ("_merges", "calls", "rows")

    def __init__(self, rows: slice, calls: Sequence[RowsCall] = ()) -> None:
        """rows: of the sequences, among the rank's rows. calls: the first ones read every row
        once, as queries, in order."""
        self.rows = rows
        self.calls = tuple(calls)
        queries = sum(one.queries.tokens for one in self.calls)
        self._merges = not self.calls or queries > rows.stop - rows.start

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [heads, tokens]."""
        running = RunningResult(b, q)
        outs = []
        lses = []
        read = 0  # queries so far
        for number, one in enumerate(self.calls):
            # The first call begins at 0, under the first transfers of other zones.
            yield number / len(self.calls)
            keys, values = b.take_all((k, v), one.keys)
            out, lse = b.attend(b.take(q, one.queries), keys, values, one.call)
            if self._merges:
                running.take(one.queries, (out, b.turned(lse)), first=read < q.rows)
                read += one.queries.tokens
            else:
                outs.append(out)  # [tokens of the call, heads, head_dim]
                lses.append(lse)  # [heads, tokens of the call]
        whole_out = running.out if self._merges else b.join(outs)
        whole_lse = b.turned(running.lse) if self._merges else b.join(lses, dim=1)
        if sinks is not None:
            sinks.apply(b, whole_out, whole_lse)
        whole_out = b.cast(whole_out, INPUT)
        return whole_out, (q, k, v, whole_out, whole_lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]; sums of
        several calls in float32 (float64 for float64)."""
        q, k, v, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        joins = not self._merges and all(one.keys == one.queries for one in self.calls)
        parts: list[Values] = []
        dq, dk, dv = (Total(b, x) for x in (q, k, v))
        for number, one in enumerate(self.calls):
            # The last call begins at 1, under the last gradients that other zones send back.
            yield (number + 1) / len(self.calls)
            own_dout, own_q, own_out = b.take_all((dout, q, out), one.queries)
            keys, values = b.take_all((k, v), one.keys)
            own_lse = b.columns(lse, one.queries)
            grads = b.gradients(own_dout, own_q, keys, values, own_out, own_lse, one.call)
            if joins:
                parts.append(grads)
                continue
            dq.add(one.queries, grads[:1])
            for total, grad in zip((dk, dv), grads[1:], strict=True):
                total.add(one.keys, (grad,), repeats=one.repeats_keys)
        if joins:
            return tuple(b.join(of_one) for of_one in zip(*parts, strict=True))
        return dq.value(), dk.value(), dv.value()

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return the same gradients as `backward`."""
        saved = (rows.q, rows.k, rows.v, rows.out, rows.lse)
        return self.backward(b, rows.dout, saved, sinks)


def whole_zone(
    rows: slice,
    lengths: Sequence[int],
    tables: Tables,
    *,
    reach: Reach = FULL,
    trees: Sequence[UnitLayout | None] = (),
    blocks: Sequence[Range] = (),
    most_calls: int = 1,
) -> CallsZone:
    """Return attention over sequences that follow one another.

    rows: of the sequences, among the rank's rows. lengths: tokens of each. reach: which keys a
    query reads. trees: of each sequence, None for a plain one; none if all are plain. blocks:
    rows, in ascending order, of two and more each, that see each other both ways. most_calls: into
    which plain sequences are split. Raises ValueError for blocks in a layer that reads chunks.
    """
    if trees:
        calls = calls_of_units(lengths, trees, reach, tables)
    else:
        calls = _calls_of_sequences(lengths, most_calls, reach, tables)
    if blocks:
        if reach.chunk is not None:
            raise ValueError(
                f"a layer reads chunks of {reach.chunk} tokens: its blocks cannot see both ways"
            )
        calls.append(_call_of_blocks(blocks, tables))
    return CallsZone(rows, calls)


def _call_of_blocks(blocks: Sequence[Range], tables: Tables) -> RowsCall:
    """Return the call in which the queries of each block read the later keys of the block."""
    lengths = [stop - start - 1 for start, stop in blocks]
    return RowsCall(
        tables.backwards([(start, stop - 1) for start, stop in blocks]),
        tables.backwards([(start + 1, stop) for start, stop in blocks]),
        tables.call(lengths, lengths, causal=True),
    )


def _calls_of_sequences(
    lengths: Sequence[int], most_calls: int, reach: Reach, tables: Tables
) -> list[RowsCall]:
    """Cut the list of sequences into at most `most_calls` calls of about equal work.

    All pairs of tokens are divided into `most_calls` equal parts. A sequence joins the call of the
    part in which the first of its pairs lies, so that none is split.
    """
    # 1. the sequences of each call, in their order
    all_pairs = sum(reach.pairs(length) for length in lengths)
    pairs_before = 0
    last_part = -1
    by_call: list[list[int]] = []
    for length in lengths:
        part = pairs_before * most_calls // all_pairs
        if part != last_part:
            by_call.append([])
            last_part = part
        by_call[-1].append(length)
        pairs_before += reach.pairs(length)

    # 2. find the rows of every call
    calls = []
    start = 0
    for own in by_call:
        rows = RowsSpec(sum(own), start=start)
        spans = [span.queries for length in own for span in reach.spans(0, length)]
        call = tables.call(spans, spans, causal=True, window=reach.window)
        calls.append(RowsCall(rows, rows, call))
        start += rows.tokens
    return calls
