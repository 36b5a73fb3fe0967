"""scripts/benchmarks/exposed.py: how it counts, and that the functions which it times are there.
A whole run of it is the quickstart."""

import importlib
import importlib.util
import sys
import time

import pytest

from tests.programs import ROOT

FOLDER = ROOT / "scripts/benchmarks"


@pytest.fixture
def exposed(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    spec = importlib.util.spec_from_file_location("exposed", FOLDER / "exposed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_function_that_it_times_exists(exposed):
    for functions in (exposed.HIDDEN | exposed.PARTS).values():
        for module, class_name, name in functions:
            owner = importlib.import_module(module)
            if class_name is not None:
                owner = getattr(owner, class_name)
            assert callable(getattr(owner, name)), (module, class_name, name)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_parts_count_without_those_inside_and_between_optimizer_and_forward_apart(
    exposed, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "thread_time", clock)
    parts = exposed.Parts()

    def passing(part, seconds, inside=None, name="call"):
        def call():
            clock.now += seconds
            if inside is not None:
                inside()

        call.__name__ = name
        return parts.timed(part, call)

    gather = passing("gather", 4.0)
    passing("forward", 1.0)()
    passing("draw", 2.0, gather)()
    passing("optimizer", 8.0, name="step")()
    clock.now += 16.0  # of the Trainer
    passing("draw", 32.0)()
    passing("forward", 64.0)()
    parts.next_step()
    parts.next_step()
    first, second = parts.steps
    assert first == {
        "forward": (65.0, 65.0, 0.0),
        "draw": (34.0, 34.0, 32.0),
        "gather": (4.0, 4.0, 0.0),
        "optimizer": (8.0, 8.0, 0.0),
        exposed.REST: (16.0, 16.0, 16.0),
    }
    assert second == {exposed.REST: (0.0, 0.0, 0.0)}
    found = exposed.medians([first])
    assert found[exposed.EXPOSED] == (54.0, 54.0, 48.0)
