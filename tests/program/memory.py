"""Which memory the values of a program lie in: a view lies in that of another value.

A *place* is a range of rows of the value whose memory it is. A part of rows has a place of its
own; any other view is taken to fill all that it is a view of.
"""

import math
from typing import NamedTuple

# Operations whose results lie in the memory of the value that they read,
SAME_ROWS = frozenset(("part", "heads", "columns", "unpair"))  # with rows that are rows there,
OTHER_ROWS = frozenset(("turned", "arrived_heads"))  # or with other rows.
VIEWS = SAME_ROWS | OTHER_ROWS


class Place(NamedTuple):
    """Where a value lies."""

    memory: int  # number of the value whose memory it is
    start: int  # first row of that value
    stop: int
    has_rows: bool  # whether the rows from `start` to `stop` are the rows of the value

    def overlaps(self, other):
        """Whether two places have some row in common."""
        is_same = self.memory == other.memory
        return is_same and self.start < other.stop and other.start < self.stop


def places_of(program):
    """Where each value of a program lies, by its number."""
    places = [Place(value.number, 0, value.rows, True) for value in program.all_values]
    for one in program.instructions:
        if one.operation in VIEWS:
            for number in one.outs:
                places[number] = _place_of_view(one, places[one.ins[0]])
    return places


def _place_of_view(one, viewed):
    """The place of a view that an instruction makes of what lies at `viewed`."""
    if one.operation == "part" and viewed.has_rows:
        start, stop = one.constants
        return viewed._replace(start=viewed.start + start, stop=viewed.start + stop)
    return viewed._replace(has_rows=viewed.has_rows and one.operation in SAME_ROWS)


def nbytes(value, shape):
    """The bytes of a value, in a layer of this shape."""
    return math.prod(value.shape) * shape.item_bytes(value.dtype)
