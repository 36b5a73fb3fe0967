"""A planning job for the stages of pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_flexseq.base.records import Constants, Whole
from hf_flexseq.base.registry import PIPELINE_SCHEDULES
from hf_flexseq.pipeline.planning.replicas import make_step_plan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.pipeline.planning.units import PipelineOptions
from hf_flexseq.plan.facts import NO_FACTS, StepFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesJob(Constants):
    """Plan how the chunks of sequences go through the stages of one pipeline or several."""

    what: ClassVar[str] = "a job for stages"

    cost: PipelineCost
    """Nanoseconds and bytes of chunks on every stage."""
    options: PipelineOptions
    """Schedule and limits of one pipeline."""
    replicas: Whole
    """Number of pipelines."""
    kind: str = "stages"

    @property
    def is_quick(self) -> bool:
        """True but where integer programs are solved: the other schedules take 10 to 50 ms for
        512 sequences, a process 150 ms to start."""
        return not PIPELINE_SCHEDULES[self.options.schedule].needs_solver

    def plan(self, lengths: Sequence[int], facts: StepFacts = NO_FACTS) -> StepPlan:
        """Return the plan of one optimizer step. Raises ValueError as `make_step_plan` does, and
        for sequences that see both ways."""
        assert not facts.units, "rows share no prefixes in pipelines"
        if any(facts.later_pairs.values()):
            raise ValueError(
                "a pipeline cannot compute tokens that see both ways, as those of an image do: "
                "set pipeline_parallel_size=1"
            )
        return make_step_plan(lengths, self.cost, self.options, replicas=self.replicas)

    def read(self, record: dict[str, Any]) -> StepPlan:
        """Return the plan whose `to_record` gave `record`."""
        return StepPlan.from_record(record)
