"""scripts/benchmarks/mutations.py: a few hundred of its inputs, and that it sees a broken
promise."""

import os
import pickle
import runpy
import sys

import pytest

from tests.programs import ROOT

SCRIPT = ROOT / "scripts/benchmarks/mutations.py"
COUNT = 240  # inputs: of each kind 20 or 40


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))  # as when it is run: its imports stand beside it
    try:
        yield runpy.run_path(str(SCRIPT))
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.mark.slow
def test_mutated_inputs_end_with_a_result_or_one_line(script, tmp_path, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        maker = script["Maker"](tmp_path)
        ended = set()
        for index in range(COUNT):
            case = maker.case(index, seed=13)
            outcome = script["run_case"](case)
            assert not outcome.problem, f"input {index}, {case}: {outcome.problem}"
            ended.add((case.kind, outcome.status))
    assert not maker.mark.exists()  # no planted pickle was loaded
    # Of a trace with a broken line the other lines are shown.
    for kind in set(script["KINDS"]) - {"trace"}:
        assert (kind, 2) in ended, f"no {kind} was refused"
    assert sum(status == 0 for _, status in ended) > 5


def test_a_broken_promise_is_seen(script, tmp_path):
    case = script["Case"]("arguments", ["view", "x"])
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
        seen = script["broken_promise"](case, status, out, err)
        assert problem in seen
        assert bool(problem) == bool(seen)
    pickle.loads(script["planted"](tmp_path / "mark")).close()
    assert (tmp_path / "mark").exists(), "a planted pickle leaves its mark where it is loaded"
