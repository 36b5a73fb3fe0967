"""Sums of a ring about the rows of one rank: the merged result of its queries, and the
gradients of its queries, keys and values.

The first call, over the rank's own chunks, reads all of its rows: where it is one call, its result
begins the sum, and nothing has to be cleared.
"""

from collections.abc import Iterable

from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import WIDE, RowsSpec, Value


class RunningResult:
    """The merged result of all calls so far about this rank's queries."""

    def __init__(self, b: Builder, q: Value) -> None:
        """q: [t, H, D]."""
        self._builder = b
        self._shape = q.shape
        self._out: Value | None = None  # [t, H, D] in WIDE
        self._lse: Value | None = None  # [t, H], in memory as kernels have it

    @property
    def out(self) -> Value:
        """[t, H, D] in WIDE."""
        return self._begun()[0]

    @property
    def lse(self) -> Value:
        """[t, H] in WIDE."""
        return self._begun()[1]

    def _begun(self) -> tuple[Value, Value]:
        """Return out and lse, without contents as long as no call has given any."""
        if self._out is None or self._lse is None:
            rows, heads, _ = self._shape
            self._out = self._builder.empty(self._shape, WIDE)
            lse = self._builder.empty((heads, rows), WIDE)
            self._lse = self._builder.turned(lse)
        return self._out, self._lse

    def take(self, rows: RowsSpec, result: Values, *, first: bool) -> None:
        """Take the result (out [n, H, D], lse [n, H]) of a call of this rank about these rows.

        first: whether no call before it has read these rows.
        """
        out, lse = result
        if first and rows.tokens == self._shape[0] and self._out is None:
            self._out = self._builder.cast(out, WIDE)
            self._lse = lse
        elif first:
            self._builder.put(self.out, rows, out)
            self._builder.put(self.lse, rows, lse)
        else:
            self._builder.merge(self.out, self.lse, rows, (out, lse))

    def merge_all(self, results: Iterable[tuple[RowsSpec, Values]]) -> None:
        """Merge results that have come back, in their order."""
        for rows, result in results:
            self.take(rows, result, first=False)


class Total:
    """Gradients of this rank's rows, summed in float32 (float64 for float64)."""

    def __init__(self, b: Builder, like: Value) -> None:
        """like: the value whose gradient it is, [t, ...]."""
        self._builder = b
        self._shape = like.shape
        self._value: Value | None = None  # [t, ...] in WIDE

    def value(self) -> Value:
        """Return the sum, [t, ...]: zero where nothing was added."""
        if self._value is None:
            self._value = self._builder.zeros(self._shape, WIDE)
        return self._value

    def add(self, rows: RowsSpec, parts: Values, *, repeats: bool = False) -> None:
        """Add each part [n, ...] to these n rows. repeats: True for rows that may repeat."""
        for part in parts:
            if repeats:
                self._builder.accumulate(self.value(), rows, part)
            elif self._value is None and rows.array is None and rows.tokens == self._shape[0]:
                self._value = self._builder.cast(part, WIDE)
            else:
                self._builder.add(self.value(), rows, part)
