"""Ulysses: exchange a share of every sequence for a share of the heads, so that one kernel sees
whole sequences.

    [my tokens, all heads]  --seq_to_head-->  [all tokens, my heads]  --kernel-->  ...
    --head_to_seq-->  [my tokens, all heads]

DeepSpeed-Ulysses (arXiv 2309.14509), here for token shares of any size and head counts that do not
divide: rank i of d works on query heads [i H/d, (i+1) H/d), none at all when d > H, and is sent
just the KV heads that those read, so a KV head may go to several ranks (`heads.py`).

Each way there is one exchange (`head_exchange.py`), forward and backward; q, k and v travel
together. What is kept for the backward is in the head layout. In checkpointed layers (`remat.py`)
only the log-sum-exp is, and q, k, v and out travel again in the backward, in one exchange with
dout: the replay of the layer has q, k and v in the token layout only. What computes between the
exchanges is a kernel call, or in `hybrid.py` a ring.

Rejected: padding the shares or the heads to equal size, which spends memory and bandwidth on
nothing; and exchanging a rank's heads in pieces, of which one computes while another travels: a
piece fills a kernel worse than all heads do, by more than its transfer takes inside a node.

The slow reference is `tests/attention/dense.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.shard import Zone, contiguous_parts
from hf_flexseq.program.both_ways import seeing_both_ways
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.head_exchange import ArrivingHeads, HeadExchange
from hf_flexseq.program.heads import HeadShare, head_shares, repeated, summed
from hf_flexseq.program.instructions import INPUT, WIDE, Value
from hf_flexseq.program.local import LocalZone
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import END, ZoneSteps, within
from hf_flexseq.program.whole_trees import whole_tree_zone
from hf_flexseq.program.zones import Attention, LayerRows, Sinks, ZoneAttention

# The backward between the exchanges: from the tensors that have arrived, dout last, each [all
# tokens, my heads, head_dim], to dq, dk and dv of what the inner attention read.
InnerBackward = Callable[[Values], ZoneSteps[Values]]


class Span(NamedTuple):
    """A part of a zone's time."""

    start: float
    stop: float


HALFWAY = Span(0.5, 0.5)  # the exchanges there have the first half to travel, those back the other


def ulysses_zone(
    zone: Zone,
    channel: Channel,
    tables: Tables,
    reach: Reach = FULL,
    blocks: Sequence[Range] = (),
) -> "UlyssesZone":
    """Make the attention of an Ulysses group, around one kernel call.

    reach: which keys a query reads. blocks: rows of all sequences of the group whose queries read
    both ways.
    """
    all_tokens = sum(zone.lengths)
    tokens = [len(part) for part in contiguous_parts(all_tokens, zone.group.degree)]
    rows = slice(0, all_tokens)
    inner: ZoneAttention = LocalZone(rows, zone.lengths, tables, reach=reach)
    trees = zone.group.trees
    if trees:
        inner = whole_tree_zone(rows, zone.lengths, trees, channel, tables, reach)
    inner = seeing_both_ways(inner, blocks, reach, tables)
    return UlyssesZone(
        rows=slice(zone.start, zone.stop),
        exchange=HeadExchange(channel, zone.group.ranks, zone.index, tokens),
        inner=inner,
        wide=bool(trees),
    )


class UlyssesZone:
    """This rank's part in an Ulysses group."""

    __slots__ = ("exchange", "inner", "rows", "span", "wide")

    def __init__(
        self,
        rows: slice,
        exchange: HeadExchange,
        inner: Attention,
        *,
        span: Span = HALFWAY,
        wide: bool = False,
    ) -> None:
        """rows: where this rank's tokens stand among its rows.

        exchange: between the ranks of the group. inner: what computes, on all tokens of the group
        and some heads. span: at which times of the zone it does; the exchanges have the time
        before and after it to travel. wide: whether `inner` sums gradients in WIDE whatever the
        kernel does.
        """
        self.rows = rows
        self.exchange = exchange
        self.inner = inner
        self.span = span
        self.wide = wide

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [my tokens, heads, head_dim], and save what `inner` does, in the head layout.

        q: [my tokens, heads, head_dim]. k, v: [my tokens, kv_heads, head_dim].
        """
        share, queries, keys = self._heads(b)
        # [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim]
        arriving = self.exchange.seq_to_head(b, (q, k, v), (queries, keys, keys))
        yield self.span.start
        q_heads, *kv_heads = arriving.wait()
        if share.queries:
            k_heads, v_heads = (repeated(b, x, share) for x in kv_heads)
            own_sinks = _sinks_of(b, sinks, share)
            inner_steps = self.inner.forward(b, q_heads, k_heads, v_heads, own_sinks)
            out_heads, saved = yield from within(*self.span, inner_steps)
        else:
            out_heads = q_heads  # no head here: [all tokens, 0, head_dim]
            saved = (b.empty((0,), WIDE),)  # and so no log-sum-exp
        yield self.span.stop
        # [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim]
        returning = self.exchange.head_to_seq(b, (out_heads,), (queries,))
        yield END
        (out,) = returning.wait()
        return out, saved

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [my tokens, heads, head_dim], dk and dv [my tokens, kv_heads, head_dim]."""
        share, queries, _ = self._heads(b)
        # [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim]
        arriving = self.exchange.seq_to_head(b, (dout,), (queries,))

        def inner_backward(arrived: Values) -> ZoneSteps[Values]:
            (dout_heads,) = arrived  # [all tokens, my heads, head_dim]
            return self.inner.backward(b, dout_heads, saved, _sinks_of(b, sinks, share))

        return (yield from self._gradients(b, arriving, inner_backward))

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return what `backward` does, where nothing is kept in the head layout but the
        log-sum-exp: all that is missing travels together with dout.

        rows: of my tokens, all heads; lse as `inner` saved it.
        """
        share, queries, keys = self._heads(b)
        # [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim]
        read = (queries, keys, keys, queries, queries)
        arriving = self.exchange.seq_to_head(b, rows[:-1], read)

        def inner_backward(arrived: Values) -> ZoneSteps[Values]:
            # each [all tokens, my heads, head_dim]
            q_heads, k_heads, v_heads, out_heads, dout_heads = arrived
            own_rows = LayerRows(
                q=q_heads,
                k=repeated(b, k_heads, share),
                v=repeated(b, v_heads, share),
                out=out_heads,
                dout=dout_heads,
                lse=rows.lse,
            )
            return self.inner.backward_of_rows(b, own_rows, _sinks_of(b, sinks, share))

        return (yield from self._gradients(b, arriving, inner_backward))

    def _gradients(
        self, b: Builder, arriving: ArrivingHeads, inner_backward: InnerBackward
    ) -> ZoneSteps[Values]:
        """Return dq [my tokens, heads, head_dim], dk and dv [my tokens, kv_heads, head_dim].

        arriving: what `inner_backward` reads, dout last.
        """
        share, queries, keys = self._heads(b)
        yield self.span.start
        arrived = arriving.wait()
        if share.queries:
            dq_heads, *dkv = yield from within(*self.span, inner_backward(arrived))
            dk_heads, dv_heads = (summed(b, dx, share) for dx in dkv)
        else:
            dq_heads = dk_heads = dv_heads = arrived[-1]  # no head: [all tokens, 0, head_dim]
        yield self.span.stop
        # Where ranks share a KV head its gradients are parts of a sum, and not rounded yet.
        are_shared = sum(map(len, keys)) > b.shape.kv_heads
        wire_dtype = WIDE if are_shared and (self.wide or b.wide) else INPUT
        grads = tuple(b.cast(x, wire_dtype) for x in (dq_heads, dk_heads, dv_heads))
        # [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim]
        returning = self.exchange.head_to_seq(b, grads, (queries, keys, keys))
        yield END
        return returning.wait()

    def _heads(self, b: Builder) -> tuple[HeadShare, tuple[range, ...], tuple[range, ...]]:
        """Return this rank's share of the layer's heads, and by rank the query heads and the KV
        heads."""
        shares = head_shares(b.shape.query_heads, b.shape.kv_heads, len(self.exchange.ranks))
        queries = tuple(share.queries for share in shares)
        keys = tuple(share.keys for share in shares)
        return shares[self.exchange.index], queries, keys


def _sinks_of(b: Builder, sinks: Sinks | None, share: HeadShare) -> Sinks | None:
    """Return the sinks of a share of the heads."""
    if sinks is None:
        return None
    return sinks.of_heads(b, share.queries.start, share.queries.stop)
