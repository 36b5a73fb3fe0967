"""Groups of ranks and micro-batches of groups: the parts of a plan.

    MicroBatch = Group, Group, ...              at the same time, widest first
    Group = contiguous ranks + sequences + strategy

`sequences.py` has the plan and its rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.values import fields_of, items, quoted
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.units import Unit, UnitLayout

GROUP_KEYS = ("ranks", "sequences", "strategy")
UNITS_KEY = "units"  # of a group that has any
MEMORY_KEY = "memory"  # of a micro-batch with a choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that share the attention of some sequences in one micro-batch."""

    ranks: tuple[int, ...]
    """Ranks of the group: contiguous, ascending."""
    sequences: tuple[int, ...]
    """Ids of the group's sequences: indices into `Plan.lengths`."""
    strategy: str
    """Sharing of attention: one of `STRATEGIES`, `local` for one rank alone."""
    units: tuple[Unit, ...] = ()
    """Its sequences that are units of rows with shared prefixes."""

    def __post_init__(self) -> None:
        ranks = self.ranks
        first = ranks[0] if ranks else None
        degree = len(ranks)
        # Most groups are of one rank, which is always contiguous.
        if type(first) is not int or (degree > 1 and ranks != tuple(range(first, first + degree))):
            raise ValueError(
                f"a group's ranks must be whole numbers, contiguous and ascending, got "
                f"{quoted(ranks)}"
            )
        if not self.sequences:
            raise ValueError(f"the group of ranks {quoted(ranks)} holds no sequence")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy {quoted(self.strategy)} must be one of {', '.join(STRATEGIES)}"
            )
        if (self.strategy == "local") != (degree == 1):
            raise ValueError(
                f"strategy {self.strategy!r} does not fit degree {degree}: local means one rank"
            )
        if self.units and not {unit.sequence for unit in self.units} <= set(self.sequences):
            raise ValueError(f"units of {quoted(self.units)} are no sequences of their group")

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def rows(self) -> tuple[int, ...]:
        """Ids of the drawn rows of its sequences: for a unit, of all its rows."""
        if not self.units:
            return self.sequences
        of_units = {unit.sequence: [row for row, _ in unit.rows] for unit in self.units}
        rows: list[int] = []
        for sequence in self.sequences:
            rows += of_units.get(sequence, [sequence])
        return tuple(rows)

    @property
    def trees(self) -> tuple[UnitLayout | None, ...]:
        """For each sequence the tree that attention and recurrences go through, None for a plain
        one; () where all are plain, as units are whose rows are parts of their longest one."""
        layouts = {}
        for unit in self.units:
            if len(unit.attended.nodes) > 1:
                layouts[unit.sequence] = unit.attended
        if not layouts:
            return ()
        return tuple(layouts.get(sequence) for sequence in self.sequences)

    @property
    def start(self) -> int:
        """First rank of the group."""
        return self.ranks[0]

    @property
    def stop(self) -> int:
        """Rank after the last."""
        return self.ranks[-1] + 1

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens of the group's sequences. lengths: of every sequence of the plan."""
        return sum(lengths[sequence] for sequence in self.sequences)

    def tokens_per_rank(self, lengths: Sequence[int]) -> int:
        """Return the maximum tokens per rank of the group: ceil(tokens / degree)."""
        return -(-self.tokens(lengths) // self.degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Groups that run together in one forward and backward."""

    groups: tuple[Group, ...]
    """The groups, widest first."""
    memory: MemoryChoice | None = None
    """The choice of all its ranks for activations; None for the user's setting of the run."""

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        """Return the groups of `rank`, widest first."""
        return tuple(group for group in self.groups if group.start <= rank < group.stop)

    def tokens_per_rank(self, lengths: Sequence[int], world_size: int) -> tuple[int, ...]:
        """Return upper bounds on tokens, [world_size]: sums of ceil(tokens / degree)."""
        tokens = [0] * world_size
        for group in self.groups:
            share = group.tokens_per_rank(lengths)
            for rank in group.ranks:
                tokens[rank] += share
        return tuple(tokens)


def with_ids(micro_batch: MicroBatch, ids: Sequence[int], units: Mapping[int, Unit]) -> MicroBatch:
    """Return a micro-batch over sequences 0, 1, ... as one over these ids. units: by id."""
    groups = []
    for group in micro_batch.groups:
        own = tuple(ids[one] for one in group.sequences)
        of_group = tuple(units[i] for i in own if i in units)
        groups.append(replace(group, sequences=own, units=of_group))
    return replace(micro_batch, groups=tuple(groups))


def widest_first(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups by falling degree, stably."""
    return tuple(sorted(groups, key=lambda group: -group.degree))


def with_longest_first(micro_batch: MicroBatch, lengths: Sequence[int]) -> MicroBatch:
    """Return the micro-batch with the sequences of each group by falling length, then by id. So
    sequences that have a kernel call to themselves come before sequences that share one.

    lengths: tokens of every sequence of the plan.
    """
    groups = []
    for group in micro_batch.groups:
        ids = sorted(group.sequences, key=lambda one: (-lengths[one], one))
        groups.append(replace(group, sequences=tuple(ids)))
    return replace(micro_batch, groups=tuple(groups))


# ---- records


def micro_batch_records(micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
    """Return micro-batches as plain JSON values."""
    records = []
    for micro_batch in micro_batches:
        groups = []
        for group in micro_batch.groups:
            of_group: dict[str, Any] = {
                "ranks": list(group.ranks),
                "sequences": list(group.sequences),
                "strategy": group.strategy,
            }
            if group.units:
                of_group[UNITS_KEY] = [unit.to_record() for unit in group.units]
            groups.append(of_group)
        record: dict[str, Any] = {"groups": groups}
        if micro_batch.memory is not None:
            record[MEMORY_KEY] = micro_batch.memory.to_record()
        records.append(record)
    return records


def micro_batches_of(name: str, records: Any) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a plan's record. Their numbers are checked later."""
    made = []
    for index, record in enumerate(items(name, records)):
        where = f"micro-batch {index}"
        # Records of older versions may have `remap`, for a layout that is not needed.
        record = fields_of(record, where, needed=("groups",), optional=("remap", MEMORY_KEY))
        groups = [_group(group, where) for group in items(f"{where}, groups", record["groups"])]
        memory = record.get(MEMORY_KEY)
        choice = None if memory is None else MemoryChoice.from_record(memory)
        made.append(MicroBatch(groups=tuple(groups), memory=choice))
    return tuple(made)


def _group(record: Any, where: str) -> Group:
    # Plans arrive from the planning process in every step: no call per valid key.
    try:
        made = Group(
            ranks=tuple(record["ranks"]),
            sequences=tuple(record["sequences"]),
            strategy=record["strategy"],
            units=tuple(Unit.from_record(one) for one in record.get(UNITS_KEY, ())),
        )
        is_group = len(record) == len(GROUP_KEYS) + (UNITS_KEY in record)
    except (AttributeError, KeyError, TypeError):
        is_group = False
    if not is_group:
        keys = ", ".join(GROUP_KEYS)
        raise ValueError(f"{where}: {quoted(record)} is not a group: expected the keys {keys}")
    return made


# ---- the form


def check_laminar(micro_batch: MicroBatch, where: str) -> None:
    """Raise ValueError unless the groups stand widest first and any two are disjoint or nested.

    A sweep over the groups by first rank keeps a stack of open groups: a group must end before the
    innermost open one.
    """
    degrees = [group.degree for group in micro_batch.groups]
    if degrees != sorted(degrees, reverse=True):
        raise ValueError(
            f"{where}: groups must be ordered widest first, got degrees {quoted(degrees)}"
        )
    # A group of one rank is always nested or disjoint.
    shared = [group for group in micro_batch.groups if group.degree > 1]
    open_stops: list[int] = []  # ends of the open groups, the innermost last
    for group in sorted(shared, key=lambda group: (group.start, -group.stop)):
        while open_stops and open_stops[-1] <= group.start:
            open_stops.pop()  # ended before this group begins
        if open_stops and group.stop > open_stops[-1]:
            raise ValueError(
                f"{where}: ranks {group.start}..{group.stop - 1} partly overlap another group"
            )
        open_stops.append(group.stop)
