"""Steps of the FlexSeq trainer on several ranks against those of the plain Trainer in one
process."""

import pytest

from tests.differential.case import Case
from tests.differential.runs import both_on_ranks, run, stock_run
from tests.hf.plain import (  # noqa: F401  (imported from here, too)
    OPTIONS,
    dataset,
    flexseq_trainer,
    float64_loss,
    logged,
    ordered_gloo,
    padded,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.trainers import assert_logged_alike, weights_apart
from tests.ranks import run_cases


def case_of(ranks, accumulation, optim, **settings):
    """A rank draws one document in a batch; some need two ranks. 72 documents are a whole number
    of steps in every case: repeats that fill the last batch depend on the number of ranks."""
    return Case(
        settings={"optim": optim, "train_dataset": dataset(72), **settings},
        batch=ranks * accumulation,
        accumulation=accumulation,
        stock_loss=float64_loss,
        flexseq={"lookahead": 2},
    )


# By number of ranks: whether the transport is said to be ordered.
RUNS = {
    2: [
        (False, case_of(2, 3, "adamw_torch")),
        (False, case_of(2, 3, "sgd", callback=True)),
        (True, case_of(2, 3, "sgd")),
    ],
    3: [(False, case_of(3, 2, "sgd"))],
    4: [(False, case_of(4, 1, "adamw_torch", callback=True))],
}


def run_of(rank, world_size, is_ordered, case, folder):
    with ordered_gloo(is_ordered):
        return run(rank, world_size, case, folder)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", RUNS)
def test_steps_equal_the_plain_trainer(tmp_path, world_size):
    cases = [(is_ordered, case, tmp_path) for is_ordered, case in RUNS[world_size]]
    by_case = run_cases(run_of, world_size, cases, seconds=150)
    for (_, case, _), by_rank in zip(cases, by_case, strict=True):
        stock = stock_run(case, tmp_path)
        for ours in by_rank:
            assert weights_apart(stock, ours) < 1e-8
            assert_logged_alike(stock, ours, ["loss"], rel=1e-6)
            assert_logged_alike(stock, ours, ["grad_norm"], rel=1e-8)


@pytest.mark.processes
def test_the_last_partial_step_holds_the_plain_trainers_samples(tmp_path):
    """On as many ranks as the plain run: 13 documents end in a batch that is filled up with
    a repeat, in a step of fewer batches than the others."""
    case = Case(
        settings={"train_dataset": dataset(13), "max_steps": 5},
        batch=6,
        accumulation=3,
        stock_loss=float64_loss,
        stock_settings={"batch": 1, "accumulation": 3},
    )
    for _, stock, ours in both_on_ranks({"partial": case}, tmp_path):
        assert weights_apart(stock, ours) < 1e-8
        assert logged(ours.log, "epoch") == logged(stock.log, "epoch")
