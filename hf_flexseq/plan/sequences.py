"""The plan of one optimizer step: which ranks work together on which sequences, as frozen data.

    Plan = MicroBatch, MicroBatch, ...          one after the other
    MicroBatch = Group, Group, ...              at the same time, widest first
    Group = contiguous ranks + sequences + strategy

A rank may be in several groups of a micro-batch, but any two groups either share no rank or one
contains the other (a laminar family). Every rank walks through its groups in the plan's order,
widest first, so two ranks that share several groups meet in the same order, and no plan can
deadlock.

Nothing here decides anything: planners make plans, `check` refuses the illegal ones, `shard.py`
says what each rank holds, the executing half obeys.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_flexseq.topology import Topology

STRATEGIES = ("local", "ulysses", "zigzag", "balanced", "allgather", "hybrid")


class PlanInfeasible(ValueError):
    """No plan can hold these sequences. The message names the binding limit, the sequence and what
    to raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that share the attention of some sequences in one micro-batch.

    ranks: contiguous, ascending. sequences: ids, indices into `Plan.lengths`. strategy: one of
    `STRATEGIES`.
    """

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    strategy: str

    def __post_init__(self) -> None:
        if not self.ranks or self.ranks != tuple(
            range(self.ranks[0], self.ranks[0] + len(self.ranks))
        ):
            raise ValueError(f"a group's ranks must be contiguous and ascending, got {self.ranks}")
        if not self.sequences:
            raise ValueError(f"the group of ranks {self.ranks} holds no sequence")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        if (self.strategy == "local") != (self.degree == 1):
            raise ValueError(
                f"strategy {self.strategy!r} does not fit degree {self.degree}: "
                f"local means one rank"
            )

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def start(self) -> int:
        return self.ranks[0]

    @property
    def stop(self) -> int:
        return self.ranks[-1] + 1

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the group's sequences together."""
        return sum(lengths[i] for i in self.sequences)

    def tokens_per_rank(self, lengths: Sequence[int]) -> int:
        """The most tokens a rank of the group holds for it: ceil(tokens / degree)."""
        return -(-self.tokens(lengths) // self.degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Groups that run together in one forward and backward, widest first.

    remap: whether tokens stand evenly on all ranks outside of attention, and come to their groups
    in every layer.
    """

    groups: tuple[Group, ...]
    remap: bool = False

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        """The groups `rank` works in, widest first."""
        return tuple(g for g in self.groups if g.start <= rank < g.stop)

    def tokens_per_rank(self, lengths: Sequence[int], world_size: int) -> tuple[int, ...]:
        """Upper bound on the tokens of each rank: the sum over its groups of ceil(tokens /
        degree)."""
        held = [0] * world_size
        for group in self.groups:
            share = group.tokens_per_rank(lengths)
            for rank in group.ranks:
                held[rank] += share
        return tuple(held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One optimizer step.

    lengths: tokens of each sequence; a sequence's id is its index. objective_s, lower_bound_s:
    modelled seconds of the step and of the best conceivable one. planner: who made it. planning_s:
    seconds it took (not in the digest).
    """

    lengths: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    objective_s: float
    lower_bound_s: float
    planner: str
    planning_s: float

    def digest(self) -> str:
        """Hex digest of all but `planning_s`: equal on every rank and every run of the same
        decision."""
        record = json.dumps(
            replace(self, planning_s=0.0).to_record(), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(record.encode()).hexdigest()[:16]

    def degrees(self) -> dict[int, int]:
        """How many groups of each degree the plan has, ascending by degree."""
        groups = [g.degree for mb in self.micro_batches for g in mb.groups]
        return {degree: groups.count(degree) for degree in sorted(set(groups))}

    def to_record(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "lengths": list(self.lengths),
            "micro_batches": [
                _micro_batch_record(micro_batch) for micro_batch in self.micro_batches
            ],
            "objective_s": self.objective_s,
            "lower_bound_s": self.lower_bound_s,
            "planner": self.planner,
            "planning_s": self.planning_s,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Plan":
        """The inverse of `to_record`. Raises ValueError for anything that is no plan."""
        try:
            micro_batches = tuple(
                MicroBatch(
                    groups=tuple(
                        Group(
                            ranks=tuple(g["ranks"]),
                            sequences=tuple(g["sequences"]),
                            strategy=g["strategy"],
                        )
                        for g in micro_batch["groups"]
                    ),
                    remap=micro_batch.get("remap", False),
                )
                for micro_batch in record["micro_batches"]
            )
            return cls(
                lengths=tuple(record["lengths"]),
                micro_batches=micro_batches,
                objective_s=record["objective_s"],
                lower_bound_s=record["lower_bound_s"],
                planner=record["planner"],
                planning_s=record["planning_s"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not a plan: {error!r} (a plan has the keys of Plan.to_record)"
            ) from error

    def to_json(self) -> str:
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        return cls.from_record(json.loads(text))


def _micro_batch_record(micro_batch: MicroBatch) -> dict[str, Any]:
    groups = [
        {"ranks": list(g.ranks), "sequences": list(g.sequences), "strategy": g.strategy}
        for g in micro_batch.groups
    ]
    return {"groups": groups, "remap": True} if micro_batch.remap else {"groups": groups}


def widest_first(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The order in which a micro-batch holds its groups: by falling degree, equal ones as
    given."""
    return tuple(sorted(groups, key=lambda g: -g.degree))


def check(plan: Plan, topology: Topology, max_tokens_per_rank: int | None = None) -> None:
    """Raise ValueError, saying where, unless `plan` is legal on `topology`.

    Legal: every sequence in exactly one group; groups allowed by the topology, laminar and widest
    first in each micro-batch; a token for every rank where they are remapped; no rank above
    `max_tokens_per_rank` tokens in a micro-batch, if that is given.
    """
    _check_coverage(plan)
    for index, micro_batch in enumerate(plan.micro_batches):
        where = f"micro-batch {index}"
        for group in micro_batch.groups:
            if not topology.allows(group.start, group.stop):
                raise ValueError(
                    f"{where}: ranks {group.start}..{group.stop - 1} are neither inside one node "
                    f"nor whole nodes of "
                    f"{topology.nodes} x {topology.ranks_per_node}"
                )
        _check_laminar(micro_batch, where)
        if (
            micro_batch.remap
            and sum(g.tokens(plan.lengths) for g in micro_batch.groups) < topology.world_size
        ):
            raise ValueError(
                f"{where}: fewer tokens than ranks cannot be spread over all of them (remap)"
            )
        if max_tokens_per_rank is not None:
            held = micro_batch.tokens_per_rank(plan.lengths, topology.world_size)
            worst = max(range(len(held)), key=held.__getitem__)
            if held[worst] > max_tokens_per_rank:
                raise ValueError(
                    f"{where}: rank {worst} holds {held[worst]} tokens, the limit is "
                    f"{max_tokens_per_rank}"
                )


def _check_coverage(plan: Plan) -> None:
    placed = sorted(i for mb in plan.micro_batches for g in mb.groups for i in g.sequences)
    if placed != list(range(len(plan.lengths))):
        missing = sorted(set(range(len(plan.lengths))) - set(placed))
        repeated = sorted({i for i in placed if placed.count(i) > 1})
        unknown = sorted(set(placed) - set(range(len(plan.lengths))))
        raise ValueError(
            f"sequences missing {missing}, placed more than once {repeated}, unknown {unknown}"
        )
    if any(length < 1 for length in plan.lengths):
        raise ValueError(f"sequence {plan.lengths.index(min(plan.lengths))} has no token")


def _check_laminar(micro_batch: MicroBatch, where: str) -> None:
    """Groups widest first, and pairwise disjoint or nested. A sweep by start rank with a stack of
    open groups."""
    degrees = [g.degree for g in micro_batch.groups]
    if degrees != sorted(degrees, reverse=True):
        raise ValueError(f"{where}: groups must stand widest first, got degrees {degrees}")
    open_stops: list[int] = []
    for group in sorted(micro_batch.groups, key=lambda g: (g.start, -g.stop)):
        while open_stops and open_stops[-1] <= group.start:
            open_stops.pop()
        if open_stops and group.stop > open_stops[-1]:
            raise ValueError(
                f"{where}: ranks {group.start}..{group.stop - 1} partly overlap another group"
            )
        open_stops.append(group.stop)
