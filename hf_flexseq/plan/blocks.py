"""Blocks: consecutive tokens, within a sequence, that see both ways, such as one image's.

    tokens     0 1 [2 3 4] 5      blocks of the sequence: ((2, 5),)
    query 3    reads 0 1 2 3, and 4 of its own block

A query in a block reads the later keys of this block, besides the earlier keys that it reads
anyway. Everything else stays causal. Windows leave out older keys only.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hf_flexseq.base.values import quoted
from hf_flexseq.plan.shard import Zone

Range = tuple[int, int]  # [start, stop)

# By id of a sequence its blocks, tokens [start, stop) of the sequence, in ascending order.
Blocks = Mapping[int, Sequence[Range]]

NO_BLOCKS: Blocks = MappingProxyType({})
NO_PAIRS: Mapping[int, int] = MappingProxyType({})  # by id of a sequence its `later_pairs`

# Strategies whose kernels see all tokens of a sequence, so that blocks may be cut between ranks.
SEE_BLOCKS = ("local", "ulysses")


def block_rows(zone: Zone, blocks: Blocks) -> list[Range]:
    """Return the blocks of two tokens and more as rows [start, stop) of all sequences of the
    zone's group, one after the other. In a block of one token nothing is later.

    Raises ValueError for blocks that do not fit their sequence, and for a strategy that cannot
    compute them.
    """
    rows = []
    offset = 0
    for sequence, length in zip(zone.group.sequences, zone.lengths, strict=True):
        of_sequence = blocks.get(sequence, ())
        _check(of_sequence, sequence, length)
        for start, stop in of_sequence:
            if stop - start > 1:
                rows.append((offset + start, offset + stop))
        offset += length
    for unit in zone.group.units:
        for start, stop in blocks.get(unit.sequence, ()):
            if len(list(unit.layout.pieces(start, stop))) > 1:
                raise ValueError(
                    f"tokens {start} to {stop - 1} of sequence {unit.sequence} see both ways, but "
                    "rows share only some of them: let rows share either all of a block or nothing"
                )
    if rows and zone.group.strategy not in SEE_BLOCKS:
        raise ValueError(
            f"the strategy {zone.group.strategy!r} cannot compute tokens that see both ways, as "
            f"sequences {quoted(zone.group.sequences)} have: set strategy='ulysses'"
        )
    return rows


def later_pairs(blocks: Sequence[Range]) -> int:
    """Return the number of pairs of a query and a later key in the blocks of a sequence."""
    return sum((stop - start) * (stop - start - 1) // 2 for start, stop in blocks)


def _check(blocks: Sequence[Range], sequence: int, length: int) -> None:
    """Raise ValueError unless blocks have tokens, ascend, and end within this length."""
    last = 0
    for start, stop in blocks:
        if not last <= start < stop <= length:
            raise ValueError(
                f"blocks of sequence {sequence} must ascend within its {length} tokens, got "
                f"{quoted(tuple(blocks))}"
            )
        last = stop
