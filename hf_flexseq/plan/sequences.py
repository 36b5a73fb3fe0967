"""The plan of one optimizer step: which ranks work together on which sequences, as frozen data.

    Plan = MicroBatch, MicroBatch, ...          one after the other
    MicroBatch = Group, Group, ...              at the same time, widest first
    Group = contiguous ranks + sequences + strategy

A rank may be in several groups of a micro-batch, but any two groups are disjoint or nested (a
laminar family). Every rank runs its groups in the plan's order, widest first, so ranks that share
several groups meet in the same order. docs/architecture.md derives that no plan can deadlock.

Planners make plans, `check.py` refuses illegal ones, and `shard.py` maps them to tokens of ranks.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, ClassVar

from hf_flexseq.base.records import Form, Seconds
from hf_flexseq.base.values import MAX_RANKS, MAX_TOKENS, are_whole, quoted, wholes
from hf_flexseq.plan.groups import (
    Group,
    MicroBatch,
    check_laminar,
    micro_batch_records,
    micro_batches_of,
)
from hf_flexseq.plan.records import Notes, Record
from hf_flexseq.plan.units import Unit


class PlanInfeasible(ValueError):
    """No plan can hold these sequences. The message names limit, sequence and option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record):
    """One optimizer step of groups."""

    what: ClassVar[str] = "a plan"

    lengths: Annotated[tuple[int, ...], Form(partial(wholes, most=MAX_TOKENS), write=list)]
    """Tokens of each sequence; a sequence's id is its index. A unit of rows that share prefixes
    has the id of its first row, and its other rows have 0 tokens of their own."""
    micro_batches: Annotated[
        tuple[MicroBatch, ...], Form(micro_batches_of, write=micro_batch_records)
    ]
    """Micro-batches, in execution order."""
    objective_s: Seconds
    """Predicted seconds of the step."""
    lower_bound_s: Seconds
    """Lower bound on the predicted seconds of any plan of these sequences."""
    planner: str
    """Name of the planner."""
    planning_s: Seconds
    """Seconds that planning took; not in the digest."""
    notes: Notes = ()
    """Reasons of the decision, one line each; not in the digest."""

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(chain.from_iterable(batch.groups for batch in self.micro_batches))

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units of rows that share prefixes."""
        return tuple(chain.from_iterable(group.units for group in self.groups))

    @property
    def tokens_spared(self) -> int:
        """Tokens of rows that are not held, nor computed, again, since they share them."""
        return sum(sum(unit.row_tokens().values()) - unit.tokens for unit in self.units)

    def degrees(self) -> dict[int, int]:
        """Return the number of groups of each degree, ascending by degree."""
        counts = Counter(group.degree for group in self.groups)
        return dict(sorted(counts.items()))

    def choices(self) -> dict[str, int]:
        """Return the number of micro-batches by their choice for memory, in words; those without
        one are left out."""
        chosen = [str(one.memory) for one in self.micro_batches if one.memory is not None]
        return dict(Counter(chosen))

    @classmethod
    def from_record(cls, record: Any) -> "Plan":
        """Inverse of `to_record`. Raises ValueError for any other record."""
        plan = super(Plan, cls).from_record(record)
        _check_numbers(plan)
        return plan

    def check_form(self) -> None:
        """Raise ValueError unless every sequence has a token and is in exactly one group, and the
        groups of each micro-batch, at least one, are laminar and widest first."""
        _check_coverage(self)
        for index, micro_batch in enumerate(self.micro_batches):
            if not micro_batch.groups:
                raise ValueError(f"micro-batch {index} has no group: leave it out")
            check_laminar(micro_batch, f"micro-batch {index}")


# ---- records


def _check_numbers(plan: Plan) -> None:
    """Raise ValueError unless all ranks and sequences in the plan's groups are whole numbers.

    One check of all numbers of a plan takes a tenth of one check per group.
    """
    groups = plan.groups
    ranks = tuple(chain.from_iterable(group.ranks for group in groups))
    sequences = tuple(chain.from_iterable(group.sequences for group in groups))
    # The constructor of a group compared its ranks, but 1.0 and True equal 1.
    if are_whole(ranks, least=0, most=MAX_RANKS - 1) and are_whole(
        sequences, least=0, most=len(plan.lengths) - 1
    ):
        return
    for group in groups:
        wholes("ranks", group.ranks, most=MAX_RANKS - 1)
        wholes("sequences", group.sequences, most=len(plan.lengths) - 1)


# ---- the form


def _check_coverage(plan: Plan) -> None:
    """Raise ValueError unless every row is in exactly one group, and has tokens there."""
    placed = Counter(chain.from_iterable(group.rows for group in plan.groups))
    # Ids help to find a planner's mistake.
    wanted = set(range(len(plan.lengths)))
    missing = sorted(wanted - set(placed))
    repeated = sorted(sequence for sequence, count in placed.items() if count > 1)
    unknown = sorted(set(placed) - wanted)
    if missing or repeated or unknown:
        raise ValueError(
            f"sequences missing {quoted(missing)}, placed more than once {quoted(repeated)}, "
            f"unknown {quoted(unknown)}"
        )
    inside: set[int] = set()  # rows whose tokens are those of their unit
    for unit in plan.units:
        unit.check()
        if plan.lengths[unit.sequence] != unit.tokens:
            raise ValueError(
                f"unit {unit.sequence} has {unit.tokens} tokens in its nodes and "
                f"{plan.lengths[unit.sequence]} in the plan"
            )
        inside.update(row for row, _ in unit.rows[1:])
    for sequence, length in enumerate(plan.lengths):
        if sequence in inside and length:
            raise ValueError(f"row {sequence} of a unit has {length} tokens of its own")
        if length < 1 and sequence not in inside:
            raise ValueError(f"sequence {sequence} has no token")
