"""A resumed run that would draw another number of samples in a step is refused with what fits;
other factors of the same number are named in the log."""

import pytest

from hf_flexseq.hf.trainer.whole_checkpoints import Factors, check_factors
from tests.hf.test_saving import losses_of, make_trainer


def factors(batch, accumulation, processes):
    return Factors(batch=batch, accumulation=accumulation, processes=processes)


def advice(batch, accumulation):
    return (
        f"set per_device_train_batch_size={batch} and gradient_accumulation_steps={accumulation}"
    )


PRODUCT = "(per_device_train_batch_size x gradient_accumulation_steps x processes)"
CHANGES = "the data order would change; "


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            factors(4, 4, 2),
            f"12 sequences per optimizer step, this run draws 32 {PRODUCT}: {CHANGES}"
            + advice(2, 3),
        ),
        (
            factors(5, 1, 1),
            CHANGES + "on 1 process the product of per_device_train_batch_size and "
            "gradient_accumulation_steps must be 12",
        ),
        (factors(2, 2, 5), CHANGES + "resume on a number of processes that divides 12"),
    ],
)
def test_another_number_of_samples_is_refused_with_what_fits(now, said):
    marker = {"sequences_per_step": 12, "factors": factors(2, 3, 2).to_record()}
    with pytest.raises(ValueError) as refused:
        check_factors("out", marker, now)
    assert str(refused.value).startswith("out was trained with ")
    assert str(refused.value).endswith(said)


def test_a_checkpoint_that_knows_the_product_alone_is_held_to_that(caplog):
    marker = {"sequences_per_step": 12}
    check_factors("out", marker, factors(3, 1, 4))
    check_factors("out", {}, factors(1, 1, 1))
    with pytest.raises(ValueError, match="on 2 processes the product of .* must be 6"):
        check_factors("out", marker, factors(2, 2, 2))
    marker["factors"] = factors(2, 3, 2).to_record()
    check_factors("out", marker, factors(2, 3, 2))
    assert not caplog.messages
    marker["factors"]["batch"] = 0
    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        check_factors("out", marker, factors(2, 3, 2))


@pytest.mark.slow
def test_a_resumed_trainer_takes_other_factors_of_the_same_number_and_says_so(tmp_path, caplog):
    def steps(batch, accumulation):
        return {"batch": batch, "accumulation": accumulation, "dataloader_drop_last": True}

    wanted = losses_of(tmp_path, **steps(5, 2))  # 20 of 24 samples in an epoch of two steps
    checkpoint = str(tmp_path / "checkpoint-2")
    assert losses_of(tmp_path / "again", checkpoint, **steps(10, 1)) == wanted
    (line,) = [message for message in caplog.messages if "was trained with" in message]
    assert "batch_size=5, gradient_accumulation_steps=2 and 1 process, this run has" in line
    assert Factors.of(make_trainer(tmp_path, dataloader_drop_last=True)) == factors(2, 1, 1)
    with pytest.raises(ValueError, match=f"draws 12 .*; {advice(5, 2)}"):
        losses_of(tmp_path / "other", checkpoint, **steps(4, 3))
