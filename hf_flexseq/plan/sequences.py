"""The plan of one optimizer step: which ranks work together on which sequences, as frozen data.

    Plan = MicroBatch, MicroBatch, ...          one after the other
    MicroBatch = Group, Group, ...              at the same time, widest first
    Group = contiguous ranks + sequences + strategy

A rank may be in several groups of a micro-batch, but any two groups either share no rank or one
contains the other (a laminar family). Every rank walks through its groups in the plan's order,
widest first, so two ranks that share several groups meet in the same order. docs/architecture.md
shows from there that no plan can deadlock.

Nothing here decides anything: planners make plans, `check.py` refuses the illegal ones, `shard.py`
says what each rank holds, the executing half obeys.

A plan that another rank has sent (`Plan.from_bytes`) keeps the integers it came as. Groups become
objects when they are asked for: a rank's own ones by `MicroBatch.groups_of`, all of them by
`MicroBatch.groups`. Nobody else can tell the difference.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_flexseq.plan.records import Record
from hf_flexseq.plan.wire import PlanArrays, pack, unpack
from hf_flexseq.values import (
    MAX_RANKS,
    MAX_TOKENS,
    VERSION,
    are_whole,
    duration,
    fields_of,
    flag,
    items,
    quoted,
    wholes,
    word,
    words,
)

# How the ranks of a group share the attention of a sequence. attention/ runs them, plan/shard.py
# says which tokens each rank holds.
STRATEGIES = (
    "local",  # one rank, no sharing
    "ulysses",  # tokens are exchanged for heads: each rank attends with some heads to all tokens
    "zigzag",  # a ring: keys and values go round, each rank has a front and a back chunk
    "balanced",  # LightSeq's ring: ranks that are done help those with more keys to see
    "allgather",  # keys and values of all chunks first, then one kernel call
    "hybrid",  # Ulysses inside nodes, a ring across them
)

# The keys of a plan's record, besides `notes` and `version`, and of its parts.
KEYS = ("lengths", "micro_batches", "objective_s", "lower_bound_s", "planner", "planning_s")
GROUP_KEYS = ("ranks", "sequences", "strategy")


class PlanInfeasible(ValueError):
    """No plan can hold these sequences.

    The message names the binding limit, the sequence and what to raise.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that share the attention of some sequences in one micro-batch."""

    ranks: tuple[int, ...]
    """The ranks that work together: contiguous, ascending."""
    sequences: tuple[int, ...]
    """Ids of the group's sequences: indices into `Plan.lengths`."""
    strategy: str
    """How the ranks share attention: one of `STRATEGIES`, `local` for one rank alone."""

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
                f"strategy {quoted(self.strategy)} is none of {', '.join(STRATEGIES)}"
            )
        if (self.strategy == "local") != (degree == 1):
            raise ValueError(
                f"strategy {self.strategy!r} does not fit degree {degree}: local means one rank"
            )

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def start(self) -> int:
        """First rank of the group."""
        return self.ranks[0]

    @property
    def stop(self) -> int:
        """First rank behind the group."""
        return self.ranks[-1] + 1

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens of the group's sequences together.

        lengths: tokens of every sequence of the plan.
        """
        return sum(lengths[sequence] for sequence in self.sequences)

    def tokens_per_rank(self, lengths: Sequence[int]) -> int:
        """Return the most tokens a rank of the group holds for it: ceil(tokens / degree)."""
        return -(-self.tokens(lengths) // self.degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Groups that run together in one forward and backward."""

    groups: tuple[Group, ...]
    """The groups, widest first."""
    remap: bool = False
    """Whether tokens stand evenly on all ranks outside of attention. They then come to their
    groups, and go back, in every layer."""
    _sent: tuple[PlanArrays, int] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """Where a micro-batch that was sent has its groups: the plan's integers, and its own index."""

    @classmethod
    def received(cls, arrays: PlanArrays, index: int) -> "MicroBatch":
        """Return micro-batch `index` of a plan that was sent; its groups are still integers."""
        micro_batch = object.__new__(cls)
        object.__setattr__(micro_batch, "remap", bool(arrays.remap[index]))
        object.__setattr__(micro_batch, "_sent", (arrays, index))
        return micro_batch

    if not TYPE_CHECKING:  # a type checker would believe that there is any attribute

        def __getattr__(self, name: str) -> tuple[Group, ...]:
            """Make the groups of a micro-batch that was sent, the first time they are read."""
            if name != "groups":
                raise AttributeError(f"a MicroBatch has no attribute {name!r}")
            arrays, index = self._sent
            groups = _received_groups(arrays, np.flatnonzero(arrays.batch_of == index))
            object.__setattr__(self, "groups", groups)
            return groups

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        """Return the groups `rank` works in, widest first."""
        if self._sent is None:
            return tuple(group for group in self.groups if group.start <= rank < group.stop)
        arrays, index = self._sent
        groups = arrays.groups_of(rank)
        return _received_groups(arrays, groups[arrays.batch_of[groups] == index])

    def tokens_per_rank(self, lengths: Sequence[int], world_size: int) -> tuple[int, ...]:
        """Return an upper bound on the tokens of each rank, [world_size].

        The bound is the sum of ceil(tokens / degree) over the groups of the rank.
        """
        if self._sent is not None:
            arrays, index = self._sent
            return tuple(arrays.tokens_per_rank(world_size)[index].tolist())
        tokens = [0] * world_size
        for group in self.groups:
            share = group.tokens_per_rank(lengths)
            for rank in group.ranks:
                tokens[rank] += share
        return tuple(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record):
    """One optimizer step of groups."""

    lengths: tuple[int, ...]
    """Tokens of each sequence; a sequence's id is its index."""
    micro_batches: tuple[MicroBatch, ...]
    """The micro-batches, in the order in which they run."""
    objective_s: float
    """Modelled seconds of the step."""
    lower_bound_s: float
    """Modelled seconds that no plan of these sequences can undercut."""
    planner: str
    """Name of the planner that made the plan."""
    planning_s: float
    """Seconds that planning took; not in the digest."""
    notes: tuple[str, ...] = ()
    """Reasons of the decision, one line for people each; not in the digest."""
    _arrays: PlanArrays | None = field(default=None, init=False, repr=False, compare=False)
    """The plan's groups as integers, once they are known; see `arrays`."""

    @property
    def arrays(self) -> PlanArrays:
        """The plan's groups as integers."""
        if self._arrays is None:
            object.__setattr__(self, "_arrays", _arrays_of(self))
        assert self._arrays is not None, "they were just made"
        return self._arrays

    def degrees(self) -> dict[int, int]:
        """Return how many groups of each degree the plan has, ascending by degree."""
        degrees, counts = np.unique(self.arrays.degrees, return_counts=True)
        return dict(zip(degrees.tolist(), counts.tolist(), strict=True))

    def to_bytes(self) -> bytes:
        """Return the plan as rank 0 sends it to the others."""
        rest = {
            "objective_s": self.objective_s,
            "lower_bound_s": self.lower_bound_s,
            "planner": self.planner,
            "planning_s": self.planning_s,
            "notes": self.notes,
        }
        return pack(self.arrays, rest)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Plan":
        """Return the plan `to_bytes` was called on. Raises ValueError for bytes of another size.

        Rank 0 has checked what it sends: nothing is checked again, group by group.
        """
        arrays, rest = unpack(data)
        indices = range(arrays.groups_in.size)
        plan = cls(
            lengths=tuple(arrays.lengths.tolist()),
            micro_batches=tuple(MicroBatch.received(arrays, index) for index in indices),
            objective_s=rest["objective_s"],
            lower_bound_s=rest["lower_bound_s"],
            planner=rest["planner"],
            planning_s=rest["planning_s"],
            notes=tuple(rest["notes"]),
        )
        object.__setattr__(plan, "_arrays", arrays)
        return plan

    def to_record(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "version": VERSION,
            "lengths": list(self.lengths),
            "micro_batches": [_micro_batch_record(batch) for batch in self.micro_batches],
            "objective_s": self.objective_s,
            "lower_bound_s": self.lower_bound_s,
            "planner": self.planner,
            "planning_s": self.planning_s,
            "notes": list(self.notes),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Plan":
        """Return the plan `to_record` was called on. Raises ValueError for any other record."""
        values = fields_of(record, "a plan", needed=KEYS, optional=("notes",))
        batches = items("micro_batches", values["micro_batches"])
        plan = cls(
            lengths=wholes("lengths", values["lengths"], least=1, most=MAX_TOKENS),
            micro_batches=tuple(_micro_batch(batch, index) for index, batch in enumerate(batches)),
            objective_s=duration("objective_s", values["objective_s"]),
            lower_bound_s=duration("lower_bound_s", values["lower_bound_s"]),
            planner=word("planner", values["planner"]),
            planning_s=duration("planning_s", values["planning_s"]),
            notes=words("notes", values.get("notes", ())),
        )
        _check_numbers(plan)
        return plan

    def check_form(self) -> None:
        """Raise ValueError unless every sequence has a token and is in exactly one group, and the
        groups of each micro-batch, at least one, are laminar and widest first."""
        _check_coverage(self)
        for index, micro_batch in enumerate(self.micro_batches):
            if not micro_batch.groups:
                raise ValueError(f"micro-batch {index} has no group: leave it out")
            _check_laminar(micro_batch, f"micro-batch {index}")


def widest_first(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups in a micro-batch's order: by falling degree, equal ones as given."""
    return tuple(sorted(groups, key=lambda group: -group.degree))


# ---- integers


def _arrays_of(plan: Plan) -> PlanArrays:
    """Return the groups of a plan as integers."""
    groups = list(chain.from_iterable(batch.groups for batch in plan.micro_batches))
    return PlanArrays(
        lengths=np.array(plan.lengths, dtype=np.int64),
        groups_in=np.array([len(batch.groups) for batch in plan.micro_batches], dtype=np.int64),
        remap=np.array([batch.remap for batch in plan.micro_batches], dtype=np.int64),
        starts=np.array([group.start for group in groups], dtype=np.int64),
        degrees=np.array([group.degree for group in groups], dtype=np.int64),
        strategies=np.array(
            [STRATEGIES.index(group.strategy) for group in groups], dtype=np.int64
        ),
        members=np.array([len(group.sequences) for group in groups], dtype=np.int64),
        sequences=np.array(
            list(chain.from_iterable(group.sequences for group in groups)), dtype=np.int64
        ),
    )


def _received_groups(arrays: PlanArrays, indices: Any) -> tuple[Group, ...]:
    """Return groups of a plan that was sent. indices: of the groups, [any]."""
    groups = []
    for index in indices.tolist():
        start = int(arrays.starts[index])
        first, stop = arrays.first_member[index : index + 2].tolist()
        groups.append(
            Group(
                ranks=tuple(range(start, start + int(arrays.degrees[index]))),
                sequences=tuple(arrays.sequences[first:stop].tolist()),
                strategy=STRATEGIES[arrays.strategies[index]],
            )
        )
    return tuple(groups)


# ---- records


def _micro_batch_record(micro_batch: MicroBatch) -> dict[str, Any]:
    groups = []
    for group in micro_batch.groups:
        groups.append(
            {
                "ranks": list(group.ranks),
                "sequences": list(group.sequences),
                "strategy": group.strategy,
            }
        )
    record: dict[str, Any] = {"groups": groups}
    if micro_batch.remap:  # no key otherwise: digests of plans without remapping are older than it
        record["remap"] = True
    return record


def _micro_batch(record: Any, index: int) -> MicroBatch:
    """Return micro-batch `index` of a plan's record; the numbers in it are checked later, all at
    once."""
    where = f"micro-batch {index}"
    record = fields_of(record, where, needed=("groups",), optional=("remap",))
    groups = []
    for group in items(f"{where}, groups", record["groups"]):
        # Plans come from the planner's process in every step: no call for what is right.
        try:
            made = Group(
                ranks=tuple(group["ranks"]),
                sequences=tuple(group["sequences"]),
                strategy=group["strategy"],
            )
        except (KeyError, TypeError):
            raise ValueError(f"{where}: {_no_group(group)}") from None
        if len(group) != len(GROUP_KEYS):
            raise ValueError(f"{where}: {_no_group(group)}")
        groups.append(made)
    return MicroBatch(groups=tuple(groups), remap=flag("remap", record.get("remap", False)))


def _no_group(record: Any) -> str:
    """Return what is wrong with the record of a group."""
    return f"{quoted(record)} is no group, which has the keys {', '.join(GROUP_KEYS)}"


def _check_numbers(plan: Plan) -> None:
    """Raise ValueError unless all ranks and sequences in the plan's groups are whole numbers.

    A plan may have a thousand groups: one look at all their numbers takes a tenth of one at each.
    """
    groups = list(chain.from_iterable(batch.groups for batch in plan.micro_batches))
    ranks = tuple(chain.from_iterable(group.ranks for group in groups))
    sequences = tuple(chain.from_iterable(group.sequences for group in groups))
    # The constructor of a group has compared its ranks, but 1.0 and True are equal to 1.
    if are_whole(ranks, least=0, most=MAX_RANKS - 1) and are_whole(
        sequences, least=0, most=len(plan.lengths) - 1
    ):
        return
    for group in groups:
        wholes("ranks", group.ranks, most=MAX_RANKS - 1)
        wholes("sequences", group.sequences, most=len(plan.lengths) - 1)


# ---- the form


def _check_coverage(plan: Plan) -> None:
    """Raise ValueError unless every sequence has a token and is in exactly one group."""
    arrays = plan.arrays
    if arrays.is_covering() and arrays.lengths.min(initial=1) >= 1:
        return
    placed: Counter[int] = Counter()
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            placed.update(group.sequences)
    # Messages name the ids, since a planner's mistake is found by its sequences.
    wanted = set(range(len(plan.lengths)))
    missing = sorted(wanted - set(placed))
    repeated = sorted(sequence for sequence, count in placed.items() if count > 1)
    unknown = sorted(set(placed) - wanted)
    if missing or repeated or unknown:
        raise ValueError(
            f"sequences missing {quoted(missing)}, placed more than once {quoted(repeated)}, "
            f"unknown {quoted(unknown)}"
        )
    if any(length < 1 for length in plan.lengths):
        raise ValueError(f"sequence {plan.lengths.index(min(plan.lengths))} has no token")


def _check_laminar(micro_batch: MicroBatch, where: str) -> None:
    """Raise ValueError unless the groups stand widest first and any two are disjoint or nested.

    A sweep over the groups by their first rank keeps a stack of the groups that are still open: a
    group must end before the innermost of those does.
    """
    degrees = [group.degree for group in micro_batch.groups]
    if degrees != sorted(degrees, reverse=True):
        raise ValueError(f"{where}: groups must stand widest first, got degrees {quoted(degrees)}")
    # A group of one rank is inside another one or beside it, wherever it is.
    shared = [group for group in micro_batch.groups if group.degree > 1]
    open_stops: list[int] = []  # where each open group ends, the innermost last
    for group in sorted(shared, key=lambda group: (group.start, -group.stop)):
        while open_stops and open_stops[-1] <= group.start:
            open_stops.pop()  # ended before this group begins
        if open_stops and group.stop > open_stops[-1]:
            raise ValueError(
                f"{where}: ranks {group.start}..{group.stop - 1} partly overlap another group"
            )
        open_stops.append(group.stop)
