"""scripts/benchmarks/packs.py: how it cuts a pack, and that both ways of running it agree."""

import runpy

import pytest

from tests.programs import ROOT, run_program

SCRIPT = ROOT / "scripts/benchmarks/packs.py"


@pytest.fixture
def similar_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))["similar_runs"]


@pytest.mark.parametrize(
    ("lengths", "cuts"),
    [
        ([], []),
        ([7], [1]),
        ([32768, 200, 200, 200], [1, 4]),
        ([400, 100, 399, 99], [3, 4]),  # 99 is less than a quarter of the longest before it
        ([100, 400, 1600, 6400], [2, 4]),
        ([5, 100, 5, 100], [1, 2, 3, 4]),  # neighbours only: the pack keeps its order
        ([3, 0, 0, 3], [1, 3, 4]),  # no length is similar to none
    ],
)
def test_a_run_ends_where_lengths_would_differ_by_more_than_four_times(
    similar_runs, lengths, cuts
):
    runs = similar_runs(lengths, 4)
    assert [run.stop for run in runs] == cuts
    assert [run.start for run in runs] == [0, *cuts][: len(cuts)]


@pytest.mark.processes
def test_it_times_a_pack_in_one_call_and_in_several():
    options = ["--device", "cpu", "--longest", 900, "--hidden", 128, "--rounds", 1]
    printed = run_program(SCRIPT, *options)
    rows = [line.split("|") for line in printed.splitlines() if line.startswith("| ")][1:]
    assert [(row[1].strip(), row[3].strip()) for row in rows] == [
        ("0", "1"),
        ("8", "2"),
        ("50", "2"),
        ("200", "2"),
    ]
