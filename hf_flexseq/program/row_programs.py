"""The programs that exchange rows of recurrent layers: halos, their gradients, and summaries.

`segments.py` says which rows travel between which ranks.
"""

from collections.abc import Sequence

from hf_flexseq.program.builder import Builder
from hf_flexseq.program.instructions import INPUT, WIDE, Program, RowShape, Value
from hf_flexseq.program.row_exchange import gather, give_back
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.tags import RECURRENT_BACKWARD, RECURRENT_FORWARD
from hf_flexseq.program.zone_segments import RowMessages


def halo(b: Builder, shape: RowShape, segments: RankSegments) -> Program:
    """Compile: edge rows [E, columns] -> rows received from other ranks [R, columns]."""
    found = segments.halo(shape.width)
    edges = b.input((found.edge_rows, shape.columns))
    return b.program((_gather(b, found.messages, edges, RECURRENT_FORWARD),))


def halo_return(b: Builder, shape: RowShape, segments: RankSegments) -> Program:
    """Compile: gradients of received rows [R, columns] -> sums of edge rows [E, columns]."""
    found = segments.halo(shape.width)
    received = b.input((found.received_rows, shape.columns))
    sums = b.zeros((found.edge_rows, shape.columns), WIDE)
    exchanges, returned = give_back(b, found.messages, received, RECURRENT_BACKWARD)
    exchanges.wait()
    for rows, value in returned:
        b.add(sums, rows, value)
    return b.program((b.cast(sums, INPUT),))


def summaries(b: Builder, shape: RowShape, segments: RankSegments, *, after: bool) -> Program:
    """Compile: rows of summaries [n, columns] -> those received [R, columns]."""
    found = segments.neighbours(after=after)
    own = b.input((found.rows.takers, shape.columns))
    tag = RECURRENT_BACKWARD if after else RECURRENT_FORWARD
    return b.program((_gather(b, found.messages, own, tag),))


def _gather(b: Builder, messages: Sequence[RowMessages], own: Value, tag: int) -> Value:
    """Send rows of own [n, columns]; return the received ones [R, columns] by group and peer."""
    exchanges, parts = gather(b, messages, own, tag)
    exchanges.wait()
    return b.join(parts) if parts else b.empty((0, own.shape[1]), own.dtype)
