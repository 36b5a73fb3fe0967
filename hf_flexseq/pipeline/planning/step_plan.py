"""One optimizer step over several pipelines: which replica takes which sequences, and the plan of
each replica.

The ranks are stages x replicas x degree: member m of replica r on stage s is rank (s x replicas +
r) x degree + m. Every replica is a separate pipeline. Gradients are summed over replicas once at
the end, so replicas may have different numbers of chunks.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_flexseq.base.values import quoted
from hf_flexseq.pipeline.planning.plan import Chunk, PipelinePlan
from hf_flexseq.plan.records import Lengths, Notes, NumberLists, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan(Record):
    """One optimizer step of pipelines."""

    what: ClassVar[str] = "a step of pipelines"

    lengths: Lengths
    """Tokens per sequence of the step; a sequence's id is its index."""
    members: NumberLists
    """[replicas] Ids of each replica's sequences, ascending; its plan numbers them from 0."""
    plans: tuple[PipelinePlan, ...]
    """[replicas] The plan of each replica."""
    notes: Notes = ()
    """Reasons of the decision, one line each; not in the digest."""

    @property
    def objective_s(self) -> float:
        """Predicted seconds of the step, on its slowest replica."""
        return max((plan.objective_s for plan in self.plans), default=0.0)

    def chunks(self, replica: int) -> tuple[Chunk, ...]:
        """Return the replica's chunks, with sequence ids of the whole step."""
        sequence_of = self.members[replica]  # index in the replica's plan -> id in the step
        chunks = []
        for chunk in self.plans[replica].chunks:
            slices = tuple(
                part._replace(sequence=sequence_of[part.sequence]) for part in chunk.slices
            )
            chunks.append(replace(chunk, slices=slices))
        return tuple(chunks)

    def decision(self) -> dict[str, Any]:
        """Return the record without planning seconds and notes."""
        return {
            "lengths": list(self.lengths),
            "members": [list(ids) for ids in self.members],
            "plans": [plan.decision() for plan in self.plans],
        }

    def check_form(self) -> None:
        """Raise ValueError unless every sequence is on one replica, and each replica's plan is
        legal and has the lengths of its sequences."""
        placed = sorted(sequence for ids in self.members for sequence in ids)
        if placed != list(range(len(self.lengths))):
            raise ValueError(
                f"replicas must hold each of {len(self.lengths)} sequences once: "
                f"{quoted(self.members)}"
            )
        if len(self.members) != len(self.plans):
            raise ValueError(
                f"expected one plan per replica, got {len(self.plans)} for {len(self.members)}"
            )
        for replica, (ids, plan) in enumerate(zip(self.members, self.plans, strict=True)):
            lengths = tuple(self.lengths[sequence] for sequence in ids)
            if plan.lengths != lengths:
                raise ValueError(
                    f"the plan of replica {replica} is for sequences of other lengths: "
                    f"{quoted(plan.lengths)}"
                )
            plan.check_form()
