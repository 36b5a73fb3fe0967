"""scripts/benchmarks: every benchmark starts, is in the index, and records what it measured. Those
that measure trainers run on documents so short that their figures mean nothing."""

import json
import sys

import pytest

from tests.programs import ROOT, run_program

BENCHMARKS = ROOT / "scripts/benchmarks"
# modules that they import
SHARED = {"common", "forked", "lengths"}
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED)

# Starts every benchmark with --help in one fork, for torch takes seconds to import. Modules beside
# it are found as by a command, whatever this process has imported by their names.
ALL_HELPS = """
import contextlib, io, json, pathlib, runpy, sys

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
beside = {path.stem for path in pathlib.Path(folder).iterdir()}
for name in [name for name in sys.modules if name.partition(".")[0] in beside]:
    del sys.modules[name]
helps = {}
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    helps[name] = said.getvalue()
print(json.dumps(helps))
"""


@pytest.mark.processes
def test_every_benchmark_starts_and_takes_a_file_for_its_raw_figures(tmp_path):
    program = tmp_path / "all_helps.py"
    program.write_text(ALL_HELPS)
    for name, said in json.loads(run_program(program, BENCHMARKS, *NAMES)).items():
        assert "--json FILE" in said, name
        assert f"scripts/benchmarks/{name}.py" in said


def test_every_benchmark_is_in_the_index_and_hides_no_module_of_the_standard_library():
    index = (BENCHMARKS / "README.md").read_text()
    assert [name for name in NAMES if f"benchmarks/{name}.py" not in index] == []
    # a benchmark's own folder comes first on its path
    beside = {path.stem for path in BENCHMARKS.iterdir()}
    assert beside & set(sys.stdlib_module_names) == set()


def first_cells(name, *options):
    """The first column of what a benchmark prints, and all of it."""
    printed = run_program(BENCHMARKS / f"{name}.py", *options)
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows], printed


@pytest.mark.processes
def test_overhead_compares_all_lanes():
    options = ["--steps", 2, "--warmup", 1, "--lengths", 9, 5, 5]
    cells, printed = first_cells("overhead", *options)
    assert cells[:4] == ["lane", "packed", "same work", "flexseq"]
    assert "3 documents a step, 19 tokens: 9, 2 x 5" in printed


@pytest.mark.processes
def test_planners_are_compared_with_each_other():
    options = ["--sets", "documents", "--batches", 1, "--planners", "auto", "static"]
    cells, printed = first_cells("planners", *options)
    assert cells == ["lengths", "documents", "documents"]
    over_bound = [float(line.split("|")[6]) for line in printed.splitlines()[-2:]]
    assert 1 <= over_bound[0] < over_bound[1]
