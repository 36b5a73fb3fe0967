"""What is not finite in a step is found, named, and reported once its optimizer step counts."""

import itertools
import logging

import pytest
import torch

from hf_flexseq.steps.nonfinite import NonfiniteWatch

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


def test_a_step_is_reported_once_and_after_the_next_one_was_taken():
    watch = watch_of(bad=torch.tensor([NAN]))
    watch.take(8, LOSS, {"bad": torch.ones(1)})
    assert watch.report()["step"] == 7
    watch.settle(skipped=False)
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
