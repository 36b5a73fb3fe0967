"""scripts/benchmarks: every benchmark starts, is in the index, and records what it measured."""

import json
import os
import subprocess
import sys

import pytest

from tests.programs import ROOT, run_program

BENCHMARKS = ROOT / "scripts/benchmarks"
SHARED = {
    "common",
    "forked",
    "lengths",
    "plan_timer",
    "reach_models",
    "tiny",
}  # modules that the benchmarks import
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED)


def run(name, *options, cwd=ROOT):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=cwd
    )


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


@pytest.fixture(scope="module")
def helps(tmp_path_factory):
    """What every benchmark says about itself."""
    program = tmp_path_factory.mktemp("helps") / "all_helps.py"
    program.write_text(ALL_HELPS)
    return json.loads(run_program(program, BENCHMARKS, *NAMES))


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_starts_and_takes_a_file_for_its_raw_figures(helps, name):
    assert "--json FILE" in helps[name]
    assert f"scripts/benchmarks/{name}.py" in helps[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_is_in_the_index(name):
    assert f"benchmarks/{name}.py" in (BENCHMARKS / "README.md").read_text()


@pytest.mark.processes
def test_a_record_holds_the_figures_and_what_they_were_measured_with(tmp_path):
    path = tmp_path / "folder" / "record.json"
    done = run("received_bytes", "--draws", 2, "--json", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["command"].startswith("python scripts/benchmarks/received_bytes.py --draws 2")
    assert record["machine"]["cores"] == os.cpu_count()
    assert {"python", "numpy"} <= set(record["versions"])
    assert len(record["figures"]["draws"]) == 2
    assert record["figures"]["draws"][0]["busiest_mb"] > 0


@pytest.mark.processes
def test_without_a_file_nothing_is_written(tmp_path):
    done = run("received_bytes", "--draws", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("received_bytes.py --draws 1, counted, not measured\n")
    assert list(tmp_path.iterdir()) == []


def test_no_benchmark_hides_a_module_of_the_standard_library():
    """A benchmark's own folder comes first on its path."""
    assert {*NAMES, *SHARED, "exchange", "peers", "data", "results"} & set(
        sys.stdlib_module_names
    ) == set()
