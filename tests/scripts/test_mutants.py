"""scripts/mutants.py: faults are drawn alike every time, stand behind switches that note what is
reached, and tests are tried in an order."""

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


def test_a_seed_draws_the_same_mutants_each_on_a_line_of_its_own(mutants, monkeypatch):
    found = mutants.all_mutants()
    monkeypatch.setattr(mutants, "all_mutants", lambda: found)
    drawn = mutants.drawn(60, seed=3)
    assert drawn == mutants.drawn(60, seed=3) != mutants.drawn(60, seed=4)
    assert len({(one["file"], one["line"]) for one in drawn}) == len(drawn) == 60
    assert {one["group"] for one in mutants.drawn(400, seed=3)} == set(mutants.GROUPS)
    assert len(set(map(mutants.key_of, found))) == len(found)


@pytest.mark.slow
def test_all_faults_of_a_group_compile_together(mutants):
    for path in sorted((ROOT / "hf_flexseq/program").glob("[a-z]*.py")):
        file = str(path.relative_to(ROOT))
        _, found = mutants.parsed("program", file)
        mutants.planted(file, {mutants.key_of(row): at for at, (row, _) in enumerate(found)})


def test_a_switch_plants_its_fault_alone_and_notes_what_is_reached(mutants):
    rows = [row for row, _ in mutants.parsed("plan", FILE)[1]]
    of_rounds = [row for row in rows if row["function"] == "ring_rounds"]
    (wanted,) = [
        at
        for at, row in enumerate(of_rounds)
        if (row["operator"], row["old"]) == ("dropped sign", "not chunk_by_chunk")
    ]
    runner = mutants.Runner(of_rounds, killers=1, budget_s=1.0, save=None)
    indices = {mutants.key_of(row): at for at, row in enumerate(of_rounds)}
    names = {"__name__": "rings", "__is_on__": runner.is_on}
    exec(mutants.planted(FILE, indices), names)

    def rounds():
        return names["ring_rounds"].__wrapped__("zigzag", 4, chunk_by_chunk=True)

    right = rings.ring_rounds("zigzag", 4, chunk_by_chunk=True)
    assert rounds() == right
    assert runner.notes[wanted] == 1
    assert 0 in runner.notes[:]  # of statements for other strategies
    runner.running = wanted
    assert rounds() != right


def test_a_statement_is_left_out_or_stays(mutants, monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    loop = "    for row in rows:\n        total += row\n"
    text = f"def count(rows):\n    total = 0\n{loop}    return total\n"
    (tmp_path / "count.py").write_text(text)
    rows = [row for row, _ in mutants.parsed("plan", "count.py")[1]]
    assert [row["operator"] for row in rows] == ["constant", "arithmetic", "left out"]
    indices = {mutants.key_of(row): at for at, row in enumerate(rows)}
    found = []
    for running in (mutants.OFF, 0, 1, 2):
        names = {"__is_on__": lambda index, running=running: index == running}
        exec(mutants.planted("count.py", indices), names)
        found.append(names["count"]([3, 4]))
    assert found == [7, 8, -7, 0]
    assert ast.unparse(mutants.parsed("plan", "count.py")[0]) == text.rstrip()


def made_up(mutants, budget_s=40.0, **row):
    """A mutant of FILE, and tests of which two do not reach it or do not pass."""
    fault, _ = mutants.parsed("plan", FILE)[1][0]
    runner = mutants.Runner([fault | row], killers=2, budget_s=budget_s, save=None)
    runner.seconds = {"a[1]": 0.3, "a[2]": 0.1, "b": 0.2, "c": 30.0, "elsewhere": 0.1}
    runner.seconds["test_rings.py::d"] = 5.0
    runner.reached = {test: {0} for test in runner.seconds} | {"elsewhere": set()}
    return runner


@pytest.mark.parametrize(
    ("outcomes", "budget_s", "state", "killers", "run"),
    [
        ({}, 40.0, "survived", [], 5),
        ({}, 25.0, "given up", [], 3),
        ({"a[2]": "failed", "b": "failed"}, 40.0, "killed", ["a[2]", "b"], 3),
        # a function kills once
        ({"a[2]": "failed", "a[1]": "failed"}, 40.0, "killed", ["a[2]"], 4),
        ({"c": "late"}, 40.0, "timed out", ["c (time out)"], 5),
        ({"c": "late", "b": "failed"}, 40.0, "killed", ["b", "c (time out)"], 4),
        # it fails without the mutant as well
        ({"b": "failed", ("b", "off"): "failed"}, 40.0, "survived", [], 5),
    ],
)
def test_tests_run_until_enough_functions_have_killed(
    mutants, monkeypatch, outcomes, budget_s, state, killers, run
):
    runner = made_up(mutants, budget_s)

    def in_fork(test, index=mutants.OFF, seconds=0.0):
        is_off = index == mutants.OFF
        return outcomes.get((test, "off") if is_off else test, "passed")

    monkeypatch.setattr(runner, "in_fork", in_fork)
    found = runner.find_killers(0)
    assert found == {"state": state, "killers": killers, "run": run, "reaching": 5}


def test_a_record_is_read_again(mutants, tmp_path, capsys):
    row, _ = mutants.parsed("plan", FILE)[1][0]
    found = {"state": "killed", "killers": ["a", "b (time out)"], "run": 2, "reaching": 3}
    moved, gone = row | found | {"line": 1}, row | found | {"old": "nowhere"}
    mutants.write_record(tmp_path / "record.json", {"date": "today"}, [moved, gone])
    left, others = mutants.again(tmp_path / "record.json")
    assert left == [row | {"known": ["a", "b"]}]
    assert others == [gone | {"state": "gone"}]
    mutants.print_page([left[0] | found | {"state": "survived", "killers": []}, *others])
    printed = capsys.readouterr().out
    assert "plan: 2 mutants, 1 survived, 1 gone" in printed
    assert printed.count("has lost its last killer") == 1
