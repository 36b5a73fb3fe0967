"""Random combinations of options and of what users change train as the stock trainers do, or are
refused in one line: never another result in silence. Each change of a user's alone comes to what
is written here of it.

A few draws run with the other tests, 300 with `pytest -m nightly`; so do changes by themselves. A
draw that fails says its number; `python -m tests.hf.drawn_settings --seed N --reduce` finds the
smallest part that fails.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests import budget
from tests.hf.drawn_settings.case import CHANGES, WAYS, Case, draw
from tests.hf.drawn_settings.options import ALWAYS, SOMETIMES
from tests.hf.drawn_settings.run import judge, outcome_of
from tests.hf.drawn_settings.verdicts import FAILURES, Outcome, Verdict, of_both, of_refusal

DRAWS, PER_JOB = 300, 15


def a_night(count, per_job=PER_JOB):
    """The seeds of so many draws, in jobs."""
    marks = [pytest.mark.nightly, pytest.mark.timeout(3600)]
    return [
        pytest.param(range(first, first + per_job), 3, id=f"from {first}", marks=marks)
        for first in range(0, count, per_job)
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seeds", "least_equal"),  # nothing is shown by draws that are all refused
    [
        # of several trainers, and of each way
        pytest.param((1, 7, 8, 19), 3, id="few"),
        # once other results in silence, or an error that was no refusal
        pytest.param(
            (306, 318, 328, 570, 733, 1192, 1227), 1, id="mended", marks=pytest.mark.nightly
        ),
        *a_night(DRAWS),
    ],
)
def test_no_draw_differs_in_silence(seeds, least_equal):
    assert_none_differs(seeds, least_equal, sharding="")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seeds", "least_equal", "sharding"),
    [
        pytest.param((21,), 1, "zero3", id="packed"),  # where rank 0 makes a small model alone
        *(
            pytest.param(*job.values, sharding, id=f"{sharding} {job.id}", marks=job.marks)
            for sharding in ("fsdp2", "zero3")
            for job in a_night(60, per_job=30)
        ),
    ],
)
def test_no_draw_of_a_sharded_model_differs_in_silence(seeds, least_equal, sharding):
    assert_none_differs(seeds, least_equal, sharding)


def assert_none_differs(seeds, least_equal, sharding):
    judged = {seed: judge(replace(draw(seed), sharding=sharding)) for seed in seeds}
    for seed, one in judged.items():
        print(f"{seed:5d} {one.verdict.name:12s} {one.detail}")
    failed = [
        f"{one.verdict.name}: {one.detail} [{draw(seed)}]"
        for seed, one in judged.items()
        if one.verdict in FAILURES
    ]
    assert not failed, "\n".join(failed)
    assert sum(one.verdict is Verdict.EQUAL for one in judged.values()) >= least_equal


# ---- one change alone, or some together

TOKENS = "(computes a loss from|a loss gets) (tokens or )?labels that its batch does not have"
LOGITS = r"asks for outputs\.logits.*flexseq_figures"
IGNORED = "get_batch_samples would be ignored"
GRADIENTS = r"\.training_step uses gradients .* on_pre_optimizer_step"
HOOKS = "on model.embed_tokens.weight.*changes gradients of each micro-batch"
TOGETHER = "tokens of one sequence change the loss of another"
WHOLE = "does not gather whole logits"
BETWEEN = "on_substep_end is called before the work of a step"
# What is said of those that do not train as under the stock trainer.
SAID = {
    **dict.fromkeys(("labels in place", "labels by copy"), TOKENS),
    **dict.fromkeys(("ids changed", "first token replaced", "reads a column"), TOKENS),
    **dict.fromkeys(("without mask", "training step edits labels"), TOKENS),
    **dict.fromkeys(("loss of logits", "loss without labels"), LOGITS),
    "compute_loss_func of logits": LOGITS,
    "loss of hidden states": "calls the model with output_hidden_states",
    "training step clamps gradients": GRADIENTS,
    "training step drops a step": GRADIENTS,
    **dict.fromkeys(("batches reversed", "items doubled"), IGNORED),
    **dict.fromkeys(("whole logits metrics", "predicts itself"), WHOLE),
    **dict.fromkeys(("label pre hook", "smoother", "centered batch"), TOGETHER),
    "hidden norm hook": "hidden states of two sequences in one row are",
    "own loss function": "its loss_function loss gives .* on two parts of it",
    **dict.fromkeys(("gradients clamped", "clamped after accumulation"), HOOKS),
    "scaled after accumulation": HOOKS,
    "changes accumulation": "has changed from 2 to 1 while training",
    "normed backward hook": "a hook on the backward of a module sees",
    **dict.fromkeys(("logs gradients between", "zeroes gradients between"), BETWEEN),
}
LOGGED = ("normed backward hook", "logs gradients between", "zeroes gradients between")
OWN = "compute_loss_func"
SAID_OF_SOME = {
    ("prepares labels", OWN): None,
    ("labels masked", OWN): None,
    ("labels in place", OWN): TOKENS,
    ("first token replaced", OWN): TOKENS,
    ("training step drops a step", OWN): GRADIENTS,
    ("penalty", "gradients scaled"): None,
    ("head hook", "layer hook"): None,
    ("model hook", "loss scaled"): "two sequences have the loss .* by the log-probabilities",
    ("label pre hook", "own items"): "two sequences have the loss .* by the log-probabilities",
}
CASES = [(name,) for name in CHANGES if "trainer" in CHANGES[name].of]
ALONE = ("loss with items", "loss without items", "loss by rows", "labels masked", "prepares ids")
ALONE += ("calls the model with labels", "gradients masked", "labels in place", "without mask")
ALONE += ("training step edits labels", "loss of logits", "label pre hook", "changes accumulation")
OFTEN = [*SAID_OF_SOME, *((name,) for name in ALONE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", budget.others_nightly([*SAID_OF_SOME, *CASES], tried=OFTEN), ids=", ".join
)
def test_a_change_alone_trains_as_the_stock_trainer_or_is_refused(tmp_path, changes):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings |= {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "optim": "sgd"}
    case = Case(
        seed=0,
        trainer="trainer",
        way="mixin",
        model="llama",
        dtype="float64",
        data="list",
        collator="right",
        settings=settings | {"learning_rate": 0.1},
        ours={"max_tokens_per_rank": 61, "lookahead": 0},
        changes=changes,
    )
    ours = outcome_of(case, True, tmp_path / "ours")
    if ours.error:
        judged, wanted = of_refusal(ours), Verdict.REFUSED
    else:
        judged = of_both(case, outcome_of(case, False, tmp_path / "stock"), ours)
        wanted = Verdict.LOGGED if changes[0] in LOGGED else Verdict.EQUAL
    said = SAID_OF_SOME.get(changes, SAID.get(changes[0]))
    assert judged.verdict is wanted, judged.detail
    assert (wanted is Verdict.EQUAL) == (said is None)
    assert said is None or re.search(said, judged.detail), judged.detail


# ---- the draws and the verdicts themselves


def test_the_draws_of_a_night_have_every_option_change_and_way():
    cases = [draw(seed) for seed in range(DRAWS)]
    options = {name for one in (*ALWAYS, *SOMETIMES) for value in one.values for name in value}
    assert {name for case in cases for name in case.settings} == options
    assert {name for case in cases for name in case.changes} == set(CHANGES)
    assert {case.way for case in cases} == set(WAYS)


def outcome(weight=1.0, warnings=(), **log):
    """Of a training from weight 0 that logged one line, with hf_flexseq."""
    start, weights = ({"w": np.array([value, 0.0])} for value in (0.0, weight))
    log = [{"loss": 3.0, "flexseq/micro_batches": 2, **log}]
    return Outcome(start=start, weights=weights, log=log, warnings=list(warnings))


def verdict_of(stock, ours):
    case = replace(
        draw(0), trainer="trainer", model="llama", dtype="float64", settings={"optim": "sgd"}
    )
    return of_both(case, stock, ours).verdict


def test_what_differs_in_silence_is_found():
    stock = replace(outcome(), log=[{"loss": 3.0}])
    for ours, verdict in (
        (outcome(weight=1 + 1e-6), Verdict.EQUAL),
        (outcome(weight=1 + 1e-5), Verdict.SILENT),
        (outcome(loss=3.0 + 3e-6), Verdict.EQUAL),
        (outcome(loss=3.0001), Verdict.SILENT),
        (outcome(loss=float("nan")), Verdict.SILENT),
        (outcome(train_runtime=2.0, **{"flexseq/micro_batches": 3}), Verdict.EQUAL),
        (replace(outcome(), log=[{"loss": 3.0}]), Verdict.SILENT),  # no step was planned
        (replace(outcome(), log=[]), Verdict.SILENT),
    ):
        assert verdict_of(stock, ours) is verdict, ours
    assert verdict_of(outcome(grad_norm=1.0), outcome()) is Verdict.SILENT


def test_a_refusal_is_one_line_before_the_second_step():
    for error, message, step, verdict in (
        ("ValueError", "set it to 0", 0, Verdict.REFUSED),
        ("ValueError", "set it to 0", 3, Verdict.CRASHED),
        ("ValueError", "one line\nand another", 0, Verdict.CRASHED),
        ("ValueError", "2 reasons to refuse this:\n1. one\n2. another", 0, Verdict.REFUSED),
        ("ValueError", "2 reasons to refuse this:\n1. one\nanother", 0, Verdict.CRASHED),
        ("TypeError", "'NoneType' object is not iterable", 0, Verdict.CRASHED),
    ):
        assert of_refusal(Outcome(error=error, message=message, step=step)).verdict is verdict
