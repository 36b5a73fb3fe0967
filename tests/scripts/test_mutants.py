"""scripts/mutants.py: faults are drawn alike every time, planted and taken out again, and reached
by the probes of their own statement."""

import argparse
import ast
import importlib

import pytest

from hf_flexseq.plan import rings
from tests.programs import ROOT

FILE = "hf_flexseq/plan/rings.py"


@pytest.fixture
def mutants(monkeypatch):
    """The program."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("mutants")


@pytest.fixture
def functions(mutants):
    """The functions of one file, which are as they were afterwards."""
    found = mutants.Functions([FILE])
    yield found
    found.exchange(mutants.compiled(FILE, (ROOT / FILE).read_text()))
    rings.ring_rounds.cache_clear()


def test_a_seed_draws_the_same_mutants_each_on_a_line_of_its_own(mutants, monkeypatch):
    found = mutants.all_mutants()
    monkeypatch.setattr(mutants, "all_mutants", lambda: found)
    drawn = mutants.drawn(60, seed=3)
    assert drawn == mutants.drawn(60, seed=3) != mutants.drawn(60, seed=4)
    assert len({(one.file, one.line) for one in drawn}) == len(drawn) == 60
    assert {one.group for one in mutants.drawn(400, seed=3)} == set(mutants.GROUPS)
    for one in drawn[::6]:
        before, after = (ROOT / one.file).read_text(), one.source()
        assert after != before
        assert len(ast.parse(after).body) == len(ast.parse(before).body)
        assert after.count("\n") == before.count("\n")


@pytest.mark.slow
def test_a_planted_fault_changes_what_a_decorated_function_returns_and_goes_again(
    mutants, functions
):
    (fault,) = [
        one
        for one in mutants.mutants_of("plan", FILE)
        if (one.function, one.old) == ("ring_rounds", "not chunk_by_chunk")
        and one.operator == "dropped sign"
    ]
    right = rings.ring_rounds("zigzag", 4, chunk_by_chunk=True)
    assert functions.exchange(mutants.compiled(FILE, fault.source())) == 1
    rings.ring_rounds.cache_clear()
    assert rings.ring_rounds("zigzag", 4, chunk_by_chunk=True) != right
    assert functions.exchange(mutants.compiled(FILE, (ROOT / FILE).read_text())) == 1
    rings.ring_rounds.cache_clear()
    assert rings.ring_rounds("zigzag", 4, chunk_by_chunk=True) == right


@pytest.mark.slow
def test_probes_mark_the_statements_that_run(mutants, functions, monkeypatch):
    faults = [one for one in mutants.mutants_of("plan", FILE) if one.function == "chunks_per_rank"]
    of_hybrid = [index for index, one in enumerate(faults) if one.operator == "comparison"]
    probes = {}
    for index, one in enumerate(faults):
        probes.setdefault(one.statement, []).append(index)
    reached = bytearray(len(faults))
    monkeypatch.setattr(rings, "__reached__", reached, raising=False)
    functions.exchange(mutants.compiled(FILE, mutants.with_probes(FILE, probes)))
    assert rings.chunks_per_rank.__wrapped__("hybrid") == 2
    first = faults[of_hybrid[0]].statement
    assert [index for index, byte in enumerate(reached) if byte] == probes[first]
    assert len(probes) > 1
    rings.chunks_per_rank.__wrapped__("zigzag")
    assert all(reached)


def test_cheap_tests_come_first_and_a_function_kills_once(mutants):
    options = argparse.Namespace(known={}, budget=40.0)
    (fault, *_) = mutants.mutants_of("plan", FILE)
    runner = mutants.Runner(options, [fault], save=None)
    seconds = {"a[1]": 0.3, "a[2]": 0.1, "b": 0.2, "c": 30.0, "failing": 0.1, "elsewhere": 0.1}
    seconds["test_rings.py::d"] = 5.0
    for test, taken in seconds.items():
        outcome = "f" if test == "failing" else "p"
        hit = [] if test == "elsewhere" else [0]
        runner.reached[test] = {"outcome": outcome, "seconds": taken, "mutants": hit}
    runner.items = seconds
    order = runner.order(0)
    assert order == ["test_rings.py::d", "a[2]", "b", "c", "a[1]"]
    assert runner.next_tests([], [], order) == order
    assert runner.next_tests(["a[2]"], ["test_rings.py::d", "a[2]"], order) == ["b", "c"]
    killers = ["a[2]", "b" + mutants.LATE]
    assert runner.next_tests(killers, ["a[2]", "b"], order) == ["test_rings.py::d", "c"]
    options.budget = 25.0
    assert runner.next_tests([], [], order) == order[:3]
    assert runner.next_tests([], order[:3], order) == []
    options.known = {fault.key: ["c"]}
    assert runner.order(0)[0] == "c"
    for killers, run, state in (
        ([], 5, "survived"),
        ([], 4, "given up"),
        (["b" + mutants.LATE], 2, "timed out"),
        (["b" + mutants.LATE, "c"], 3, "killed"),
    ):
        assert mutants.state_of(killers, run, len(order)) == state
    assert mutants.state_of([], 0, 0) == "not reached"
