"""A step runs its micro-batches in order, and makes the inputs of one when the previous one is
launched."""

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from hf_flexseq.attention import SequenceContext
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.inputs import inputs_of
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import DrawnStep, PlannedStep, SourceRow
from hf_flexseq.steps.training_mode import in_training_mode
from tests.plans import one_group, random_plan
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
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

    def make(index):
        events.append(f"made {index}")
        return {"index": index}

    return RankMicroBatches(
        PlannedStep(drawn=DRAWN, plan=random_plan((3,), 1, random.Random(0))),
        indices=indices,
        counts=[3],
        inputs_of=make,
        exchange=None,  # of figures, which nothing asks for
        routes=None,
        device=CPU,
    )


def run(step, events):
    @contextmanager
    def before_last():
        events.append("unreduced")
        yield
        events.append("over")

    for inputs in step.micro_batches(nullcontext(before_last)):
        events.append(f"ran {inputs['index']}")
        step.add(torch.tensor(float(inputs["index"])))
    return float(step.loss)


def test_inputs_are_made_when_the_previous_micro_batch_has_been_launched():
    events = []
    step = step_of([0, 2, 5], events)
    assert events == ["made 0"], "those of the first micro-batch are there when a step begins"
    assert run(step, events) == 7.0
    assert events == [
        *("made 0", "unreduced", "ran 0", "over"),
        *("made 2", "unreduced", "ran 2", "over"),
        *("made 5", "ran 5"),
    ]
    with pytest.raises(AssertionError, match="a step runs once"):
        run(step, [])


# ---- a model is walked through once in a step to be put into training mode


class Counting(nn.Linear):
    """Counts how often it is told its mode."""

    told = 0

    def train(self, mode=True):
        self.told += 1
        return super().train(mode)


def test_a_step_walks_once_and_eval_inside_is_undone_by_train():
    model = nn.Sequential(Counting(1, 1), nn.Dropout())
    model[1].eval()  # as plain training would not leave it, either
    with in_training_mode(model):
        assert model[1].training
        assert model.train() is model
        assert model.train(True) is model
        assert model[0].told == 1
        model.eval()
        assert not model[1].training
        model.train()
        assert model[1].training
    model.train()
    assert model[0].told == 4
    assert "train" not in vars(model)


def test_a_dummy_token_has_no_blocks_of_the_sequences_of_its_step():
    def dummy_of(rank, world_size):
        shard = make_shard(one_group([0], 1, "local"), [9], rank)
        kernel = choose_kernel(CPU, torch.float64, 4)
        columns = {name: torch.arange(shard.tokens) for name in ("input_ids", "labels")}

        def context(shard):
            return SequenceContext(shard, join(), kernel, CPU, blocks={0: ((2, 7),)})

        inputs = inputs_of(shard, columns, CPU, context)
        return inputs["labels"].tolist(), inputs["seq_ctx"].programs.parts.both_ways is not None

    assert run_threads(dummy_of, 2) == [([[*range(9)]], True), ([[-100]], False)]
