"""Samples that serve several optimizer steps: the later steps are planned while the first one
runs, and trained as the plain trainer does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from hf_flexseq import FlexSeqArguments
from tests.hf.objectives import (
    FLOAT32_BOUND,
    OPTIONS,
    Case,
    assert_alike,
    compare,
    make_trainer,
    save_inputs,
)
from tests.hf.trainers import difference, flexseq_class, trained
from tests.ranks import run_cases

# 4 slices, gone through twice: 4 steps of 2 batches
SPANNING = Case(
    kind="grpo",
    accumulation=2,
    steps=6,
    lookahead=4,
    settings={"steps_per_generation": 4, "num_iterations": 2},
)


@pytest.mark.processes
def test_two_ranks_train_as_the_plain_trainer_does(tmp_path):
    save_inputs(tmp_path)
    between = {"eval_strategy": "steps", "eval_steps": 3}
    evaluated = replace(SPANNING, steps=5, settings={**SPANNING.settings, **between})
    # a step of two generation batches, and at the epoch's end one of fewer batches
    common = {"kind": "grpo", "lookahead": 4, "settings": {"steps_per_generation": 4}}
    uneven = Case(accumulation=3, steps=4, rows=16, **common)
    for by_rank in run_cases(compare, 2, [(tmp_path, evaluated), (tmp_path, uneven)]):
        for apart in by_rank:
            assert apart.figures > 20
            assert_alike(apart, weights=FLOAT32_BOUND)


def trained_twice(is_ours, folder):
    """What two runs of one trainer make, of which the first ends amid a generation batch."""
    torch.manual_seed(5)
    trainer = make_trainer(replace(SPANNING, steps=3), is_ours, folder)
    first, second = trained(trainer), trained(trainer)
    return replace(second, start=first.start, log=first.log + second.log)


@pytest.mark.processes
def test_a_second_training_goes_on_with_samples_of_the_first(tmp_path):
    save_inputs(tmp_path)
    apart = difference(trained_twice(False, tmp_path), trained_twice(True, tmp_path))
    assert_alike(apart, weights=FLOAT32_BOUND)


class CountsPlans(TrainerCallback):
    """Notes how many steps have been given to the planner when a step ends."""

    def __init__(self):
        self.counts = []
        self.engine = None

    def on_step_end(self, args, state, control, **given):
        self.counts.append(self.engine._training._next_request)


def planned(folder, lookahead, cls=True):
    """Plans given to the planner when each step ends, and the weights after training."""
    counts = CountsPlans()
    options = FlexSeqArguments(**OPTIONS, lookahead=lookahead)
    trainer = make_trainer(SPANNING, cls, folder, flexseq_args=options, callbacks=[counts])
    counts.engine = trainer.flexseq
    return trained(trainer).weights, counts.counts


class CutsShort(GRPOTrainer):
    """Leaves out the last token of the completions of every third batch."""

    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        if self._step % 3:
            return inputs
        mask = inputs["completion_mask"].clone()
        mask[:, -1] = 0
        return {**inputs, "completion_mask": mask}


@pytest.mark.processes
def test_steps_of_one_generation_batch_are_planned_ahead(tmp_path):
    save_inputs(tmp_path)
    by_class = []
    # with the first step of four two more, and the last when that one ends; but once step 1 was
    # found to be another one than the samples said, no step is planned before it comes
    for cls, wanted in (
        (True, [4, 4, 4, 4, 8, 8]),
        (flexseq_class(CutsShort), [4, 5, 6, 7, 8, 9]),
    ):
        in_place, counts = planned(tmp_path, 0, cls)
        assert cls is not True or counts == [1, 2, 3, 4, 5, 6]
        ahead, counts = planned(tmp_path, 2, cls)
        assert counts == wanted
        for name, weights in in_place.items():
            assert np.array_equal(weights, ahead[name])
        by_class.append(ahead)
    plain, cut = by_class
    assert any(not np.array_equal(cut[name], plain[name]) for name in cut)
