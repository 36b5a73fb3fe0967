"""Random combinations of options and of what users change train as the stock trainers do, or are
refused in one line: never another result in silence.

A few draws run with the other tests, 300 with `pytest -m nightly`. A draw that fails says its
number: `python -m tests.hf.drawn_settings --seed 17 --reduce` runs it again and finds what of it
fails.
"""

import pytest

from tests.hf.drawn_settings.case import CHANGES, WAYS, draw
from tests.hf.drawn_settings.options import ALWAYS, SOMETIMES
from tests.hf.drawn_settings.run import judge
from tests.hf.drawn_settings.verdicts import FAILURES, Verdict

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


# Of each trainer one, and of each way to hf_flexseq: equal, but for one that is refused.
FEW = (0, 1, 4, 3)


@pytest.mark.processes
def test_a_few_draws_are_equal_or_refused(tmp_path):
    failed, equal = failures(FEW, tmp_path)
    assert not failed, "\n".join(failed)
    assert equal == len(FEW) - 1


def test_a_seed_is_always_the_same_draw():
    assert draw(17) == draw(17)
    assert str(draw(17)) != str(draw(18))
    assert "\n" not in str(draw(17))


def test_the_draws_of_a_night_have_every_option_change_and_way():
    cases = [draw(seed) for seed in range(DRAWS)]
    set_ones = {name for case in cases for name, _ in case.settings}
    assert set_ones >= {
        name for option in (*ALWAYS, *SOMETIMES) for value in option.values for name in value
    }
    assert {name for case in cases for name in case.changes} == set(CHANGES)
    assert {case.way for case in cases} == set(WAYS)
