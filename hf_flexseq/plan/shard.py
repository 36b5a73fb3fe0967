"""What each rank holds of a micro-batch: integers only, so that layouts are tested without
processes.

A rank's row is the concatenation of its *zones*, one per group it works in, in the micro-batch's
order (widest first). Inside a zone the layout depends on the strategy:

* local: the group's sequences one after the other;
* ulysses: the group's sequences concatenated and cut into `degree` contiguous parts, so that a
  rank's part may begin and end in the middle of a sequence;
* zigzag, allgather, hybrid: every sequence is cut into 2 x degree chunks and the rank of index i
  holds chunks i and 2 x degree - 1 - i, which gives all ranks the same causal work (Megatron-LM's
  and ring-flash-attention's layout, here for any length);
* balanced: every sequence is cut into `degree` chunks, one per rank; the schedule evens out the
  work (LightSeq, arXiv 2310.03294).

Where sequences are cut into chunks, the ranks of the first chunks send and receive other amounts
than those of the last ones. So about half of a group's tokens lie the other way round, the last
rank holding the first chunk (`mirrored`), and the ranks that one sequence burdens another one
spares.

No layout pads: parts differ by at most one token, and no rank holds more than ceil(tokens /
degree) for a group.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.remap import Move, transport
from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Tokens [start, stop) of one sequence."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """A rank's part in one group: its slices in the order of the row, and rows [start, stop) that
    they fill.

    index: the rank's place in the group, 0..degree-1. lengths: tokens of each sequence of the
    group.
    """

    group: Group
    index: int
    lengths: tuple[int, ...]
    slices: tuple[Slice, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What `rank` holds of one micro-batch; no zone at all when it has nothing to do.

    moves: of a remapped micro-batch, of all ranks.
    """

    rank: int
    zones: tuple[Zone, ...]
    moves: tuple[Move, ...] = ()

    @property
    def given(self) -> tuple[tuple[int, int], ...]:
        """(peer, tokens): the last rows of the zones stand on those peers outside of attention, in
        this order."""
        return tuple((move.target, move.tokens) for move in self.moves if move.source == self.rank)

    @property
    def got(self) -> tuple[tuple[int, int], ...]:
        """(peer, tokens): rows of those peers that stand behind the zones' own outside of
        attention."""
        return tuple((move.source, move.tokens) for move in self.moves if move.target == self.rank)

    @property
    def attention_tokens(self) -> int:
        """Tokens this rank holds in attention."""
        return self.zones[-1].stop if self.zones else 0

    @property
    def linear_tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head; differs from attention where the
        micro-batch is remapped."""
        return self.attention_tokens + sum(n for _, n in self.got) - sum(n for _, n in self.given)

    @property
    def slices(self) -> Iterator[Slice]:
        """All slices in row order."""
        return (piece for zone in self.zones for piece in zone.slices)


def make_shard(micro_batch: MicroBatch, lengths: Sequence[int], rank: int) -> Shard:
    """The shard of `rank`. `lengths` are those of the whole plan, indexed by sequence id."""
    zones: list[Zone] = []
    row = 0
    for group in micro_batch.groups_of(rank):
        index = rank - group.start
        slices = group_slices(group, lengths, index)
        tokens = sum(piece.tokens for piece in slices)
        group_lengths = tuple(lengths[i] for i in group.sequences)
        zones.append(
            Zone(
                group=group,
                index=index,
                lengths=group_lengths,
                slices=slices,
                start=row,
                stop=row + tokens,
            )
        )
        row += tokens
    return Shard(rank=rank, zones=tuple(zones))


def remapped(
    shard: Shard, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> Shard:
    """`shard` with what goes to other ranks and comes from them outside of attention."""
    return replace(shard, moves=remap_moves(micro_batch, lengths, topology))


def remap_moves(
    micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> tuple[Move, ...]:
    """Those of a remapped micro-batch, by source, then by target."""
    tokens = [
        make_shard(micro_batch, lengths, rank).attention_tokens
        for rank in range(topology.world_size)
    ]
    return transport(tokens, topology)


def group_slices(group: Group, lengths: Sequence[int], index: int) -> tuple[Slice, ...]:
    """What the rank of `index` in `group` holds of its sequences, in the order of its row."""
    group_lengths = tuple(lengths[i] for i in group.sequences)
    return tuple(
        Slice(sequence=group.sequences[place], start=start, stop=stop)
        for place, start, stop in _pieces(group.strategy, group_lengths, index, group.degree)
        if stop > start
    )


def _pieces(
    strategy: str, lengths: tuple[int, ...], index: int, degree: int
) -> Iterator[tuple[int, int, int]]:
    """(place of the sequence in the group, start, stop) of every piece the rank of `index` holds,
    in row order."""
    if strategy in CHUNKS_PER_RANK:
        for place, cut in enumerate(cuts(strategy, lengths, degree)):
            for chunk in held_chunks(strategy, index, degree, mirrored=cut.mirrored):
                yield place, cut.bounds[chunk], cut.bounds[chunk + 1]
    else:
        part_start, part_stop = contiguous_part(sum(lengths), index, degree)
        offset = 0
        for place, length in enumerate(lengths):
            start, stop = max(part_start - offset, 0), min(part_stop - offset, length)
            yield place, start, max(start, stop)
            offset += length


def contiguous_part(tokens: int, index: int, degree: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `tokens` are cut into `degree` parts that differ by at
    most one."""
    return index * tokens // degree, (index + 1) * tokens // degree


# ---- chunks

CHUNKS_PER_RANK = {"zigzag": 2, "allgather": 2, "hybrid": 2, "balanced": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How one sequence lies on a group.

    bounds: the chunks + 1 positions between which its chunks lie. mirrored: the last rank holds
    the first chunk.
    """

    bounds: tuple[int, ...]
    mirrored: bool

    def tokens(self, chunks: Iterable[int]) -> int:
        return sum(self.bounds[c + 1] - self.bounds[c] for c in chunks)


def held_chunks(
    strategy: str, index: int, degree: int, *, mirrored: bool = False
) -> tuple[int, ...]:
    """The chunks of a sequence that the rank of `index` holds, in the order of its row."""
    place = degree - 1 - index if mirrored else index
    return (place,) if CHUNKS_PER_RANK[strategy] == 1 else (place, 2 * degree - 1 - place)


@functools.lru_cache(maxsize=1024)
def cuts(strategy: str, lengths: tuple[int, ...], degree: int) -> tuple[Cut, ...]:
    """How each sequence is cut over a group.

    Tokens are dealt to ranks as cards are, one sequence after the other without a new start, so
    that the rounding of many short sequences does not pile up on one rank: over the whole group
    every rank holds its fair share to within one token. With two chunks per rank a rank's share is
    then halved into its front and its back chunk.
    """
    made, dealt = [], 0
    for length, flipped in zip(lengths, mirrored(lengths), strict=True):
        shares = [
            _dealt_to(dealt + length, i, degree) - _dealt_to(dealt, i, degree)
            for i in range(degree)
        ]
        sizes = shares[::-1] if flipped else shares  # by chunk, not by rank
        if CHUNKS_PER_RANK[strategy] == 2:
            sizes = [size - size // 2 for size in sizes] + [size // 2 for size in reversed(sizes)]
        made.append(Cut(bounds=(0, *accumulate(sizes)), mirrored=flipped))
        dealt += length
    return tuple(made)


def mirrored(lengths: Sequence[int]) -> tuple[bool, ...]:
    """Which sequences of a group lie the other way round: longest first, each joins the side with
    fewer tokens.

    None does where the lighter side would have less than a quarter of the tokens: it would even
    out little, and every step exchanges with twice as many ranks.
    """
    flipped, sides = [False] * len(lengths), [0, 0]
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        flipped[place] = sides[1] < sides[0]
        sides[flipped[place]] += lengths[place]
    return tuple(flipped) if 4 * min(sides) >= sum(sides) else (False,) * len(lengths)


def _dealt_to(tokens: int, index: int, degree: int) -> int:
    """How many of `tokens`, dealt round robin to `degree` ranks, the rank of `index` has got."""
    return (tokens + degree - 1 - index) // degree
