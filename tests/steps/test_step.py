"""A step runs its micro-batches in order, and makes the inputs of one when the one before is
launched."""

from contextlib import contextmanager

import pytest
import torch

from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.steps.exchange import SourceRow
from hf_flexseq.steps.lookahead import DrawnStep
from hf_flexseq.steps.step import OptimizerStep

ALONE = Group(ranks=(0,), sequences=(0,), strategy="local")
DRAWN = DrawnStep(
    number=0,
    request=0,
    row=SourceRow(columns={}, lengths=(3,)),
    lengths=(3,),
    sources=(0,),
    targets=(2,),
)


def step_of(indices, events):
    """A step whose inputs say when they are made."""

    def make():
        for index in indices:
            events.append(f"made {index}")
            yield index, {"index": index}

    plan = Plan(
        lengths=(3,),
        micro_batches=(MicroBatch(groups=(ALONE,)),),
        objective_s=1.0,
        lower_bound_s=1.0,
        planner="auto",
        planning_s=0.0,
    )
    return OptimizerStep(DRAWN, plan, indices, make(), waited_s=0.0, device=torch.device("cpu"))


def run(step, events):
    @contextmanager
    def before_last():
        events.append("unreduced")
        yield

    def forward_backward(inputs):
        events.append(f"ran {inputs['index']}")
        return torch.tensor(float(inputs["index"]))

    return float(step.run(forward_backward, before_last))


def test_inputs_are_made_when_the_micro_batch_before_has_been_launched():
    events = []
    step = step_of([0, 2, 5], events)
    assert events == ["made 0"], "those of the first micro-batch are there when a step begins"
    assert run(step, events) == 7.0
    assert events == [
        *("made 0", "unreduced", "ran 0"),
        *("made 2", "unreduced", "ran 2"),
        *("made 5", "ran 5"),
    ]


def test_a_step_runs_once():
    step = step_of([4], [])
    assert run(step, []) == 4.0
    with pytest.raises(AssertionError, match="a step runs once"):
        run(step, [])
