"""The rule by which other factors keep the order of samples is what accelerate's loaders do, and a
run that would draw another order is refused with the values that fit."""

import functools
import itertools
import operator
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer

from hf_flexseq import FlexSeqTrainer
from hf_flexseq.hf.data_order import DataOrder, Factors, check_factors, order_of
from tests.budget import others_slow
from tests.hf.test_saving import losses_of, make_trainer

EPOCHS = 2
ROWS = (1, 7, 8, 12, 23, 24)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows))


def sampler(strategy, rows, factors):
    """That of the Trainer's own method."""
    args = SimpleNamespace(
        train_sampling_strategy=strategy,
        train_batch_size=factors.batch,
        gradient_accumulation_steps=factors.accumulation,
    )
    trainer = SimpleNamespace(args=args, processing_class=None)
    dataset = [{"input_ids": range(row * row * 7 % 19 + 1)} for row in range(rows)]
    return Trainer._get_train_sampler(trainer, dataset)


def loader(strategy, rows, factors, rank, drop_last, even_batches):
    """As accelerate prepares it for one of several processes."""
    if strategy == "stream":
        plain = DataLoader(Stream(rows), factors.batch, collate_fn=list)
    else:
        order = sampler(strategy, rows, factors)
        plain = DataLoader(
            range(rows), factors.batch, sampler=order, drop_last=drop_last, collate_fn=list
        )
    return prepare_data_loader(
        plain,
        num_processes=factors.processes,
        process_index=rank,
        even_batches=even_batches,
        use_seedable_sampler=True,
        data_seed=3,
        dispatch_batches=False,
    )


@functools.cache
def drawn_steps(strategy, rows, factors, drop_last=False, even_batches=True):
    """The samples of every optimizer step, in ascending order."""
    by_rank = []
    for rank in range(factors.processes):
        torch.manual_seed(5)
        one = loader(strategy, rows, factors, rank, drop_last, even_batches)
        epochs = []
        for epoch in range(EPOCHS):
            one.set_epoch(epoch)
            epochs.append(list(one))
        by_rank.append(epochs)
    steps = []
    for epoch in range(EPOCHS):
        rounds = list(itertools.zip_longest(*(of[epoch] for of in by_rank), fillvalue=()))
        for first in range(0, len(rounds), factors.accumulation):
            batches = itertools.chain(*rounds[first : first + factors.accumulation])
            steps.append(sorted(itertools.chain(*batches)))
    return steps


def pairs(samples):
    """All pairs of factors of a number of samples, on up to four processes."""
    found = []
    for processes in range(1, 5):
        for batch in range(1, samples + 1):
            accumulation, rest = divmod(samples, batch * processes)
            if rest == 0:
                found.append(Factors(batch=batch, accumulation=accumulation, processes=processes))
    return list(itertools.combinations(found, 2))


@pytest.mark.parametrize(
    "strategy", others_slow(["random", "stream", "group_by_length"], tried=("stream",))
)
def test_the_order_is_kept_where_the_rule_says_so(strategy):
    """And there alone, but in `group_by_length`, of which the rule promises less."""
    PartialState(cpu=True)
    ends = [(False, True)]
    if strategy == "random":
        ends += [(False, False), (True, True)]
    matter = strategy if strategy == "group_by_length" else None
    found = []
    for rows, (drop_last, even_batches) in itertools.product(ROWS, ends):
        order = DataOrder(
            rows=rows,
            drop_last=drop_last,
            even_batches=even_batches,
            processes_matter=matter,
        )
        for former, now in pairs(8):
            by_factors = (
                drawn_steps(strategy, rows, these, drop_last, even_batches)
                for these in (former, now)
            )
            is_kept = order.change(former, now) is None
            is_same = operator.eq(*by_factors)
            found.append((is_kept, is_same, former.processes == now.processes))
            assert is_kept == is_same or (matter and not is_kept), (former, now, order)
    assert {(True, True, True), (False, False, False)} <= set(found)


# ---- what a run is told


def factors(batch, accumulation, processes):
    return Factors(batch=batch, accumulation=accumulation, processes=processes)


def advice(batch, accumulation):
    return (
        f"set per_device_train_batch_size={batch} and gradient_accumulation_steps={accumulation}"
    )


THEN = "per_device_train_batch_size=2, gradient_accumulation_steps=3 and 2 processes"
OF_24, OF_25, UNKNOWN = DataOrder(rows=24), DataOrder(rows=25), DataOrder(unknown="a stream")
GROUPED = DataOrder(rows=24, processes_matter="group_by_length")
OTHERS = "an epoch of 25 samples would draw {}, not 28; {}"
NONE_FIT = "no values are known to fit {}: resume with " + THEN
PRODUCT = "(per_device_train_batch_size x gradient_accumulation_steps x processes)"
CHANGES = "the data order would change; "


@pytest.mark.parametrize(
    ("order", "now", "said"),
    [
        (OF_24, factors(3, 2, 2), None),
        (OF_24, factors(4, 1, 3), None),
        (UNKNOWN, factors(2, 3, 2), None),
        (OF_25, factors(3, 2, 2), OTHERS.format(30, advice(2, 3))),
        # rounds of 4 samples on one more number of processes
        (OF_25, factors(3, 1, 4), OTHERS.format(36, advice(1, 3))),
        (OF_25, factors(2, 2, 3), OTHERS.format(30, NONE_FIT.format("3 processes"))),
        (
            GROUPED,
            factors(4, 3, 1),
            "group_by_length draws in another order on 1 process; " + NONE_FIT.format("1 process"),
        ),
        (UNKNOWN, factors(3, 2, 2), "a stream may draw in another order; " + advice(2, 3)),
        (
            OF_24,
            factors(4, 4, 2),
            f"12 sequences per optimizer step, this run draws 32 {PRODUCT}: {CHANGES}"
            + advice(2, 3),
        ),
        (OF_24, factors(5, 1, 1), CHANGES + advice(4, 3)),
    ],
)
def test_other_factors_are_refused_with_those_that_fit(order, now, said):
    marker = {"sequences_per_step": 12, "factors": factors(2, 3, 2).to_record()}
    if said is None:
        check_factors("out", marker, now, order)
        return
    with pytest.raises(ValueError) as refused:
        check_factors("out", marker, now, order)
    assert str(refused.value).startswith("out was trained with ")
    assert str(refused.value).endswith(said)


def test_a_checkpoint_that_knows_the_product_alone_is_held_to_that():
    marker = {"sequences_per_step": 12}
    check_factors("out", marker, factors(3, 1, 4), UNKNOWN)
    check_factors("out", {}, factors(1, 1, 1), UNKNOWN)
    with pytest.raises(ValueError, match="on 2 processes the product of .* must be 6"):
        check_factors("out", marker, factors(2, 2, 2), UNKNOWN)
    with pytest.raises(ValueError, match="no values fit 5 processes: .* that divides 12"):
        check_factors("out", marker, factors(2, 2, 5), UNKNOWN)
    marker["factors"] = factors(2, 3, 2).to_record() | {"batch": 0}
    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        check_factors("out", marker, factors(2, 3, 2), UNKNOWN)


# ---- a Trainer


class InOrder(FlexSeqTrainer):
    """Has a sampler of its own."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)


def test_a_trainer_says_what_decides_the_order(tmp_path):
    trainer = make_trainer(tmp_path, dataloader_drop_last=True)
    assert order_of(trainer) == DataOrder(rows=24, drop_last=True)
    assert Factors.of(trainer) == factors(2, 1, 1)
    trainer.train_dataset = Stream(24)
    assert order_of(trainer).unknown == "a stream"
    assert order_of(make_trainer(tmp_path, InOrder)).unknown == "InOrder._get_train_sampler"

    def order(**options):
        return order_of(make_trainer(tmp_path, **options))

    grouped = order(train_sampling_strategy="group_by_length")
    assert grouped.processes_matter == "group_by_length"
    unseeded = order(accelerator_config={"use_seedable_sampler": False})
    assert "use_seedable_sampler=False" in unseeded.processes_matter
    rebalanced = order(train_sampling_strategy="batch_rebalance")
    assert rebalanced.unknown == "train_sampling_strategy='batch_rebalance'"


@pytest.mark.slow
def test_a_resumed_trainer_takes_other_factors_that_keep_the_order_and_no_others(tmp_path):
    def steps(batch, accumulation):
        return {"batch": batch, "accumulation": accumulation, "dataloader_drop_last": True}

    wanted = losses_of(tmp_path, **steps(5, 2))  # 20 of 24 samples in an epoch of two steps
    checkpoint = str(tmp_path / "checkpoint-2")
    assert losses_of(tmp_path / "again", checkpoint, **steps(10, 1)) == wanted
    with pytest.raises(ValueError, match=f"24 samples would draw 24, not 20; {advice(5, 2)}"):
        losses_of(tmp_path / "other", checkpoint, **steps(2, 5))
    trainer = make_trainer(tmp_path / "own", InOrder, **steps(10, 1))
    with pytest.raises(
        ValueError, match=f"InOrder._get_train_sampler may draw .*; {advice(5, 2)}"
    ):
        trainer.train(resume_from_checkpoint=checkpoint)
