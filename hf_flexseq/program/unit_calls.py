"""Kernel calls over units of rows with shared prefixes, all of whose tokens are at hand.

    node 0 (P)   causal over itself              P a    causal, one sequence
    node 1 (a)   causal, and all of P     ->     b      causal, and a query of all of P
    node 2 (b)   causal, and all of P            c      causal, and a query of all of P
    node 3 (c)   causal, and all of P

1. A node and its first child are adjacent, and so are that child and its own first one: such a
   *chain* is one causal sequence. One kernel call takes all chains, and plain sequences, too.
2. One call for each depth: all descendants of a node that are not in its chain, which follow it
   together, are one sequence of queries over the node's keys, not causal. Rows between the nodes
   of a depth are queries without keys, and keys without queries.
3. The results of the calls about a query are merged by their log-sum-exps.

So rows of one prompt with any number of answers take two calls, without a mask or a copy. The
gradients of a node's keys are sums over all of its descendants, made in the kernel.

Layers with a window or a chunk read few keys of a path. One call takes every part of a node as a
separate sequence, over copies of these keys.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.segments import segments_of_cuts
from hf_flexseq.plan.shard import Cut
from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.segment_halo import keys_before, path_call
from hf_flexseq.program.tables import Tables


class RowsCall(NamedTuple):
    """A kernel call over rows."""

    queries: RowsSpec
    keys: RowsSpec
    call: int
    """Number of its lengths."""
    repeats_keys: bool = False
    """True if a key may be read by several sequences of the call."""


def calls_of_units(
    lengths: Sequence[int], trees: Sequence[UnitLayout | None], reach: Reach, tables: Tables
) -> list[RowsCall]:
    """Return the calls over sequences that stand one after the other; the first one reads every
    row as a query.

    lengths: tokens of each. trees: for each the places of its nodes, None for a plain one. reach:
    which keys a query reads.
    """
    if not reach.is_full:
        return [_call_of_paths(lengths, trees, reach, tables)]
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
    everything = RowsSpec(offset, start=0)
    calls = [RowsCall(everything, everything, tables.call(chains, chains, causal=True))]
    for _, pairs in sorted(by_depth.items()):
        calls.append(_call_of_depth(pairs, tables))
    return calls


def _call_of_paths(
    lengths: Sequence[int], trees: Sequence[UnitLayout | None], reach: Reach, tables: Tables
) -> RowsCall:
    """Return the call in which the parts of each node read the keys of their paths in reach."""
    whole = [Cut(bounds=(0, length), mirrored=False) for length in lengths]
    segments = segments_of_cuts(whole, trees, ranks=(0,), index=0)
    keys, call = path_call(segments, keys_before(segments, reach), reach, tables)
    return RowsCall(RowsSpec(segments.tokens, start=0), keys, call, repeats_keys=True)


def _chain_stops(tree: UnitLayout) -> list[int]:
    """Return the token after the chain that each node is in."""
    stops = list(tree.stops)
    for node in range(len(stops) - 2, -1, -1):
        if tree.nodes[node + 1].parent == node:
            stops[node] = stops[node + 1]
    return stops


def _call_of_depth(pairs: Sequence[tuple[Range, Range]], tables: Tables) -> RowsCall:
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
    queries_of_all = RowsSpec(query - first_query, start=first_query)
    return RowsCall(queries_of_all, RowsSpec(key - first_key, start=first_key), call)
