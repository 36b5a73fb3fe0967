"""Facts that a plan depends on, besides the lengths of a step's sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_flexseq.plan.units import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """Facts of a step that its planner is told."""

    units: Sequence[Unit] = ()
    """Sequences that begin alike."""
    later_pairs: Mapping[int, int] = field(default_factory=dict)
    """By id of a sequence with blocks, how many pairs of a query and a later key these have
    (`plan.blocks.later_pairs`)."""
    held_tokens: int = 0
    """Tokens whose memory every rank needs for something else in this step, such as images."""

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self.units or any(self.later_pairs.values()) or self.held_tokens)

    @property
    def arguments(self) -> dict[str, Any]:
        """The facts by name, as `make_plan` takes them."""
        return {
            "units": self.units,
            "later_pairs": self.later_pairs,
            "held_tokens": self.held_tokens,
        }

    def to_record(self) -> dict[str, Any]:
        """Return the facts as plain JSON values; those that a step has."""
        record: dict[str, Any] = {}
        if self.units:
            record["units"] = self.units
        if self.later_pairs:
            record["later_pairs"] = sorted(self.later_pairs.items())
        if self.held_tokens:
            record["held_tokens"] = self.held_tokens
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "StepFacts":
        """Return the facts whose `to_record` gave `record`, which may have more entries."""
        return cls(
            units=[Unit.of(*unit) for unit in record.get("units", ())],
            later_pairs=dict(record.get("later_pairs", ())),
            held_tokens=record.get("held_tokens", 0),
        )


NO_FACTS = StepFacts()
