"""Which rows share their prefixes in a step, and the plan of the remaining work.

    units         of all rows with common prefixes (`steps/prefixes.py`)
 -> worthwhile    those that are predicted to gain, cut where no ranks could hold them
 -> Lengths       tokens of every planned sequence, with the share of causal pairs that units have
 -> micro-batches of sequences, whose groups get their units back (`with_units`)

A unit saves its shared tokens once for every further row. In return it is one piece of work:
where a step has fewer pieces than ranks, single rows may be shared out more evenly. Such a step is
planned with its units whole, cut into as many parts as it takes to give every rank work, and
without them.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.lengths import Lengths, pair_share, with_shares
from hf_flexseq.plan import MicroBatch, Plan
from hf_flexseq.plan.groups import with_ids
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.plan.units import Unit, joined

MOST_GATHERED = 4  # times as many keys as tokens, which these layers save for the backward
LEAST_GAIN = 0.05  # of the seconds of its rows, for which a unit is worth its further calls


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The rows of a step as the sequences of a plan."""

    rows: tuple[int, ...]
    """Tokens of each row as drawn."""
    units: tuple[Unit, ...] = ()
    later_pairs: Mapping[int, int] = field(default_factory=dict)
    """By row that has blocks (`plan/blocks.py`), the pairs of a query and a later key."""
    images: Sequence[ImageSize] = ()
    """Images of the rows, in the order of these."""

    @classmethod
    def of_plan(cls, plan: Plan) -> "SharedRows":
        """Return the rows that a plan holds, and its units."""
        rows = list(plan.lengths)
        for unit in plan.units:
            for row, tokens in unit.row_tokens().items():
                rows[row] = tokens
        return cls(rows=tuple(rows), units=plan.units)

    def part(self, start: int, stop: int) -> "SharedRows":
        """Return rows [start, stop) alone, counted from 0, with their units and images."""
        units = []
        for unit in self.units:
            own = [(row, node) for row, node in unit.rows if start <= row < stop]
            if len(own) > 1:
                made = restricted(unit, own)
                rows = tuple((row - start, node) for row, node in made.rows)
                units.append(made._replace(rows=rows))
        first, last = (
            bisect_left(self.images, row, key=lambda image: image.sequence)
            for row in (start, stop)
        )
        images = [
            replace(image, sequence=image.sequence - start) for image in self.images[first:last]
        ]
        return SharedRows(rows=self.rows[start:stop], units=tuple(units), images=tuple(images))

    @property
    def planned(self) -> tuple[int, ...]:
        """Ids of the sequences: all rows but those inside of a unit that have not its id."""
        inside = {row for unit in self.units for row, _ in unit.rows[1:]}
        return tuple(row for row in range(len(self.rows)) if row not in inside)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of each sequence of the plan by id, 0 inside of a unit."""
        tokens = list(self.rows)
        for unit in self.units:
            for row, _ in unit.rows:
                tokens[row] = 0
            tokens[unit.sequence] = unit.tokens
        return tuple(tokens)

    def by_id(self) -> Lengths:
        """Return the tokens that are held of every row."""
        return with_shares(self.held, self.units, self.later_pairs)

    def lengths(self) -> Lengths:
        """Return the tokens of the planned sequences, in their order."""
        by_id = self.by_id()
        planned = self.planned
        return Lengths([by_id[i] for i in planned], [by_id.shares[i] for i in planned])

    def with_units(self, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
        """Return micro-batches over the planned sequences with ids of rows, and units."""
        planned = self.planned
        units = {unit.sequence: unit for unit in self.units}
        return tuple(with_ids(one, planned, units) for one in micro_batches)


def variants(
    rows: tuple[int, ...],
    units: Sequence[Unit],
    cost: CostModel,
    *,
    cap: int,
    world: int,
    widest: int,
    later_pairs: Mapping[int, int],
) -> Iterator[SharedRows]:
    """Yield the ways to share prefixes that are worth a plan, the most sharing first.

    rows: tokens of each. cap: tokens that a rank can hold. world: ranks. widest: ranks that may
    have a unit together. later_pairs: of rows with blocks.
    """
    most = cap * widest
    kept = worthwhile(rows, units, cost, most=most)
    whole = SharedRows(rows=rows, units=kept, later_pairs=later_pairs)
    yield whole
    if not kept:
        return
    # The rest is for steps in which some ranks would wait for those that have a unit.
    seconds = [unit_s(unit, cost) for unit in kept]
    total_s = sum(seconds)
    alone = set(whole.planned) - {unit.sequence for unit in kept}
    planned_s = total_s + sum(_row_s(rows[row], cost) for row in alone)
    longest_s = max(seconds) / widest
    if len(whole.planned) >= world and longest_s <= planned_s / world:
        return
    parts = []
    for unit, own_s in zip(kept, seconds, strict=True):
        # as many parts as the ranks that its share of the work would keep busy
        count = round(world * own_s / total_s)
        parts += cut(unit, max(unit.tokens // max(count, 1), _longest(unit)))
    cut_units = worthwhile(rows, parts, cost, most=most)
    if cut_units != kept:
        yield replace(whole, units=cut_units)
    yield replace(whole, units=())


def worthwhile(
    rows: Sequence[int], units: Sequence[Unit], cost: CostModel, *, most: int
) -> tuple[Unit, ...]:
    """Return the units that are predicted to gain `LEAST_GAIN`, cut to `most` tokens."""
    kept = []
    for unit in units:
        for part in cut(unit, most):
            alone_s = sum(_row_s(rows[row], cost) for row, _ in part.rows)
            gains = len(part.rows) > 1 and unit_s(part, cost) <= (1 - LEAST_GAIN) * alone_s
            if gains and _gathered(part, cost) <= MOST_GATHERED * part.tokens:
                kept.append(part)
    return tuple(sorted(kept, key=lambda unit: unit.sequence))


def unit_s(unit: Unit, cost: CostModel) -> float:
    """Return the seconds of a unit on one rank."""
    return _alone_s(unit.tokens, cost, pair_share(unit))


def _gathered(unit: Unit, cost: CostModel) -> int:
    """Return the keys that the layers with the widest window or chunk gather for a unit."""
    if not cost.widest_window:
        return 0
    widest = cost.widest_window - 1
    return unit.tokens + sum(min(widest, before) for before in unit.attended.before)


def _row_s(tokens: int, cost: CostModel) -> float:
    """Return the seconds of a row by itself on one rank."""
    return _alone_s(tokens, cost, 1.0)


@functools.lru_cache(maxsize=4096)
def _alone_s(tokens: int, cost: CostModel, share: float) -> float:
    """Return the seconds of a sequence on one rank, with its share of the causal pairs, and of its
    experts."""
    terms = cost.terms(np.array([tokens]), 1, "local", False, np.array([share]))
    return float(terms.sum()) + (cost.token_s - cost.linear_s) * tokens


def _longest(unit: Unit) -> int:
    """Return the tokens of the longest row of a unit."""
    return max(unit.row_tokens().values())


# ---- cutting


def cut(unit: Unit, most: int) -> list[Unit]:
    """Return units of the same rows, each of at most `most` tokens if its rows are: neighbours in
    the tree stay together, and each part holds the nodes that it shares with others."""
    if unit.tokens <= most:
        return [unit]
    parts: list[Unit] = []
    members: list[tuple[int, int]] = []
    held: set[int] = set()  # nodes of the members
    tokens = 0
    for row, last in sorted(unit.rows, key=lambda row: (unit.layout.starts[row[1]], row[0])):
        path = unit.layout.path(last)
        further = sum(unit.nodes[node].tokens for node in path if node not in held)
        if members and tokens + further > most:
            parts.append(restricted(unit, members))
            members, held, further = [], set(), unit.layout.ends[last]
            tokens = 0
        members.append((row, last))
        held.update(path)
        tokens += further
    return [*parts, restricted(unit, members)]


def restricted(unit: Unit, rows: Sequence[tuple[int, int]]) -> Unit:
    """Return the unit of some of its rows, given as (row, last node): nodes that no longer branch
    are joined with their child."""
    used = sorted({node for _, last in rows for node in unit.layout.path(last)})
    nodes, places = joined(unit.nodes, used, ends={last for _, last in rows})
    return Unit(nodes, tuple(sorted((row, places[last]) for row, last in rows)))
