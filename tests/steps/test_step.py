"""A step runs its micro-batches in order, and makes the inputs of one when the previous one is
launched; peaks of the device's memory and what is not finite are noted meanwhile."""

import itertools
import logging
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost.peak import Peak
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.inputs import inputs_of
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.nonfinite import NonfiniteWatch
from hf_flexseq.steps.peaks import Peaks
from hf_flexseq.steps.source_row import DrawnStep, PlannedStep, SourceRow
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
        routes=None,  # of figures, which nothing asks for
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


# ---- peaks of a device's memory


class Device:
    """Counts what is allocated, as CUDA's allocator does."""

    def __init__(self):
        self.allocated = self.most = 0

    def allocate(self, size):
        self.allocated += size
        self.most = max(self.most, self.allocated)

    def read(self):
        return self.allocated, self.most


def test_blocks_that_set_a_new_peak_are_noted_with_what_was_there_before():
    device = Device()
    device.allocate(100)
    peaks = Peaks(device.read)
    for block, held, left in ((4, 50, 7), (5, 20, 0), (6, 60, 0)):
        with peaks.watching(block):
            device.allocate(held)
            device.allocate(left - held)
    assert peaks.found == {4: Peak(100, 150, 107), 6: Peak(107, 167, 107)}


# ---- what is not finite


NAN, INFINITY = float("nan"), float("inf")
LOSS = torch.tensor(1.0)


def watch_of(*, loss=LOSS, skipped=False, **gradients):
    watch = NonfiniteWatch("raise", rank=0)
    watch.take(7, loss, gradients)
    watch.settle(skipped=skipped)
    return watch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_number_is_found_and_its_parameter_named(dtype):
    fine = torch.full((300, 300), 100.0, dtype=dtype)  # whose norm float16 cannot hold
    for bad, place in itertools.product((NAN, INFINITY, -INFINITY), ((0, 0), (-1, -1))):
        broken = fine.clone()
        broken[place] = bad
        watch = watch_of(fine=fine, broken=broken, empty=fine[:0], other=fine.double())
        assert watch.report() == {"step": 7, "names": ["broken"]}


def test_infinities_that_cancel_out_sparse_gradients_and_the_loss_are_looked_into():
    both = torch.tensor([INFINITY, -INFINITY])
    assert watch_of(both=both).report()["names"] == ["both"]
    with torch.sparse.check_sparse_tensor_invariants():
        rows = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, NAN]), (3,))
    assert watch_of(rows=rows).report()["names"] == ["rows"]
    assert watch_of(loss=torch.tensor(NAN)).report()["names"] == ["the loss"]


def test_finite_steps_and_skipped_steps_are_not_reported():
    bad = torch.tensor([NAN])
    assert watch_of(fine=torch.ones(3)).report() is None
    assert watch_of(bad=bad, skipped=True).report() is None
    watch = NonfiniteWatch("raise", rank=0)
    watch.take(0, LOSS, {"bad": bad})
    assert watch.report() is None, "the optimizer has not had its turn"
    watch.settle(skipped=False)
    watch.forget()
    assert watch.report() is None


def test_all_ranks_raise_alike_with_what_each_has_found():
    names = (["a", "b"], ["the loss", "b", "c", "d", "e"])
    first, last = ({"step": 7, "names": own} for own in names)
    with pytest.raises(FloatingPointError) as raised:
        watch_of().judge([first, None, last])
    message = str(raised.value)
    assert message.startswith(
        "optimizer step 7, counted from 0: NaN or infinity in the loss and in the gradients of "
        "a, b, c and 2 others; "
    )
    assert "\n" not in message
    watch_of().judge([None, None])


def test_it_warns_instead_on_the_first_rank(caplog):
    with caplog.at_level(logging.WARNING):
        for rank in (0, 1):
            NonfiniteWatch("warn", rank=rank).judge([{"step": 7, "names": ["a"]}])
    (record,) = caplog.records
    assert "in the gradients of a; go on" in record.message
