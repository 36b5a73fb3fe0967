"""Random combinations of options and of what users change train as the stock trainers do, or are
refused in one line: never another result in silence.

A few draws run with the other tests, 300 with `pytest -m nightly`. A draw that fails says its
number; `python -m tests.hf.drawn_settings --seed N --reduce` finds the smallest part that
fails.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.hf.drawn_settings import verdicts
from tests.hf.drawn_settings.case import CHANGES, WAYS, draw
from tests.hf.drawn_settings.options import ALWAYS, SOMETIMES
from tests.hf.drawn_settings.run import judge
from tests.hf.drawn_settings.verdicts import FAILURES, Outcome, Verdict, of_both, of_refusal

DRAWS, PER_JOB = 300, 15


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seeds", "least_equal"),  # nothing is shown by draws that are all refused
    [
        # of several trainers, and of each way
        pytest.param((1, 7, 8, 19), 3, id="few"),
        *(
            pytest.param(
                range(first, first + PER_JOB),
                3,
                id=f"from {first}",
                marks=[pytest.mark.nightly, pytest.mark.timeout(3600)],
            )
            for first in range(0, DRAWS, PER_JOB)
        ),
    ],
)
def test_no_draw_differs_in_silence(seeds, least_equal):
    judged = {seed: judge(draw(seed)) for seed in seeds}
    for seed, one in judged.items():
        print(f"{seed:5d} {one.verdict.name:12s} {one.detail}")
    failed = [
        f"{one.verdict.name}: {one.detail} [{draw(seed)}]"
        for seed, one in judged.items()
        if one.verdict in FAILURES
    ]
    assert not failed, "\n".join(failed)
    assert sum(one.verdict is Verdict.EQUAL for one in judged.values()) >= least_equal


# ---- the draws and the verdicts themselves


def test_a_seed_is_always_the_same_draw_of_one_line():
    assert draw(17) == draw(17)
    assert str(draw(17)) != str(draw(18))
    assert "\n" not in str(draw(17))


def test_the_draws_of_a_night_have_every_option_change_and_way():
    cases = [draw(seed) for seed in range(DRAWS)]
    options = {name for one in (*ALWAYS, *SOMETIMES) for value in one.values for name in value}
    assert {name for case in cases for name in case.settings} == options
    assert {name for case in cases for name in case.changes} == set(CHANGES)
    assert {case.way for case in cases} == set(WAYS)


def outcome(weight=1.0, warnings=(), **log):
    """Of a training from weight 0 that logged one line."""
    start, weights = ({"w": np.array([value, 0.0])} for value in (0.0, weight))
    log = [{"loss": 3.0, **log}]
    return Outcome(start=start, weights=weights, log=log, warnings=list(warnings))


def verdict_of(stock, ours):
    case = replace(
        draw(0), trainer="trainer", model="llama", dtype="float64", settings={"optim": "sgd"}
    )
    return of_both(case, stock, ours).verdict


def test_what_differs_in_silence_is_found():
    for ours, verdict in (
        (outcome(weight=1 + 1e-6), Verdict.EQUAL),
        (outcome(weight=1 + 1e-5), Verdict.SILENT),
        (outcome(loss=3.0 + 3e-6), Verdict.EQUAL),
        (outcome(loss=3.0001), Verdict.SILENT),
        (outcome(loss=float("nan")), Verdict.SILENT),
        (outcome(train_runtime=2.0, **{"flexseq/micro_batches": 3}), Verdict.EQUAL),
    ):
        assert verdict_of(outcome(), ours) is verdict, ours
    assert verdict_of(outcome(grad_norm=1.0), outcome()) is Verdict.SILENT
    assert verdict_of(outcome(), replace(outcome(), log=[])) is Verdict.SILENT


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


def test_a_difference_counts_as_logged_where_a_known_warning_says_so(monkeypatch):
    monkeypatch.setattr(verdicts, "KNOWN_WARNINGS", ("reads what the model computes of",))
    known = "Own.compute_loss reads what the model computes of it"
    for warnings, verdict in (
        (["a step takes 0.1 s", known], Verdict.LOGGED),
        (["a step takes 0.1 s"], Verdict.SILENT),
    ):
        assert verdict_of(outcome(), outcome(weight=2.0, warnings=warnings)) is verdict
