"""Both kinds of plans as records: notes, digests, records of before, and checks of the form."""

from dataclasses import replace

import pytest

from hf_flexseq.plan import AnyPlan, Group, MicroBatch, Plan
from hf_flexseq.plan.pipeline import Chunk, PipelinePlan, parse
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Slice

OF_GROUPS = Plan(
    lengths=(9, 2),
    micro_batches=(
        MicroBatch(groups=(Group(ranks=(0, 1), sequences=(0, 1), strategy="ulysses"),)),
    ),
    objective_s=1.5,
    lower_bound_s=1.25,
    planner="auto",
    planning_s=0.01,
    notes=("because",),
)


def replica(length: int, objective_s: float) -> PipelinePlan:
    """One whole sequence through one stage."""
    chunk = Chunk(unit=0, index=0, slices=(Slice(sequence=0, start=0, stop=length),))
    return PipelinePlan(
        lengths=(length,),
        ranks=1,
        stages=1,
        chunks=(chunk,),
        actions=(parse("0F0.0 0B0.0"),),
        schedule="seq1f1b",
        objective_s=objective_s,
        planning_s=0.25,
    )


OF_PIPELINES = StepPlan(
    lengths=(9, 2),
    members=((0,), (1,)),
    plans=(replica(9, 1.5), replica(2, 0.5)),
    notes=("because",),
)
PLANS = [OF_GROUPS, OF_PIPELINES]


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_either_kind_says_what_an_engine_needs(plan: AnyPlan) -> None:
    assert plan.lengths == (9, 2)
    assert plan.objective_s == 1.5
    assert plan.planner in ("auto", "seq1f1b")
    assert plan.planning_s in (0.01, 0.5)
    assert plan.notes == ("because",)
    plan.check_form()


@pytest.mark.parametrize("plan", PLANS)
def test_json_round_trip(plan: Plan | StepPlan) -> None:
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.parametrize("plan", PLANS)
def test_records_without_notes_are_read(plan: Plan | StepPlan) -> None:
    record = plan.to_record()
    del record["notes"]
    assert type(plan).from_record(record) == replace(plan, notes=())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("notes", ["because", [1], 3, None])
def test_notes_are_a_list_of_strings(plan: Plan | StepPlan, notes: object) -> None:
    with pytest.raises(ValueError, match="notes.*must be a"):
        type(plan).from_record(plan.to_record() | {"notes": notes})


@pytest.mark.parametrize("plan", PLANS)
def test_a_record_says_its_version_and_another_one_is_refused(plan: Plan | StepPlan) -> None:
    record = plan.to_record()
    assert record.pop("version") == 1
    assert type(plan).from_record(record) == plan  # of before there were versions
    for version in (2, "1", True, None):
        with pytest.raises(ValueError, match=f"of version {version!r}: .* reads version 1"):
            type(plan).from_record(record | {"version": version})


@pytest.mark.parametrize("plan", PLANS)
def test_notes_are_no_part_of_the_digest(plan: Plan | StepPlan) -> None:
    assert replace(plan, notes=()).digest() == plan.digest()
    assert replace(plan, lengths=(9, 3)).digest() != plan.digest()


def test_the_planning_time_of_a_replica_is_no_part_of_the_digest() -> None:
    slower = tuple(replace(plan, planning_s=9.0) for plan in OF_PIPELINES.plans)
    assert replace(OF_PIPELINES, plans=slower).digest() == OF_PIPELINES.digest()
    worse = tuple(replace(plan, objective_s=9.0) for plan in OF_PIPELINES.plans)
    assert replace(OF_PIPELINES, plans=worse).digest() != OF_PIPELINES.digest()


def test_a_digest_is_the_one_of_traces_from_before_there_were_notes() -> None:
    assert OF_GROUPS.digest() == "c113b538fa2fa31a"


def test_a_form_without_a_topology_is_refused() -> None:
    with pytest.raises(ValueError, match=r"missing \[2\]"):
        replace(OF_GROUPS, lengths=(9, 2, 1)).check_form()
    with pytest.raises(ValueError, match="replicas must hold each of 3 sequences once"):
        replace(OF_PIPELINES, lengths=(9, 2, 1)).check_form()
    with pytest.raises(ValueError, match="expected one plan per replica, got 1 for 2"):
        replace(OF_PIPELINES, plans=OF_PIPELINES.plans[:1]).check_form()
    torn = replace(replica(2, 0.5), actions=(parse("0F0.0"),))
    with pytest.raises(ValueError, match="stage 0 has no 0B0.0"):
        replace(OF_PIPELINES, plans=(OF_PIPELINES.plans[0], torn)).check_form()
