"""Numbers that identify tensors, such as an image's, by their bytes.

    mark      of some of the words of 8 bytes, which costs next to nothing
    digest    of all bytes

Both read names, dtypes and shapes as well.

Rejected: sums of words, each times a number of its own, modulo a power of 2. They are faster, and
blind to what real pixels do: black and white may be -1 and 1, which differ in their highest bit
alone, and from there nothing is carried into the sum.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensors = Mapping[str, torch.Tensor]

MARKED_WORDS = 1024
WORD_BYTES = 8


def mark_of(tensors: Tensors) -> int:
    """Return a number below 2^63 that equal tensors have in common."""
    digest = _begun(tensors, size=WORD_BYTES)
    for value in tensors.values():
        data = bytes_of(value).numpy()
        whole = len(data) // WORD_BYTES * WORD_BYTES
        words = data[:whole].reshape(-1, WORD_BYTES)
        digest.update(words[:: max(1, len(words) // MARKED_WORDS)].tobytes())
        digest.update(data[whole:])
    return _numbers(digest)[0]


def digest_of(tensors: Tensors) -> tuple[int, int]:
    """Return two numbers of 63 bits that only equal tensors have in common."""
    digest = _begun(tensors, size=2 * WORD_BYTES)
    for value in tensors.values():
        digest.update(bytes_of(value).numpy())
    first, second = _numbers(digest)
    return first, second


def _begun(tensors: Tensors, *, size: int) -> Any:
    """Return a digest of `size` bytes that has read the tensors' names, dtypes and shapes."""
    kinds = [(name, str(value.dtype), list(value.shape)) for name, value in tensors.items()]
    return hashlib.blake2b(repr(kinds).encode(), digest_size=size)


def _numbers(digest: Any) -> list[int]:
    """Return a digest as numbers of 63 bits."""
    words: NDArray[np.uint64] = np.frombuffer(digest.digest(), dtype=np.uint64)
    return [int(word) >> 1 for word in words]


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of any shape as bytes, [bytes]."""
    return value.contiguous().reshape(-1).view(torch.uint8)
