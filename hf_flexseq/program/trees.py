"""Attention over units of rows with shared prefixes, where this rank has all of their tokens.

    node 0 (P)   causal over itself              P a    causal, one sequence
    node 1 (a)   causal, and all of P     ->     b      causal, and a query of all of P
    node 2 (b)   causal, and all of P            c      causal, and a query of all of P
    node 3 (c)   causal, and all of P

1. A node and its first child stand together, and so do that child and its own first one: such a
   *chain* is one causal sequence. One kernel call takes all chains, and plain sequences, too.
2. One call for each depth: all descendants of a node that are not in its chain, which stand
   together behind it, are one sequence of queries over the node's keys, not causal. What lies
   between the nodes of a depth are queries without keys, and keys without queries.
3. The results of the calls about a query are merged by their log-sum-exps.

So rows of one prompt with any number of answers take two calls, without a mask or a copy. The
gradients of a node's keys are sums over all of its descendants, made in the kernel.

Layers with a window or a chunk read few keys of a path, and gather them (`halo_rows.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import RowsSpec, Value
from hf_flexseq.program.sums import RunningResult, Total
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import SavesRows, Sinks

Range = tuple[int, int]  # rows [start, stop)


class Record(NamedTuple):
    """A kernel call over consecutive rows."""

    queries: Range
    keys: Range
    call: int
    """Number of its lengths."""


class TreeZone(SavesRows):
    """Attention over the units, and the plain sequences, of a rank or of an exchange of heads."""

    __slots__ = ("records", "rows")

    def __init__(self, rows: slice, records: Sequence[Record]) -> None:
        """rows: where the sequences stand in the rank's rows. records: the first has all rows."""
        self.rows = rows
        self.records = tuple(records)

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [heads, tokens]."""
        running = RunningResult(b, q)
        for number, record in enumerate(self.records):
            yield number / len(self.records)
            start, stop = record.queries
            keys, values = (b.part(x, *record.keys) for x in (k, v))
            out, lse = b.attend(b.part(q, start, stop), keys, values, record.call)
            rows = RowsSpec(stop - start, start=start)
            running.take(rows, (out, b.turned(lse)), first=number == 0)
        whole_lse = b.turned(running.lse)  # [heads, tokens]
        if sinks is not None:
            sinks.apply(b, running.out, whole_lse)
        whole_out = b.cast(running.out, q.dtype)
        return whole_out, (q, k, v, whole_out, whole_lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim], in float32
        (float64 for float64)."""
        q, k, v, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        dq, dk, dv = (Total(b, x) for x in (q, k, v))
        for number, record in enumerate(self.records):
            yield (number + 1) / len(self.records)
            start, stop = record.queries
            own_dout, own_q, own_out = (b.part(x, start, stop) for x in (dout, q, out))
            keys, values = (b.part(x, *record.keys) for x in (k, v))
            own_lse = b.columns(lse, start, stop)
            grads = b.gradients(own_dout, own_q, keys, values, own_out, own_lse, record.call)
            dq.add(RowsSpec(stop - start, start=start), grads[:1])
            first, last = record.keys
            for total, grad in zip((dk, dv), grads[1:], strict=True):
                total.add(RowsSpec(last - first, start=first), (grad,))
        return dq.value(), dk.value(), dv.value()


def tree_records(
    lengths: Sequence[int], trees: Sequence[UnitLayout | None], tables: Tables
) -> list[Record]:
    """Return the kernel calls over sequences that stand one after the other.

    lengths: tokens of each. trees: for each the places of its nodes, None for a plain one.
    """
    chains: list[int] = []  # tokens
    by_depth: dict[int, list[tuple[Range, Range]]] = defaultdict(list)  # (queries, keys)
    offset = 0
    for length, tree in zip(lengths, trees, strict=True):
        if tree is None:
            chains.append(length)
            offset += length
            continue
        chain_stops = _chain_stops(tree)
        for node, (start, stop) in enumerate(zip(tree.starts, tree.stops, strict=True)):
            if node == 0 or tree.nodes[node].parent != node - 1:  # no first child
                chains.append(chain_stops[node] - start)
            queries = (chain_stops[node], tree.subtree_stops[node])
            if queries[0] < queries[1]:
                shifted = (offset + queries[0], offset + queries[1])
                by_depth[tree.depths[node]].append((shifted, (offset + start, offset + stop)))
        offset += length
    everything = (0, offset)
    records = [Record(everything, everything, tables.call(chains, chains, causal=True))]
    for _, pairs in sorted(by_depth.items()):
        records.append(_record_of(pairs, tables))
    return records


def _chain_stops(tree: UnitLayout) -> list[int]:
    """Return the token after the chain that each node is in."""
    stops = list(tree.stops)
    for node in range(len(stops) - 2, -1, -1):
        if tree.nodes[node + 1].parent == node:
            stops[node] = stops[node + 1]
    return stops


def _record_of(pairs: Sequence[tuple[Range, Range]], tables: Tables) -> Record:
    """Return the call in which the queries of each pair read its keys. pairs: in row order."""
    first_query, first_key = pairs[0][0][0], pairs[0][1][0]
    query, key = first_query, first_key
    q_lens: list[int] = []
    k_lens: list[int] = []
    for queries, keys in pairs:
        if queries[0] > query or keys[0] > key:
            # what lies between reads nothing and is read by nothing
            q_lens += [queries[0] - query, 0]
            k_lens += [0, keys[0] - key]
        q_lens.append(queries[1] - queries[0])
        k_lens.append(keys[1] - keys[0])
        query, key = queries[1], keys[1]
    call = tables.call(q_lens, k_lens, causal=False)
    return Record((first_query, query), (first_key, key), call)
