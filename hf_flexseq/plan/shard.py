"""The tokens each rank holds of a micro-batch: integers only, so that layouts are tested without
processes.

    make_shard(micro_batch, lengths, rank)    the tokens of one rank
    placed(micro_batch, lengths, sequences)   the ranks that hold some sequences
    cuts(strategy, lengths, degree)           where each sequence of a group is cut into chunks

A rank's row is the concatenation of its *zones*, one per group it works in, in the micro-batch's
order (widest first). Inside a zone the layout depends on the strategy:

* local: the group's sequences one after the other;
* ulysses: the group's sequences concatenated and cut into `degree` contiguous parts, so that a
  rank's part may begin and end in the middle of a sequence;
* zigzag, hybrid: every sequence is cut into 2 x degree chunks and the rank of index i holds chunks
  i and 2 x degree - 1 - i, which gives all ranks the same causal work (Megatron-LM's and
  ring-flash-attention's layout, here for any length);
* a ring of one chunk per rank: every sequence is cut into `degree` chunks, and the calls of its
  rounds even out the work.

A sequence of 8 tokens on two ranks, followed by a mirrored one of 6:

    ulysses    rank 0 | 0.0 0.1 0.2 0.3 0.4 0.5 0.6         rank 1 | 0.7 1.0 1.1 1.2 1.3 1.4 1.5
    zigzag     rank 0 | 0.0 0.1 0.6 0.7 1.2 1.3 1.4         rank 1 | 0.2 0.3 0.4 0.5 1.0 1.1 1.5
    one chunk  rank 0 | 0.0 0.1 0.2 0.3 1.3 1.4 1.5         rank 1 | 0.4 0.5 0.6 0.7 1.0 1.1 1.2

If sequences are cut into chunks, the ranks of the first chunks send and receive other amounts than
the ranks of the last ones. So about half of a group's tokens are *mirrored*: the last rank holds
the first chunk.

No layout pads: parts differ by at most one token, and no rank holds more than ceil(tokens /
degree) for a group. tests/plan/test_shard.py counts every token of random plans one by one.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from hf_flexseq.plan.groups import Group, MicroBatch
from hf_flexseq.plan.rings import chunks_per_rank

# Sequences are mirrored only if both directions then have at least 1 / MIRRORED_SHARE of a group's
# tokens: a smaller share would even out little, and every step of a ring would exchange with twice
# as many ranks.
MIRRORED_SHARE = 4


# ---- a rank's tokens


class Slice(NamedTuple):
    """Tokens [start, stop) of one sequence."""

    sequence: int
    """Id of the sequence."""
    start: int
    """First token, counted in the sequence."""
    stop: int
    """Token after the last."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """The part of a rank's row that belongs to one group."""

    group: Group
    """The group that shares the attention of these tokens."""
    index: int
    """The rank's index in the group, 0..degree-1."""
    lengths: tuple[int, ...]
    """Tokens of each sequence of the group, in the order of `group.sequences`."""
    slices: tuple[Slice, ...]
    """The rank's slices, in the order of its row."""
    start: int
    """First row of the zone."""
    stop: int
    """Row after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The tokens of one rank in one micro-batch."""

    rank: int
    """The rank that holds the tokens."""
    zones: tuple[Zone, ...]
    """The rank's zones, in row order; () for an idle rank."""

    @property
    def tokens(self) -> int:
        return self.zones[-1].stop if self.zones else 0

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices, in row order."""
        return tuple(chain.from_iterable(zone.slices for zone in self.zones))


def make_shard(micro_batch: MicroBatch, lengths: Sequence[int], rank: int) -> Shard:
    """Return the shard of `rank`. lengths: tokens of every sequence of the plan."""
    zones: list[Zone] = []
    row = 0
    for group in micro_batch.groups_of(rank):
        index = rank - group.start
        slices = group_slices(group, lengths, index)
        tokens = sum(part.tokens for part in slices)
        zone = Zone(
            group=group,
            index=index,
            lengths=_lengths_of(group, lengths),
            slices=slices,
            start=row,
            stop=row + tokens,
        )
        zones.append(zone)
        row += tokens
    return Shard(rank=rank, zones=tuple(zones))


def placed(
    micro_batch: MicroBatch, lengths: Sequence[int], sequences: Collection[int]
) -> Iterator[tuple[int, Slice]]:
    """Yield (rank, slice) for each slice of some sequences; the slices of one rank are in row
    order.

    lengths: tokens of every sequence of the plan. sequences: ids, best as a set.
    """
    for group in micro_batch.groups:
        if not any(sequence in sequences for sequence in group.sequences):
            continue
        for index, rank in enumerate(group.ranks):
            for part in group_slices(group, lengths, index):
                if part.sequence in sequences:
                    yield rank, part


def group_slices(group: Group, lengths: Sequence[int], index: int) -> tuple[Slice, ...]:
    """Return the slices of the rank of `index` in `group`, in row order."""
    group_lengths = _lengths_of(group, lengths)
    if chunks_per_rank(group.strategy):
        parts = _chunk_parts(group.strategy, group_lengths, index, group.degree)
    else:
        parts = _contiguous_parts(group_lengths, index, group.degree)
    slices = []
    for member, start, stop in parts:
        if stop > start:
            slices.append(Slice(sequence=group.sequences[member], start=start, stop=stop))
    return tuple(slices)


def _lengths_of(group: Group, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each sequence of the group."""
    return tuple(lengths[sequence] for sequence in group.sequences)


# (index of the sequence in the group, start, stop): its tokens [start, stop), or none.
_Part = tuple[int, int, int]


def _chunk_parts(
    strategy: str, lengths: tuple[int, ...], index: int, degree: int
) -> Iterator[_Part]:
    """Yield the parts of the rank of `index` if every sequence is cut into chunks."""
    for member, cut in enumerate(cuts(strategy, lengths, degree)):
        for chunk in held_chunks(strategy, index, degree, mirrored=cut.mirrored):
            yield member, cut.bounds[chunk], cut.bounds[chunk + 1]


def _contiguous_parts(lengths: tuple[int, ...], index: int, degree: int) -> Iterator[_Part]:
    """Yield the parts of the rank of `index` if the concatenation of all sequences is cut."""
    part_start, part_stop = contiguous_part(sum(lengths), index, degree)
    offset = 0  # offset of the sequence in the concatenation
    for member, length in enumerate(lengths):
        start = max(part_start - offset, 0)
        stop = min(part_stop - offset, length)
        yield member, start, stop
        offset += length


def contiguous_part(tokens: int, index: int, degree: int) -> tuple[int, int]:
    """Return [start, stop) of part `index` of `degree` parts, equal to within a token."""
    return index * tokens // degree, (index + 1) * tokens // degree


def contiguous_parts(tokens: int, degree: int) -> list[range]:
    """Return all `degree` parts of `tokens`."""
    return [range(*contiguous_part(tokens, index, degree)) for index in range(degree)]


# ---- chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The chunks of one sequence on a group."""

    bounds: tuple[int, ...]
    """[chunks + 1] Chunk c has tokens [bounds[c], bounds[c + 1])."""
    mirrored: bool
    """True if the last rank holds the first chunk."""

    def tokens(self, chunks: Iterable[int]) -> int:
        """Return the number of tokens in some chunks."""
        return sum(self.bounds[chunk + 1] - self.bounds[chunk] for chunk in chunks)


def held_chunks(
    strategy: str, index: int, degree: int, *, mirrored: bool = False
) -> tuple[int, ...]:
    """Return the chunks of a sequence on the rank of `index`, in row order."""
    front = degree - 1 - index if mirrored else index
    if chunks_per_rank(strategy) == 1:
        return (front,)
    back = 2 * degree - 1 - front
    return (front, back)


def holder_of(chunk: int, degree: int, *, mirrored: bool) -> int:
    """Return the index of the rank that holds a chunk of a sequence; see `held_chunks`."""
    front = min(chunk, 2 * degree - 1 - chunk)
    return degree - 1 - front if mirrored else front


@functools.lru_cache(maxsize=1024)
def cuts(strategy: str, lengths: tuple[int, ...], degree: int) -> tuple[Cut, ...]:
    """Return the cut of each sequence of a group.

    Tokens are distributed round robin, continuing from sequence to sequence. So the rounding of
    many short sequences does not accumulate on one rank: each rank holds its fair share to within
    one token. With two chunks per rank, that share is halved into a front and a back chunk.

    lengths: tokens of each sequence of the group.
    """
    group_cuts = []
    assigned = 0  # tokens of previous sequences
    for length, is_mirrored in zip(lengths, mirrored(lengths), strict=True):
        sizes = _shares_of_ranks(assigned, length, degree)  # by rank
        if is_mirrored:
            sizes.reverse()  # by chunk
        if chunks_per_rank(strategy) == 2:
            front = [size - size // 2 for size in sizes]
            back = [size // 2 for size in reversed(sizes)]
            sizes = front + back
        bounds = (0, *accumulate(sizes))
        group_cuts.append(Cut(bounds=bounds, mirrored=is_mirrored))
        assigned += length
    return tuple(group_cuts)


def mirrored(lengths: Sequence[int]) -> tuple[bool, ...]:
    """Return for each sequence of a group True if its chunks are in reverse rank order.

    Longest first, each sequence joins the side with fewer tokens. All keep the forward order if
    the lighter side would have less than 1 / `MIRRORED_SHARE` of the tokens.
    """
    flags = [False] * len(lengths)
    tokens = [0, 0]  # tokens of the forward and of the mirrored sequences
    for member in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        flags[member] = tokens[True] < tokens[False]
        tokens[flags[member]] += lengths[member]
    if MIRRORED_SHARE * min(tokens) < sum(tokens):
        return (False,) * len(lengths)
    return tuple(flags)


def _shares_of_ranks(assigned: int, length: int, degree: int) -> list[int]:
    """Return the number of tokens of a sequence on each rank, [degree].

    assigned: tokens distributed before this sequence. length: tokens of the sequence.
    """
    shares = []
    for index in range(degree):
        before = _tokens_of_rank(assigned, index, degree)
        after = _tokens_of_rank(assigned + length, index, degree)
        shares.append(after - before)
    return shares


def _tokens_of_rank(tokens: int, index: int, degree: int) -> int:
    """Return the tokens of the rank of `index` if `tokens` are distributed round robin."""
    return (tokens + degree - 1 - index) // degree
