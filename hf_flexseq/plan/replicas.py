"""One optimizer step over several pipelines: which replica takes which sequences, and the plan of
each.

The ranks are `stages` times `replicas`: stage s of replica r is rank s x replicas + r. A replica
is a pipeline of its own; gradients are summed over replicas once, when all are done, so that they
need not have as many chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

from hf_flexseq.plan.pipeline import Chunk, PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """lengths: of all sequences of the step. members: of each replica, the ids of its sequences,
    ascending; a plan counts them from 0. plans: of each replica."""

    lengths: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    plans: tuple[PipelinePlan, ...]

    def chunks(self, replica: int) -> tuple[Chunk, ...]:
        """The replica's chunks, with the ids of the whole step."""
        members = self.members[replica]
        return tuple(
            replace(
                chunk,
                slices=tuple(
                    replace(part, sequence=members[part.sequence]) for part in chunk.slices
                ),
            )
            for chunk in self.plans[replica].chunks
        )

    def to_record(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "lengths": list(self.lengths),
            "members": [list(ids) for ids in self.members],
            "plans": [plan.to_record() for plan in self.plans],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "StepPlan":
        """The inverse of `to_record`. Raises ValueError for anything that is no such plan."""
        try:
            members = tuple(tuple(ids) for ids in record["members"])
            plans = tuple(PipelinePlan.from_record(plan) for plan in record["plans"])
            return cls(lengths=tuple(record["lengths"]), members=members, plans=plans)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not a step of pipelines: {error!r} (it has the keys of StepPlan.to_record)"
            ) from error
