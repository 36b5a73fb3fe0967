"""scripts/benchmarks/planning_time.py: two checkouts that are one plan the same steps alike."""

import importlib.util
import sys

import pytest

from tests.programs import ROOT

FOLDER = ROOT / "scripts/benchmarks"


@pytest.fixture
def planning_time(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("common", "lengths", "planners"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("planning_time", FOLDER / "planning_time.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
def test_a_checkout_beside_itself_plans_the_same_steps(planning_time):
    timers = [planning_time.Timer(ROOT, "flexsp-gpt-7b-a100") for _ in range(2)]
    chosen = planning_time.SETS["fewer than ranks"]
    here, there = planning_time.timed_in_turns(timers, [(chosen, seed) for seed in range(2)])
    for timer in timers:
        timer.close()
    for one, other in zip(here, there, strict=True):
        assert one[1:] == other[1:]
        assert one.milliseconds > 0
        assert one.lower_bound_s <= one.objective_s
    assert planning_time.times_row(64, here).startswith("| 64 | 24 | 2 | ")
    assert planning_time.ratios_row(64, here, there).endswith(" | 1.0000 |")


def test_the_steps_of_both_larger_clusters_are_counted_apart(planning_time):
    steps = planning_time.all_steps(2, 1)
    assert {ranks: len(chosen) for ranks, chosen in steps.items()} == {64: 14, 1024: 1, 4096: 1}
