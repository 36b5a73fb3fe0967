"""InfiniPipe's sequence processor (arXiv 2509.21275, algorithm 1), re-created from the paper's
text.

1. The longest sequence is cut into K slices of equal time: a mesh, and with it the most time and
   tokens of a chunk.
2. Every other long sequence is cut on that mesh, which leaves a tail; the others are short.
3. Buckets begin as tails, kept in order of time per token.
4. Short sequences, longest first, go into the first bucket that keeps both limits. If even the
   emptiest bucket would have too many tokens they open a new one; if only time forbids it
   everywhere, the limit rises to the least loaded bucket's time with the sequence.
5. A bucket with a tail is a hybrid chunk, the last of its sequence; one without is a batched
   chunk, its own unit.

Rejected: packing tails together. Two long sequences would have to be in flight at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_flexseq.pipeline.planning.cuts import CutWork, cut
from hf_flexseq.pipeline.planning.units import Row, Unit
from hf_flexseq.plan.shard import Slice
from hf_flexseq.planner.task import longest_first

# A moment at which a stage would hold too much: bytes above its limit, and for every chunk then in
# flight the diagonal of its backward and the bytes that one recomputed
# layer saves.
Moment = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(slots=True)
class _Bucket:
    """A row in the making."""

    row: Row
    time: float
    """Work of the row's slices, nanoseconds."""
    tokens: int

    def add(self, sequence: int, length: int, time: float) -> None:
        """Put a whole sequence at the end of the row."""
        self.row.append(Slice(sequence, 0, length))
        self.time += time
        self.tokens += length


def infinipipe_units(
    lengths: Sequence[int], k: int, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Return units, the longest sequence in `k` chunks or more; units of most chunks first."""
    # 1. the mesh
    order = longest_first(lengths)
    cuts = cut(lengths[order[0]], k, work, most_tokens)
    mesh = list(pairwise(cuts))
    most_tokens = max(stop - start for start, stop in mesh)
    most_time = max(work.between(start, stop) for start, stop in mesh)

    # 2. long sequences on the mesh, 3. and their tails
    long = [sequence for sequence in order if lengths[sequence] > cuts[1]]
    short = order[len(long) :]
    units = [_on_mesh(sequence, lengths[sequence], mesh) for sequence in long]
    tails = []
    for unit in units:
        last_row = unit[-1]
        _, start, stop = last_row[0]
        if stop not in cuts[1:]:
            tails.append(
                _Bucket(row=last_row, time=work.between(start, stop), tokens=stop - start)
            )

    # 4. and 5. short sequences next to the tails and in new rows
    for row in _fill(short, lengths, tails, most_tokens, most_time, work):
        units.append([row])
    return sorted(units, key=lambda unit: -len(unit))


def _on_mesh(sequence: int, length: int, mesh: Sequence[tuple[int, int]]) -> Unit:
    """Return a sequence of `length` tokens, cut where the longest one is."""
    unit = []
    for start, stop in mesh:
        if start < length:
            unit.append([Slice(sequence, start, min(stop, length))])
    return unit


def _fill(
    short: Sequence[int],
    lengths: Sequence[int],
    tails: list[_Bucket],
    most_tokens: int,
    most_time: float,
    work: CutWork,
) -> list[Row]:
    """Put short sequences, longest first, into rows of tails and new ones; return the new rows."""
    buckets = list(tails)
    opened: list[_Bucket] = []
    for sequence in short:
        length = lengths[sequence]
        time = work.between(0, length)
        roomy = [bucket for bucket in buckets if bucket.tokens + length <= most_tokens]
        if not roomy:
            new = _Bucket(row=[], time=0.0, tokens=0)
            opened.append(new)
            buckets.append(new)
            roomy = [new]
        most_time = max(most_time, min(bucket.time for bucket in roomy) + time)
        fits = [bucket for bucket in roomy if bucket.time + time <= most_time]
        chosen = min(fits, key=lambda bucket: bucket.time / max(1, bucket.tokens))
        chosen.add(sequence, length, time)
    return [bucket.row for bucket in opened]
