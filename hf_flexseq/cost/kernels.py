"""The price of an attention call, by the lengths of its sequences.

A kernel computes in blocks of queries that walk over tiles of keys, and the other way round in
the backward. Part of a block costs as much as all of it, and a block costs something besides its
tiles. So many short sequences take longer than one long sequence with as many pairs:

    causal    s tokens      r = ceil(s / block) blocks of 1, 2, ... times block / tile tiles
    across    q x k tokens  ceil(q / block) blocks of ceil(k / tile) tiles

Both are returned as *squares*: the tokens squared that an endless sequence has computed in the
same time, of which a cost model knows the seconds (`attention_s`). Without a kernel a sequence of
s tokens has s^2, and a call across has 2 q k.

A causal sequence of `own_paces[0]` tokens and more has a separate call, which another kernel
computes at its own pace.

The numbers of FlashAttention-2, and of torch's varlen kernel, which is the same code, are fitted
to calls of one sequence of 32,768 tokens and of 256 of 128 tokens on an H100
(scripts/benchmarks/results/2026-11-26_gpu_check_h100.md): a tile of 128 x 64 takes 3.06 us
forward on one of 264 slots and 4.3 us backward on one of 132, a block 8 us and 24 us besides. They
give 16 sequences of 2,048 tokens to 3 %. cuDNN's paces are the rows of one sequence on that page.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.records import Amount, Bounds, Constants, Positive, Whole
from hf_flexseq.base.values import MAX_TOKENS

FloatArray = NDArray[np.float64]

Tokens = Annotated[int, Bounds(least=1, most=MAX_TOKENS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel(Constants):
    """How the time of an attention call depends on the lengths of its sequences."""

    what: ClassVar[str] = "the kernel of a cost model"

    block: Tokens
    """Queries of a thread block in the forward, keys of one in the backward."""
    tile: Tokens
    """Keys, or queries, that a block walks over at once."""
    block_tiles: Amount
    """Time that a block takes besides its tiles, in tiles."""
    own_paces: tuple[tuple[Whole, Positive], ...] = ()
    """(tokens, pace over an endless tile's), ascending, of causal sequences in calls of their
    own, which begin with the first of them; () where all sequences share a call."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        lengths = [tokens for tokens, _ in self.own_paces]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"own_paces: lengths {lengths} must ascend")

    def causal(self, s: FloatArray) -> FloatArray:
        """Return the squares of causal sequences, [sequences]. s: [sequences] tokens."""
        rows = np.ceil(s / self.block)
        tiles = rows * (rows - 1) / 2 * (self.block / self.tile) + np.ceil(s / self.tile)
        squares: FloatArray = self._squares(tiles, rows)
        if self.own_paces:
            lengths, paces = np.array(self.own_paces).T
            own = s >= lengths[0]
            if own.any():
                pace = np.interp(np.log(np.maximum(s, 1)), np.log(lengths), paces)
                squares = np.where(own, s * s / pace, squares)
        return squares

    def across(self, q: FloatArray, k: FloatArray) -> FloatArray:
        """Return the squares of calls in which all queries read all keys, [sequences].

        q, k: [sequences] tokens.
        """
        rows = np.ceil(q / self.block)
        return self._squares(rows * np.ceil(k / self.tile), rows)

    def most_more(self, tokens: float, calls: float) -> float:
        """Return the most squares that blocks and tiles cost in addition to their pairs, for so
        many tokens in so many calls."""
        of_block = 1 + self.block_tiles
        area = 2.0 * self.block * self.tile
        return 2.0 * tokens * (self.tile * of_block + self.block) + area * of_block * calls

    def _squares(self, tiles: FloatArray, blocks: FloatArray) -> FloatArray:
        """Return the squares of blocks with so many tiles in all, [sequences]."""
        return 2.0 * self.block * self.tile * (tiles + self.block_tiles * blocks)


# FlashAttention-2 and torch's varlen kernel: what a block takes besides its tiles, forward and
# backward together, over what a tile takes.
FLASH_ATTENTION_2 = AttentionKernel(block=128, tile=64, block_tiles=4.8)

# The same with cuDNN for long sequences, on Hopper: forward and backward together.
WITH_CUDNN = replace(
    FLASH_ATTENTION_2,
    own_paces=((2500, 0.92), (4096, 1.28), (8192, 1.6), (16384, 1.81), (32768, 1.67)),
)
