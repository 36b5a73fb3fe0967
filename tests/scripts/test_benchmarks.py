"""scripts/benchmarks: every benchmark starts, is in the index, and records what it measured."""

import importlib.util
import json
import os
import sys

import pytest

from tests.programs import ROOT, run_program

BENCHMARKS = ROOT / "scripts/benchmarks"
SHARED = {
    "common",
    "forked",
    "lengths",
    "reach_models",
    "tiny",
}  # modules that the benchmarks import
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


@pytest.fixture
def common(monkeypatch):
    """The module that benchmarks share, as if `step_time.py` had been started."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "step_time.py"), "--steps", "2"])
    spec = importlib.util.spec_from_file_location("benchmarks_common", BENCHMARKS / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes  # git
def test_a_record_holds_the_figures_and_what_they_were_measured_with(common, tmp_path):
    path = tmp_path / "folder" / "record.json"
    common.write_record(path, {"steps": [1, 2]})
    record = json.loads(path.read_text())
    assert record["command"] == "python scripts/benchmarks/step_time.py --steps 2"
    assert record["machine"]["cores"] == os.cpu_count()
    assert {"python", "numpy"} <= set(record["versions"])
    assert record["figures"] == {"steps": [1, 2]}


def test_without_a_file_nothing_is_written(common, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common.write_record(None, {"steps": [1, 2]})
    assert list(tmp_path.iterdir()) == []


def test_no_benchmark_hides_a_module_of_the_standard_library():
    """A benchmark's own folder comes first on its path."""
    assert {*NAMES, *SHARED, "exchange", "peers", "data", "results"} & set(
        sys.stdlib_module_names
    ) == set()
