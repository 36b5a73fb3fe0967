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
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hf_flexseq.base.values import (
    MAX_RANKS,
    MAX_TOKENS,
    VERSION,
    are_whole,
    duration,
    fields_of,
    items,
    quoted,
    wholes,
    word,
    words,
)
from hf_flexseq.plan.groups import (
    Group,
    MicroBatch,
    check_laminar,
    micro_batch_of,
    micro_batch_record,
)
from hf_flexseq.plan.records import Record

# The keys of a plan's record, besides `notes` and `version`.
KEYS = ("lengths", "micro_batches", "objective_s", "lower_bound_s", "planner", "planning_s")


class PlanInfeasible(ValueError):
    """No plan can hold these sequences.

    The message names the binding limit, the sequence and what to raise.
    """


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

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all micro-batches."""
        return tuple(chain.from_iterable(batch.groups for batch in self.micro_batches))

    def degrees(self) -> dict[int, int]:
        """Return how many groups of each degree the plan has, ascending by degree."""
        counts = Counter(group.degree for group in self.groups)
        return dict(sorted(counts.items()))

    def to_record(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "version": VERSION,
            "lengths": list(self.lengths),
            "micro_batches": [micro_batch_record(batch) for batch in self.micro_batches],
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
        made = [micro_batch_of(batch, index) for index, batch in enumerate(batches)]
        plan = cls(
            lengths=wholes("lengths", values["lengths"], least=1, most=MAX_TOKENS),
            micro_batches=tuple(made),
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
            check_laminar(micro_batch, f"micro-batch {index}")


# ---- records


def _check_numbers(plan: Plan) -> None:
    """Raise ValueError unless all ranks and sequences in the plan's groups are whole numbers.

    A plan may have a thousand groups: one look at all their numbers takes a tenth of one at each.
    """
    groups = plan.groups
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
    placed = Counter(chain.from_iterable(group.sequences for group in plan.groups))
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
