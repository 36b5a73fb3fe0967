"""The ranks of a sequence's tokens, in token order.

Attention may read tokens in any order. A recurrence must go from the first token of a sequence to
its last, across ranks. A *segment* is a contiguous range of tokens on one rank; the segments of a
sequence, in token order, are its *chain*:

    zigzag on two ranks, 8 tokens       0 0 1 1 1 1 0 0
    chain                               rank 0 [0, 2), rank 1 [2, 6), rank 0 [6, 8)

Adjacent chunks of one rank are one segment. `tests/plan/test_shard.py` compares the chains with
the slices of all ranks.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hf_flexseq.plan.rings import chunks_per_rank
from hf_flexseq.plan.shard import Zone, contiguous_part, cuts


class Segment(NamedTuple):
    """Consecutive tokens of one sequence on one rank."""

    holder: int
    """Index of its rank in the group."""
    start: int
    """First token, counted in the sequence."""
    stop: int
    """First token after the segment."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class HeldSegment(NamedTuple):
    """A segment of this rank, with its place in the chain of its sequence."""

    member: int
    """Index of the sequence in the group."""
    place: int
    """Index of the segment in the chain."""
    row: int
    """Row of its first token in the zone."""


class Chains(NamedTuple):
    """The chains of a rank's sequences in one group."""

    chains: dict[int, tuple[Segment, ...]]
    """Chain of each sequence, by index of the sequence in the group."""
    held: tuple[HeldSegment, ...]
    """This rank's segments, in row order."""


def chains_of(zone: Zone) -> Chains:
    """Return the chains of all sequences with tokens in this zone."""
    chains: dict[int, tuple[Segment, ...]] = {}
    held = []
    row = 0
    cuts_chunks = chunks_per_rank(zone.group.strategy) > 0
    tokens = sum(zone.lengths)
    first, last = contiguous_part(tokens, zone.index, zone.group.degree)
    offset = 0  # offset of the sequence in the concatenation
    for member, length in enumerate(zone.lengths):
        if cuts_chunks:
            parts = _chunks(zone.group.strategy, zone.lengths, member, zone.group.degree)
        elif first < offset + length and offset < last:
            parts = _contiguous(offset, length, tokens, zone.group.degree)
        else:
            parts = iter(())
        chain = _chain(parts)
        offset += length
        for place, segment in enumerate(chain):
            if segment.holder == zone.index:
                chains[member] = chain
                held.append(HeldSegment(member, place, row))
                row += segment.tokens
    assert row == zone.stop - zone.start, "segments are not the rows of the zone"
    return Chains(chains, tuple(held))


def _chain(parts: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the parts in token order, without empty ones, adjacent ones of a rank joined."""
    chain: list[Segment] = []
    for part in parts:
        if part.start == part.stop:
            continue
        if chain and chain[-1].holder == part.holder:
            chain[-1] = chain[-1]._replace(stop=part.stop)
        else:
            chain.append(part)
    return tuple(chain)


def _chunks(
    strategy: str, lengths: tuple[int, ...], member: int, degree: int
) -> Iterator[Segment]:
    """Yield the chunks of a sequence, possibly empty; see `shard.held_chunks`."""
    cut = cuts(strategy, lengths, degree)[member]
    chunks = chunks_per_rank(strategy) * degree
    for chunk in range(chunks):
        front = min(chunk, 2 * degree - 1 - chunk)
        index = degree - 1 - front if cut.mirrored else front
        yield Segment(index, cut.bounds[chunk], cut.bounds[chunk + 1])


def _contiguous(offset: int, length: int, tokens: int, degree: int) -> Iterator[Segment]:
    """Yield the parts of a sequence if the concatenation of all sequences is cut.

    offset: of the sequence in the concatenation. tokens: of all sequences.
    """
    end = offset + length
    index = ((offset + 1) * degree - 1) // tokens  # index of the part with the first token
    start = offset
    while start < end:
        _, part_stop = contiguous_part(tokens, index, degree)
        stop = min(part_stop, end)
        yield Segment(index, start - offset, stop - offset)
        start = stop
        index += 1
