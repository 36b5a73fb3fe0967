"""scripts/mutants.py: faults are drawn alike every time, planted and taken out again, and reached
by the probes of their own statement."""

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
