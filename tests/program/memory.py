"""Which memory the values of a program lie in: a view lies in that of another value.

A *place* is a range of rows of the value whose memory it is. A part of rows has a place of its
own; any other view is taken to fill all that it is a view of.
"""

from typing import NamedTuple

from hf_flexseq.program.instructions import Instruction, LayerShape, Program, RowShape, Value

# Operations whose results lie in the memory of the value that they read,
SAME_ROWS = frozenset(("part", "heads", "columns", "unpair"))  # with rows that are rows there,
OTHER_ROWS = frozenset(("turned", "arrived_heads"))  # or with other rows.
VIEWS = SAME_ROWS | OTHER_ROWS

Shape = LayerShape | RowShape


class Place(NamedTuple):
    """Where a value lies."""

    memory: int
    """Number of the value whose memory it is."""

    start: int
    """First row of that value."""

    stop: int

    has_rows: bool
    """Whether the rows from `start` to `stop` are the rows of the value."""

    def overlaps(self, other: "Place") -> bool:
        """Return whether two places have some row in common."""
        if self.memory != other.memory:
            return False
        return self.start < other.stop and other.start < self.stop


def places_of(program: Program) -> list[Place]:
    """Return where each value of a program lies, by its number."""
    places = [Place(value.number, 0, value.rows, True) for value in program.all_values]
    for one in program.instructions:
        if one.operation in VIEWS:
            for number in one.outs:
                places[number] = _place_of_view(one, places[one.ins[0]])
    return places


def _place_of_view(one: Instruction, viewed: Place) -> Place:
    """Return the place of a view that an instruction makes of what lies at `viewed`."""
    if one.operation == "part" and viewed.has_rows:
        start, stop = one.constants
        return viewed._replace(start=viewed.start + start, stop=viewed.start + stop)
    return viewed._replace(has_rows=viewed.has_rows and one.operation in SAME_ROWS)


def nbytes(value: Value, shape: Shape) -> int:
    """Return the bytes of a value, in a layer of this shape."""
    elements = 1
    for size in value.shape:
        elements *= size
    return elements * shape.item_bytes(value.dtype)
