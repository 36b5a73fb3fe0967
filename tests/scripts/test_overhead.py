"""scripts/benchmarks/overhead.py, with documents so short that its figures mean nothing."""

import pytest

from tests.programs import ROOT, run_program

pytestmark = pytest.mark.processes


def test_it_compares_all_lanes():
    options = ["--steps", 2, "--warmup", 1, "--lengths", 9, 5, 5]
    printed = run_program(ROOT / "scripts/benchmarks/overhead.py", *options)
    first_cells = [
        line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")
    ]
    assert first_cells[:4] == ["lane", "packed", "same work", "flexseq"]
    assert "3 documents a step, 19 tokens: 9, 2 x 5" in printed
