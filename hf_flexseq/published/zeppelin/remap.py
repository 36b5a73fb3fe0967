"""Remapping: tokens are spread evenly over all ranks outside of attention (arXiv 2509.21841, the
remapping layer).

Norms, MLPs and the head take as long as a rank has tokens, attention as long as it has work. A
remapped micro-batch keeps its groups for attention and spreads the tokens evenly for everything
else, if the cost model says that this is faster than moving them twice a layer (`remapped_ns`).
`moves.py` says which tokens move where. A rank with a surplus in attention gives its last rows
away outside of it; one with a deficit has the rows that it is given after its own.

`RemapPass` wraps a finished program: before it queries, keys and values come from the even layout
to the layout of attention, after it the output goes back. All tensors of one trip travel in one
message per pair of ranks.

Not available for recurrent layers, whose rows must keep the layout of attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, groups_ns, lockstep_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import Shard, Slice, make_shard
from hf_flexseq.program.builder import Builder, Rewriter, Values
from hf_flexseq.program.compile import ROW_INPUTS, ROW_OUTPUTS
from hf_flexseq.program.exchange import Exchange, Label, post
from hf_flexseq.program.instructions import LayerShape, Program, RowShape, Value
from hf_flexseq.program.tags import PASS_TAGS
from hf_flexseq.published.zeppelin.moves import moved_tokens, transport

PeerRows = tuple[tuple[int, int], ...]  # (peer, rows), in the order of the rows


# ---- the layout


@dataclass(frozen=True, kw_only=True, slots=True)
class RemappedShard(Shard):
    """The tokens of one rank, which holds others outside of attention than in it."""

    held: tuple[Slice, ...]
    """Slices outside of attention, in the order of the row."""
    given: PeerRows
    """(peer, tokens) of the last rows of the zones, in order, which peers hold."""
    got: PeerRows
    """(peer, tokens) of rows of peers, in order, which follow the zones' own rows."""

    @property
    def tokens(self) -> int:
        """Number of tokens outside of attention."""
        return sum(part.tokens for part in self.held)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices outside of attention, in the order of the row."""
        return self.held


def remapped_shards(
    micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> list[Shard]:
    """Return each rank's shard of a remapped micro-batch, [world_size]."""
    shards = [make_shard(micro_batch, lengths, rank) for rank in range(topology.world_size)]
    columns = transport([shard.tokens for shard in shards], topology)
    moves = list(zip(*(column.tolist() for column in columns), strict=True))
    rows = [list(shard.slices) for shard in shards]  # of each rank, what it keeps in the end
    given: list[list[tuple[int, list[Slice]]]] = [[] for _ in shards]  # (target, slices)
    got: list[list[tuple[int, int]]] = [[] for _ in shards]  # (source, tokens)
    for source, target, tokens in reversed(moves):  # the last rows go to the last target
        rows[source], moved = _cut(rows[source], tokens)
        given[source].insert(0, (target, moved))
    for source, target, tokens in moves:
        got[target].append((source, tokens))
    remapped: list[Shard] = []
    for shard in shards:
        held = list(rows[shard.rank])
        for source, _ in got[shard.rank]:
            held += dict(given[source])[shard.rank]
        remapped.append(
            RemappedShard(
                rank=shard.rank,
                zones=shard.zones,
                held=tuple(held),
                given=tuple(
                    (target, sum(part.tokens for part in moved))
                    for target, moved in given[shard.rank]
                ),
                got=tuple(got[shard.rank]),
            )
        )
    return remapped


def _cut(slices: list[Slice], tokens: int) -> tuple[list[Slice], list[Slice]]:
    """Return the slices without the last `tokens`, and those."""
    kept = list(slices)
    last: list[Slice] = []
    while tokens:
        part = kept.pop()
        taken = min(tokens, part.tokens)
        middle = part.stop - taken
        last.insert(0, Slice(sequence=part.sequence, start=middle, stop=part.stop))
        if taken < part.tokens:
            kept.append(Slice(sequence=part.sequence, start=part.start, stop=middle))
        tokens -= taken
    return kept, last


# ---- the decision


def remapped_ns(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> int:
    """Return the nanoseconds of `micro_batch` if it is remapped, without the constant: attention,
    linear layers and moves follow each other.

    Moving a token there and back is as many bytes as an all-to-all moves of it.
    """
    # 1. attention stays as it is
    attention = np.zeros(topology.world_size, dtype=np.int64)
    work_ns = groups_ns(cost, micro_batch.groups, lengths, topology).tolist()
    for group, nanoseconds in zip(micro_batch.groups, work_ns, strict=True):
        linear_s = cost.linear_s * group.tokens(lengths) / group.degree
        attention[group.start : group.stop] += nanoseconds - round(1e9 * linear_s)
    # 2. linear layers run on even shares
    tokens = micro_batch.tokens_per_rank(lengths, topology.world_size)
    share = -(-sum(tokens) // topology.world_size)
    # 3. the rank that moves most sets the pace, first inside nodes, then between them
    inside, between = moved_tokens(transport(tokens, topology), topology)
    one_byte_s = inside / cost.bandwidth(topology.ranks_per_node, False)  # of every token moved
    if between:
        one_byte_s += between / cost.bandwidth(topology.world_size, True)
    linear = round(cost.linear_s * share * 1e9)
    moves = round(cost.all_to_all_bytes * one_byte_s * 1e9)
    return max(0, int(attention.max())) + linear + moves


def is_worth_it(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> bool:
    """Return True if a micro-batch is faster remapped."""
    tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
    if tokens < topology.world_size or cost.summary_bytes:  # some rank would have no token at all
        return False
    even_ns = remapped_ns(cost, micro_batch, lengths, topology)
    (as_planned_ns,) = lockstep_ns(cost, (micro_batch,), lengths, topology)
    return even_ns < as_planned_ns - cost.micro_batch_ns


# ---- the programs


class RemapPass:
    """Wraps the programs of a rank that gives rows away outside of attention, or gets some."""

    def __init__(self, shard: RemappedShard) -> None:
        self._shard = shard

    def __call__(self, program: Program, what: str, shape: LayerShape | RowShape) -> Program:
        """Return a program on the rows of the even layout."""
        if isinstance(shape, RowShape):
            raise NotImplementedError("recurrent layers in a remapped micro-batch")
        if not self._shard.given and not self._shard.got:
            return program
        b = Rewriter(program, shape, rank=self._shard.rank)
        # 1. to attention: each [tokens, heads, head_dim] -> [tokens in attention, heads, head_dim]
        old = program.inputs[: ROW_INPUTS[what]]
        new = [b.replace_input(index, self._shard.tokens) for index in range(len(old))]
        joined = self._move(b, new, to_peers=self._shard.got, from_peers=self._shard.given)
        start = 0
        for value in old:
            stop = start + value.shape[1]
            b.make(value, "heads", (joined,), start, stop)
            start = stop
        # 2. what the program does
        for one in program.instructions:
            b.copy(one)
        # 3. and back
        rows = program.outputs[: ROW_OUTPUTS[what]]
        joined = self._move(b, rows, to_peers=self._shard.given, from_peers=self._shard.got)
        outputs = b.split_heads(joined, [value.shape[1] for value in rows])
        return b.program((*outputs, *program.outputs[len(rows) :]), program.saved)

    def _move(
        self, b: Builder, values: Sequence[Value], *, to_peers: PeerRows, from_peers: PeerRows
    ) -> Value:
        """Send the last rows of every value to peers, and put the rows of other peers after the
        rest: [tokens before, heads, head_dim] each -> [tokens after, heads of all, head_dim]."""
        # 1. one value for all: [tokens before, heads of all, head_dim]
        x = b.join(values, dim=1)
        kept = x.rows - sum(rows for _, rows in to_peers)
        # 2. the exchange: [rows to peers, heads of all, head_dim] -> [rows from peers, ...]
        exchange = Exchange(b, PASS_TAGS, Label(None, _describe))
        start = kept
        for peer, rows in to_peers:
            exchange.send([b.part(x, start, start + rows)], peer)
            start += rows
        arriving: Values = ()
        for peer, rows in from_peers:
            arriving += exchange.recv([x], rows, peer)
        post(b, [exchange])
        exchange.wait()
        # 3. [tokens after, heads of all, head_dim]
        return b.join([b.part(x, 0, kept), *arriving])


def _describe(peer: int, sent: bool) -> str:
    return "tokens on their way between the groups and the even layout"
