"""Choices for activations in a plan: what they say by layer, their records, and bad ones."""

from dataclasses import replace

import pytest

from hf_flexseq.plan import Plan
from hf_flexseq.plan.memory import MemoryChoice
from tests.plans import group, plan_of_groups

CHOICE = MemoryChoice(
    recomputed_layers=6, inputs_on_host=4, outputs_on_host=2, outputs_recomputed=3, mlp_tiles=8
)


def layers_where(says, layers=8):
    return [layer for layer in range(layers) if says(layer)]


def test_a_choice_says_what_each_layer_does():
    assert layers_where(CHOICE.recomputes) == [0, 1, 2, 3, 4, 5]
    assert layers_where(CHOICE.input_on_host) == [0, 1, 2, 3]
    assert layers_where(CHOICE.output_on_host) == [0, 1]
    assert layers_where(CHOICE.recomputes_output) == [2, 3, 4]
    assert "6 layers recomputed" in str(CHOICE)
    assert "8 tiles" in str(CHOICE)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"recomputed_layers": -1}, "recomputed_layers=-1: must not be negative|at least 0"),
        ({"mlp_tiles": 0}, "mlp_tiles=0: must be at least 1"),
        ({"mlp_tiles": 2.0}, "mlp_tiles=2.0: must be a whole number"),
        ({"recomputed_layers": 2, "inputs_on_host": 3}, "inputs_on_host=3: must be at most 2"),
        (
            {"recomputed_layers": 2, "outputs_on_host": 1, "outputs_recomputed": 2},
            "outputs_recomputed=2: must be at most 1",
        ),
    ],
)
def test_choices_that_no_layer_can_follow_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MemoryChoice(**values)


def test_plans_carry_choices_and_those_without_any_have_the_bytes_of_before():
    plan = plan_of_groups((9, 2), [group(0, 2, 0)], [group(0, 1, 1)])
    assert "memory" not in plan.to_json()
    first, second = plan.micro_batches
    chosen = replace(plan, micro_batches=(replace(first, memory=CHOICE), second))
    for sent in (
        Plan.from_json(chosen.to_json()),
        Plan.from_bytes(chosen.to_bytes()),
    ):
        assert sent == chosen
        assert sent.micro_batches[0].memory == CHOICE
        assert sent.micro_batches[1].memory is None
    assert chosen.digest() != plan.digest()
    record = chosen.to_record()
    record["micro_batches"][0]["memory"]["mlp_tiles"] = 0
    with pytest.raises(ValueError, match="mlp_tiles=0"):
        Plan.from_record(record)
    record["micro_batches"][0]["memory"] = {"tiles": 2}
    with pytest.raises(ValueError, match="not a memory choice"):
        Plan.from_record(record)
