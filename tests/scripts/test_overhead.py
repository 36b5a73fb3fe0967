"""scripts/benchmarks/overhead.py, with documents so short that its figures mean nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/overhead.py"


def test_it_compares_all_lanes():
    command = [sys.executable, SCRIPT, "--steps", "2", "--warmup", "1", "--lengths", "9", "5", "5"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    first_cells = [
        line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert first_cells[:5] == ["lane", "packed", "same work", "bare loop", "flexseq"]
    assert "3 documents a step, 19 tokens: 9, 2 x 5" in done.stdout
