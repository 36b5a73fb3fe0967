"""Prices of attention calls against blocks and tiles that are counted one by one."""

import math

import numpy as np
import pytest

from hf_flexseq.cost.kernels import FLASH_ATTENTION_2, WITH_CUDNN, AttentionKernel
from tests.costs import simple_cost

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


def test_measured_rates_are_met():
    """TFLOP/s forward and backward of an H100 (2026-11-26_gpu_check_h100.md), over those of
    endless tiles: 1 x 32,768 (362 and 321), 16 x 2,048 (304 and 236), 256 x 128 (74 and 41)."""
    endless = 14 / (4 / 362 + 10 / 321)
    for length, forward, backward in ((2048, 304, 236), (128, 74, 41)):
        measured = 14 / (4 / forward + 10 / backward) / endless
        pace = length**2 / FLASH_ATTENTION_2.causal(np.array([float(length)]))[0]
        # a pack of short sequences has empty blocks, too, of which no sequence knows
        assert pace == pytest.approx(measured, rel=0.1 if length > 128 else 0.35)


def test_long_sequences_have_the_pace_of_calls_of_their_own():
    squares = WITH_CUDNN.causal(np.array([2499.0, 4096.0, 16384.0, 1e6]))
    alone = FLASH_ATTENTION_2.causal(np.array([2499.0]))
    assert squares[0] == alone[0]
    paces = np.array([4096.0, 16384.0, 1e6]) ** 2 / squares[1:]
    assert paces == pytest.approx([1.28, 1.81, 1.67])


def test_many_ranks_gain_nothing_on_a_short_sequence():
    """Of 100 tokens every rank of a ring has a block of a few for each other rank."""
    cost = simple_cost(attention_s=1e-6, linear_s=1e-12, heads=8, kernel=FLASH_ATTENTION_2)
    alone = cost.sequence_ns(100, 1, "local", False)
    assert cost.sequence_ns(100, 8, "zigzag", False) > 6 * alone
    assert cost.sequence_ns(100, 8, "ulysses", False) == pytest.approx(alone / 8, rel=1e-6)
    # a long one has its eighth, and 16 blocks instead of 8 in every step
    long = cost.sequence_ns(131072, 8, "zigzag", False)
    assert long / cost.sequence_ns(131072, 1, "local", False) == pytest.approx(1 / 8, rel=0.04)


def test_lengths_of_paces_must_ascend():
    with pytest.raises(ValueError, match="must ascend"):
        AttentionKernel(block=128, tile=64, block_tiles=4.8, own_paces=((4, 1.0), (2, 1.0)))
