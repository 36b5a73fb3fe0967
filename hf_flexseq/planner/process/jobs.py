"""A planner's job: everything that it needs before its first plan.

A `GroupsJob` asks for plans of groups and micro-batches (`make_plan`), for a whole model. The
registry (`base/registry.py`) names the job that asks for plans of chunks through the stages of a
pipeline.

A job goes to the planning process as a record (`worker.py`), where `kind` tells the two apart.
Code that carries a job needs only the interface `Job`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from hf_flexseq.base.records import Constants
from hf_flexseq.base.registry import PIPELINE_JOB, object_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.sharding import PLAIN, POLICIES, FsdpFigures, FsdpPolicy
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.make import make_plan
from hf_flexseq.planner.memory import promise_ns


class Job(Protocol):
    """Everything a planner can be asked to do."""

    @property
    def is_quick(self) -> bool:
        """True if a plan takes less time than starting a process that plans."""

    def to_record(self) -> dict[str, Any]:
        """Return the job as plain JSON values; `job_from_record` is the inverse."""

    def plan(self, lengths: Sequence[int], facts: StepFacts = NO_FACTS) -> Any:
        """Return the plan of one optimizer step on sequences of `lengths` tokens."""

    def read(self, record: dict[str, Any]) -> Any:
        """Return the plan whose `to_record` gave `record`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsJob(Constants):
    """Plan which ranks work together on which sequences."""

    what: ClassVar[str] = "a job for groups"
    is_quick: ClassVar[bool] = False
    """Plans of many ranks take seconds."""
    topology: Topology
    """The machines and their ranks."""
    cost: CostModel
    """Seconds and bytes of the whole model."""
    options: PlanOptions
    """Options of planning."""
    fsdp: FsdpFigures | None = None
    """Costs of FSDP2's policies; None if it shards nothing, or has no choice."""
    kind: str = "groups"

    def plan(self, lengths: Sequence[int], facts: StepFacts = NO_FACTS) -> Plan:
        """Return the plan of one optimizer step: for ranks that hold parameters or gradients
        between micro-batches, priced as such, where that promises anything and leaves the longest
        sequence room. Raises ValueError as `make_plan` does."""
        policies = () if self.fsdp is None else self._policies(lengths, facts, self.fsdp)
        for policy, cost in policies:
            try:
                plan = make_plan(lengths, self.topology, cost, self.options, **facts.arguments)
            except PlanInfeasible:
                continue
            return replace(plan, notes=(*plan.notes, f"FSDP2: planned for {policy}"))
        return make_plan(lengths, self.topology, self.cost, self.options, **facts.arguments)

    def _policies(
        self, lengths: Sequence[int], facts: StepFacts, fsdp: FsdpFigures
    ) -> Iterator[tuple[FsdpPolicy, CostModel]]:
        """Yield the policies that promise more than the plain one, the fastest first, with the
        cost to plan with. A bound of the user, and images, must have room besides the held
        bytes."""
        bound = self.options.max_tokens_per_rank
        least = 0.0 if bound is None else (bound + facts.held_tokens) * self.cost.token_bytes
        promised = []
        for index, policy in enumerate(POLICIES):
            if policy != PLAIN and fsdp.left_bytes(policy) < least:
                continue
            cost = fsdp.beside_held(self.cost, policy, self.topology.world_size)
            promised_ns = promise_ns(
                lengths, self.topology, cost, self.options, held_tokens=facts.held_tokens
            )
            promised.append((promised_ns + fsdp.once_s(policy) * 1e9, index, policy, cost))
        for _, _, policy, cost in sorted(promised, key=lambda one: one[:2]):
            if policy == PLAIN:
                return
            yield policy, cost

    def read(self, record: dict[str, Any]) -> Plan:
        """Return the plan whose `to_record` gave `record`."""
        return Plan.from_record(record)


def job_from_record(record: Mapping[str, Any]) -> Job:
    """Return the job of a record. Raises ValueError for an unknown kind."""
    kind = record.get("kind")
    if kind == "groups":
        return GroupsJob.from_record(record)
    if kind == "stages":
        job: Job = object_of(PIPELINE_JOB).from_record(record)
        return job
    raise ValueError(f"the kind of a planner's job must be groups or stages, got {kind!r}")
