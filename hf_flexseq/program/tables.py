"""The integers that instructions refer to: index arrays, and lengths of kernel calls."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.program.instructions import CallLengths, RowsSpec

IntArray = NDArray[np.int64]


class Tables:
    """Integers of a micro-batch's programs, copied to the device once (`attention/uploads.py`)."""

    __slots__ = (
        "_backwards",
        "_calls",
        "_constants",
        "_ranges",
        "calls",
        "indices",
    )

    def __init__(self) -> None:
        self.indices: list[IntArray] = []
        self.calls: list[CallLengths] = []
        self._calls: dict[CallLengths, int] = {}
        self._ranges: dict[tuple[tuple[int, int], ...], int] = {}
        self._backwards: dict[tuple[tuple[int, int], ...], RowsSpec] = {}
        self._constants: dict[tuple[int, ...], int] = {}

    def index(self, array: IntArray) -> int:
        """Add an index array, int64 [n], and return its number."""
        self.indices.append(array)
        return len(self.indices) - 1

    def constant(self, numbers: tuple[int, ...]) -> int:
        """Return the number of an index array of these numbers, which is made once."""
        if numbers not in self._constants:
            self._constants[numbers] = self.index(np.array(numbers, dtype=np.int64))
        return self._constants[numbers]

    def rows(self, ranges: Sequence[tuple[int, int]]) -> RowsSpec:
        """Return rows given as ranges [start, stop), which may be empty, one after the other."""
        # 1. ranges that follow each other are one
        joined: list[tuple[int, int]] = []
        tokens = 0
        for start, stop in ranges:
            if start == stop:
                continue
            tokens += stop - start
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        # 2. the simplest way to say which they are
        if not joined:
            return RowsSpec(0, start=0)
        if len(joined) == 1:
            return RowsSpec(tokens, start=joined[0][0])
        key = tuple(joined)
        if key not in self._ranges:
            parts = [np.arange(start, stop) for start, stop in joined]
            self._ranges[key] = self.index(np.concatenate(parts))
        return RowsSpec(tokens, array=self._ranges[key])

    def backwards(self, ranges: Sequence[tuple[int, int]]) -> RowsSpec:
        """Return rows given as ranges [start, stop), each from its last row to its first."""
        key = tuple(ranges)
        if key not in self._backwards:
            parts = [np.arange(stop - 1, start - 1, -1) for start, stop in ranges]
            self._backwards[key] = self.order(np.concatenate(parts))
        return self._backwards[key]

    def positions(self, rows: RowsSpec) -> IntArray:
        """Return the rows one by one: int64 [n]."""
        if rows.array is not None:
            return self.indices[rows.array]
        assert rows.start is not None, "the rows of another rank have no positions here"
        return np.arange(rows.start, rows.start + rows.tokens)

    def order(self, array: IntArray) -> RowsSpec:
        """Return rows in the order of `array`, int64 [n]."""
        tokens = len(array)
        if tokens == 0 or (array[0] + np.arange(tokens) == array).all():
            return RowsSpec(tokens, start=int(array[0]) if tokens else 0)
        return RowsSpec(tokens, array=self.index(array))

    def call(
        self,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        causal: bool,
        window: int | None = None,
    ) -> int:
        """Add the lengths of a kernel call, and return their number. A window that holds every
        sequence is left out."""
        if window is not None and window >= max(k_lens, default=0):
            window = None
        lengths = CallLengths(tuple(q_lens), tuple(k_lens), causal, window)
        if lengths not in self._calls:
            self._calls[lengths] = len(self.calls)
            self.calls.append(lengths)
        return self._calls[lengths]
