"""scripts/benchmarks/planning_time.py: the steps that it plans."""

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


def test_the_steps_of_both_larger_clusters_are_counted_apart(planning_time):
    steps = planning_time.all_steps(2, 1)
    assert {ranks: len(chosen) for ranks, chosen in steps.items()} == {64: 14, 1024: 1, 4096: 1}
