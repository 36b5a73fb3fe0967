"""Prices of attention calls against blocks and tiles that are counted one by one."""

import math

import numpy as np
import pytest

from hf_flexseq.cost.kernels import FLASH_ATTENTION_2, WITH_CUDNN

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 200, 256, 1000, 2048, 32768)


def counted(queries: int, keys: int, *, causal: bool) -> tuple[int, int]:
    """Blocks of 128 queries and their tiles of 64 keys, one after the other."""
    blocks = tiles = 0
    for first in range(0, queries, 128):
        last = min(first + 128, queries)
        seen = min(last, keys) if causal else keys
        blocks += 1
        tiles += math.ceil(seen / 64)
    return blocks, tiles


@pytest.mark.parametrize("length", LENGTHS)
def test_a_causal_sequence_takes_its_blocks_and_tiles(length):
    blocks, tiles = counted(length, length, causal=True)
    squares = FLASH_ATTENTION_2.causal(np.array([float(length)]))
    assert squares[0] == pytest.approx(2 * 128 * 64 * (tiles + 4.8 * blocks))


@pytest.mark.parametrize("keys", [1, 64, 100, 4000])
@pytest.mark.parametrize("length", [1, 128, 130, 5000])
def test_queries_that_read_all_keys_take_their_blocks_and_tiles(length, keys):
    blocks, tiles = counted(length, keys, causal=False)
    squares = FLASH_ATTENTION_2.across(np.array([float(length)]), np.array([float(keys)]))
    assert squares[0] == pytest.approx(2 * 128 * 64 * (tiles + 4.8 * blocks))


def test_long_sequences_have_the_pace_of_calls_of_their_own():
    squares = WITH_CUDNN.causal(np.array([2499.0, 4096.0, 16384.0, 1e6]))
    alone = FLASH_ATTENTION_2.causal(np.array([2499.0]))
    assert squares[0] == alone[0]
    paces = np.array([4096.0, 16384.0, 1e6]) ** 2 / squares[1:]
    assert paces == pytest.approx([1.28, 1.81, 1.67])
