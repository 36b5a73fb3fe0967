"""Commands keep their promise on mutated input, and a broken promise is seen."""

import os
import pickle
import sys

import pytest

from tests.cli.mutated_inputs import KINDS, Case, Maker, broken_promise, planted, run_case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"),
    [(13, 240), pytest.param(0, 4000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_mutated_inputs_end_with_a_result_or_one_line(tmp_path, monkeypatch, seed, count):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        maker = Maker(tmp_path)
        ended = set()
        for index in range(count):
            case = maker.case(index, seed)
            outcome = run_case(case)
            assert not outcome.problem, f"input {index}, {case}: {outcome.problem}"
            ended.add((case.kind, outcome.status))
    assert not maker.mark.exists()  # no planted pickle was loaded
    # Of a trace with a broken line the other lines are shown.
    for kind in set(KINDS) - {"trace"}:
        assert (kind, 2) in ended, f"no {kind} was refused"
    assert sum(status == 0 for _, status in ended) > 5


def test_a_broken_promise_is_seen(tmp_path):
    case = Case("trace", ["view", "x"])
    for status, out, err, problem in (
        (1, "", "", "exit status 1"),
        (2, "", "a\nb\n", "2 lines of error"),
        (2, "", "", "0 lines of error"),
        (2, "", "x" * 301 + "\n", "more than 300"),
        (2, "", "\x1b[31m\n", "control characters"),
        (0, "predicted nan s", "", "not finite"),
        (0, "0.5 s, inf % above", "", "not finite"),
        (0, "predicted -9223372035.0 s", "", "negative seconds"),
        (0, "\x1b]0;title\x07", "", "control characters"),
        (0, "information on finance", "", ""),
        (2, "", "flexseq view: no\n", ""),
    ):
        seen = broken_promise(case, status, out, err)
        assert problem in seen
        assert bool(problem) == bool(seen)
    pickle.loads(planted(tmp_path / "mark")).close()
    assert (tmp_path / "mark").exists(), "a planted pickle leaves its mark where it is loaded"
