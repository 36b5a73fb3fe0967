"""scripts/benchmarks/remat.py, on a document so short that its figures mean nothing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.programs import ROOT, run_program

pytestmark = pytest.mark.processes


@pytest.fixture
def starts_by_forks(monkeypatch):
    """The processes that the benchmark starts for its peaks of memory are forks as well."""

    def run(command, **options):
        interpreter, path, *words = command
        assert interpreter == sys.executable
        return SimpleNamespace(stdout=run_program(Path(path), *words))

    monkeypatch.setattr("subprocess.run", run)


@pytest.mark.usefixtures("starts_by_forks")
def test_it_states_the_gain_and_the_memory():
    options = ["--tokens", 64, "--layers", 2, "--pairs", 2]
    printed = run_program(ROOT / "scripts/benchmarks/remat.py", *options)
    assert "one document of 64 tokens; 2 pairs" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "save_attention_output",
        "True",
        "False",
    ]
    assert "faster on the processor" in printed
