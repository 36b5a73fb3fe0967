"""The grid of blocks on which deterministic attention computes: which tokens a block has, which
blocks read it, and which it reads. `attention/block_pairs.py` computes with them."""

from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan.shard import Slice

# Tokens of a block: one tile of the CUDA kernels in the direction in which they would add
# atomically.
BLOCK = 128


class SequenceBlocks(NamedTuple):
    """Some blocks of one sequence."""

    sequence: int
    """Id in the step."""

    length: int
    """Tokens of the sequence."""

    numbers: Sequence[int]
    """Of the blocks, counted from the start of the sequence, ascending."""

    @property
    def all_blocks(self) -> int:
        """The number of blocks of the whole sequence."""
        return -(-self.length // BLOCK)  # rounded up

    @property
    def slices(self) -> list[Slice]:
        """The tokens of these blocks; neighbours are one slice."""
        slices: list[Slice] = []
        for number in self.numbers:
            start = number * BLOCK
            stop = min(start + BLOCK, self.length)
            if slices and slices[-1].stop == start:
                start = slices.pop().start
            slices.append(Slice(sequence=self.sequence, start=start, stop=stop))
        return slices

    @property
    def readers(self) -> "SequenceBlocks":
        """The blocks from the first of these on: their queries read keys of these blocks."""
        return self._replace(numbers=range(self.numbers[0], self.all_blocks))

    @property
    def read(self) -> "SequenceBlocks":
        """The blocks up to the last of these: queries of these blocks read their keys."""
        return self._replace(numbers=range(self.numbers[-1] + 1))


class BlocksSpec(NamedTuple):
    """The blocks that a rank works on, among the constants of an instruction."""

    number: int
    """Tells the zones of a micro-batch apart."""

    own: tuple[SequenceBlocks, ...]

    def __str__(self) -> str:
        blocks = sum(len(one.numbers) for one in self.own)
        return f"{blocks} blocks of {len(self.own)} sequences"
