"""Random combinations of options and of what users change train as the stock trainers do, or are
refused in one line: never another result in silence.

A few draws run with the other tests, 300 with `pytest -m nightly`. A draw that fails says its
number: `python -m tests.hf.drawn_settings --seed 17 --reduce` runs it again and finds what of it
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
LEAST_EQUAL = 3  # of a job's draws: nothing is shown by draws that are all refused


def failures(seeds, folder):
    """The draws that fail, each with its reason, and how many are equal."""
    failed, equal = [], 0
    cases = [draw(seed) for seed in seeds]
    for seed, judged in judge(cases, folder).items():
        if judged.verdict in FAILURES:
            failed.append(f"{judged.verdict.name}: {judged.detail} [{draw(seed)}]")
        equal += judged.verdict is Verdict.EQUAL
    return failed, equal


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, DRAWS, PER_JOB))
def test_no_draw_differs_in_silence(tmp_path, first):
    failed, equal = failures(range(first, first + PER_JOB), tmp_path)
    assert not failed, "\n".join(failed)
    assert equal >= LEAST_EQUAL


# Of several trainers, and of each way to hf_flexseq.
FEW = (1, 7, 8, 19)


@pytest.mark.processes
def test_a_few_draws_are_equal_or_refused(tmp_path):
    failed, equal = failures(FEW, tmp_path)
    assert not failed, "\n".join(failed)
    assert equal >= len(FEW) - 1


# ---- the draws and the verdicts themselves


def test_a_seed_is_always_the_same_draw():
    assert draw(17) == draw(17)
    assert str(draw(17)) != str(draw(18))
    assert "\n" not in str(draw(17))


def test_the_draws_of_a_night_have_every_option_change_and_way():
    cases = [draw(seed) for seed in range(DRAWS)]
    options = set()
    for option in (*ALWAYS, *SOMETIMES):
        for value in option.values:
            options |= set(value)
    assert {name for case in cases for name, _ in case.settings} == options
    assert {name for case in cases for name in case.changes} == set(CHANGES)
    assert {case.way for case in cases} == set(WAYS)


def outcome(weight=1.0, **log):
    """Of a training from weight 0 that logged one line."""
    start, weights = ({"w": np.array([value, 0.0])} for value in (0.0, weight))
    return Outcome(start=start, weights=weights, log=[{"loss": 3.0, **log}])


CASE = replace(
    draw(0), trainer="trainer", model="llama", dtype="float64", settings=(("optim", "sgd"),)
)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (outcome(weight=1 + 1e-6), Verdict.EQUAL),
        (outcome(weight=1 + 1e-5), Verdict.SILENT),
        (outcome(loss=3.0 + 3e-6), Verdict.EQUAL),
        (outcome(loss=3.0001), Verdict.SILENT),
        (outcome(loss=float("nan")), Verdict.SILENT),
        (outcome(train_runtime=2.0, **{"flexseq/micro_batches": 3}), Verdict.EQUAL),
    ],
)
def test_what_differs_in_silence_is_found(ours, verdict):
    assert of_both(CASE, outcome(), ours).verdict is verdict


def test_a_figure_or_a_line_that_is_not_there_differs():
    assert of_both(CASE, outcome(grad_norm=1.0), outcome()).verdict is Verdict.SILENT
    without = outcome()
    without.log = []
    assert of_both(CASE, outcome(), without).verdict is Verdict.SILENT


@pytest.mark.parametrize(
    ("error", "message", "step", "verdict"),
    [
        ("ValueError", "set it to 0", 0, Verdict.REFUSED),
        ("ValueError", "set it to 0", 3, Verdict.CRASHED),
        ("ValueError", "one line\nand another", 0, Verdict.CRASHED),
        ("TypeError", "'NoneType' object is not iterable", 0, Verdict.CRASHED),
    ],
)
def test_a_refusal_is_one_line_before_the_second_step(error, message, step, verdict):
    assert of_refusal(Outcome(error=error, message=message, step=step)).verdict is verdict


def test_a_difference_counts_as_logged_where_a_known_warning_says_so(monkeypatch):
    monkeypatch.setattr(verdicts, "KNOWN_WARNINGS", ("reads what the model computes of",))
    ours = outcome(weight=2.0)
    ours.warnings = ["a step takes 0.1 s", "Own.compute_loss reads what the model computes of it"]
    assert of_both(CASE, outcome(), ours).verdict is Verdict.LOGGED
    ours.warnings.pop()
    assert of_both(CASE, outcome(), ours).verdict is Verdict.SILENT
