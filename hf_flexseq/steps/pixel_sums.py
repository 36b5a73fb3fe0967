"""Numbers by which tensors with the same bytes are known, such as those of images.

    mark      a sum over some of the words of 8 bytes, which costs next to nothing
    digest    two sums over all of them

In a sum each word is multiplied by an odd number of its own, modulo 2^64 (multilinear hashing).
Digests of tensors that differ anywhere agree by chance once in about 2^126 times.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Tensors = Mapping[str, torch.Tensor]

MARKED_WORDS = 1024
WORD_BYTES = 8


def mark_of(tensors: Tensors) -> int:
    """Return a number below 2^63 that equal tensors have in common."""
    total = 0
    for value in tensors.values():
        words = _words(value)
        stride = max(1, len(words) // MARKED_WORDS)
        marked = words[::stride][: 2 * MARKED_WORDS]
        total = 31 * total + int(marked @ _factors(0, len(marked)))
    return total % (1 << 63)


def digest_of(tensors: Tensors) -> tuple[int, int]:
    """Return two numbers of 63 bits that only equal tensors have in common."""
    sums = []
    for which in (0, 1):
        total = 0
        for value in tensors.values():
            words = _words(value)
            total = 31 * total + int(words @ _factors(which, len(words)))
        sums.append(total % (1 << 63))
    return sums[0], sums[1]


def _words(value: torch.Tensor) -> Words:
    """Return the memory of a tensor in words of 8 bytes, the last one filled up with zeros."""
    data = bytes_of(value).numpy()
    missing = -len(data) % WORD_BYTES
    if missing:
        data = np.concatenate([data, np.zeros(missing, dtype=np.uint8)])
    if data.ctypes.data % WORD_BYTES:
        data = data.copy()
    return data.view(np.uint64)


def _factors(which: int, count: int) -> Words:
    """Return the odd numbers that words are multiplied by, [count]."""
    size = 1 << max(0, count - 1).bit_length()  # few sizes, so that few are kept
    return _all_factors(which, size)[:count]


@lru_cache(maxsize=64)
def _all_factors(which: int, size: int) -> Words:
    rng = np.random.default_rng(which)
    return rng.integers(1, 1 << 63, size, dtype=np.uint64) | np.uint64(1)


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of any shape as bytes, [bytes]."""
    return value.contiguous().reshape(-1).view(torch.uint8)
