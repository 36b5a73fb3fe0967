"""Simulated steps of models whose layers read windows."""

from dataclasses import replace

import pytest

from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.simulate import Detail, simulate
from hf_flexseq.timeline import Timeline
from hf_flexseq.topology import Topology

COST = PRESETS["gemma-3-27b-h100"]
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
LENGTHS = (60_000, 1_000)


def simulated(strategy: str, degree: int, layers: int) -> tuple[Timeline, int]:
    """A group with both sequences, simulated, and its nanoseconds by the closed form."""
    group = Group(ranks=tuple(range(degree)), sequences=(0, 1), strategy=strategy)
    plan = Plan(
        lengths=LENGTHS,
        micro_batches=(MicroBatch(groups=(group,)),),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="",
        planning_s=0.0,
    )
    timeline = simulate(plan, TOPOLOGY, COST, sync="lockstep", detail=Detail(layers=layers))
    return timeline, step_ns(COST, plan.micro_batches, LENGTHS, TOPOLOGY, sync="lockstep")


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("strategy, degree", [("local", 1), ("ulysses", 4), ("hybrid", 8)])
def test_without_a_ring_windows_are_the_closed_form(
    strategy: str, degree: int, layers: int
) -> None:
    timeline, expected = simulated(strategy, degree, layers)
    assert timeline.stop == expected


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("degree", [4, 8])
def test_a_ring_takes_its_halos_before_and_after_its_windows(strategy: str, degree: int) -> None:
    timeline, expected = simulated(strategy, degree, 1)
    assert timeline.stop == pytest.approx(expected, rel=0.02)
    shown = [event.label.split(",")[0] for event in timeline.events if event.rank == 1]
    assert [name for name in shown if name == "halo"] == ["halo", "halo"]
    reaches = {event.label for event in timeline.events if event.kind == "compute"}
    assert reaches == {"linear", "attention", "attention, window 1024"}


def test_windows_shorten_the_trips_of_a_ring() -> None:
    full = replace(COST, kinds=())
    plan = Plan(
        lengths=LENGTHS,
        micro_batches=(
            MicroBatch(
                groups=(Group(ranks=tuple(range(8)), sequences=(0, 1), strategy="zigzag"),)
            ),
        ),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="",
        planning_s=0.0,
    )
    moved = []
    for cost in (COST, full):
        timeline = simulate(plan, TOPOLOGY, cost, sync="lockstep")
        moved.append(timeline.share("overlapped") * timeline.stop)
    assert moved[0] == pytest.approx(COST.full_share * moved[1], rel=0.01)
