"""InfiniPipe's sequence processor (arXiv 2509.21275, algorithm 1), re-created from the paper's
text.

1. The longest sequence is cut into K slices of equal time: a mesh, and with it the most time and
   tokens of a chunk.
2. Every other long sequence is cut on that mesh, which leaves a tail; the others are short.
3. Buckets begin as tails, kept in order of time per token.
4. Short sequences, longest first, go into the first bucket that keeps both limits. If even the
   emptiest bucket would have too many tokens they open a new one; if only time forbids it
   everywhere, the limit rises to what the least loaded bucket would then take.
5. A bucket with a tail is a hybrid chunk, the last of its sequence; one without is a batched
   chunk, its own unit.

Tails are never packed together: two long sequences would have to be in flight at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_flexseq.planner.pipeline.cuts import CutWork, cut
from hf_flexseq.planner.pipeline.pack import longest_first
from hf_flexseq.planner.pipeline.units import Row, Unit


@dataclass(slots=True)
class _Bucket:
    """A row in the making, with its time and its tokens."""

    row: Row
    time: float
    tokens: int

    def add(self, sequence: int, length: int, time: float) -> None:
        self.row.append((sequence, 0, length))
        self.time += time
        self.tokens += length


def infinipipe_units(
    lengths: Sequence[int], k: int, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Units of `k` chunks for the longest sequence, more chunks first."""
    order = longest_first(lengths)
    mesh = list(pairwise(cut(lengths[order[0]], k, work, most_tokens)))
    long = [sequence for sequence in order if lengths[sequence] > mesh[0][1]]
    units = [[[(q, a, min(b, lengths[q]))] for a, b in mesh if a < lengths[q]] for q in long]
    most_tokens = max(b - a for a, b in mesh)
    limit = max(work.between(a, b) for a, b in mesh)
    tails = [_tail(unit[-1], work) for unit in units if unit[-1][0][2] not in {b for _, b in mesh}]
    batched = _fill(order[len(long) :], lengths, tails, most_tokens, limit, work)
    return sorted(units + [[row] for row in batched], key=lambda unit: -len(unit))


def _tail(row: Row, work: CutWork) -> _Bucket:
    (_, start, stop) = row[0]
    return _Bucket(row=row, time=work.between(start, stop), tokens=stop - start)


def _fill(
    short: Sequence[int],
    lengths: Sequence[int],
    tails: list[_Bucket],
    most_tokens: int,
    limit: float,
    work: CutWork,
) -> list[Row]:
    """Put short sequences beside tails and into new rows, which are returned."""
    buckets, opened = tails, []
    for sequence in short:
        length, time = lengths[sequence], work.between(0, lengths[sequence])
        roomy = [bucket for bucket in buckets if bucket.tokens + length <= most_tokens]
        if not roomy:
            opened.append(_Bucket(row=[], time=0.0, tokens=0))
            buckets = [*buckets, opened[-1]]
            roomy = opened[-1:]
        limit = max(limit, min(bucket.time for bucket in roomy) + time)
        fits = [bucket for bucket in roomy if bucket.time + time <= limit]
        min(fits, key=lambda bucket: bucket.time / max(1, bucket.tokens)).add(
            sequence, length, time
        )
    return [bucket.row for bucket in opened]
