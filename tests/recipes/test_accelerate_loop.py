"""The hand-written loop of the README runs as it is, on two ranks, and learns."""

import re

import pytest

from tests.programs import ROOT, run_program_on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


def test_the_loop_learns():
    printed, nothing = run_program_on_ranks(2, ROOT / "recipes/accelerate_loop.py")
    *losses, held_out = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 20
    assert max(losses[-1], held_out) < losses[0] - 2
    assert nothing == ""
