"""scripts/benchmarks/remat.py, on a document so short that its figures mean nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/remat.py"


def test_it_states_the_gain_its_bound_and_the_memory():
    command = [sys.executable, SCRIPT, "--tokens", "64", "--layers", "2", "--pairs", "2"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "one document of 64 tokens; 2 pairs" in done.stdout
    assert [
        line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")
    ] == [
        "attention_remat",
        "True",
        "False",
    ]
    assert all(
        words in done.stdout for words in ("faster on the processor", "bound by the formula")
    )
