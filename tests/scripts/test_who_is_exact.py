"""scripts/benchmarks/who_is_exact.py: its page names all rows and stacks, and a cell tells a wrong
update from a right one."""

import importlib
import sys

import pytest

from tests.programs import ROOT

FOLDER = ROOT / "scripts/benchmarks"
PAGE = (ROOT / "docs/who_is_exact.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmark():
    """The module of the benchmark."""
    paths = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    sys.modules.pop("common", None)
    try:
        yield importlib.import_module("who_is_exact")
    finally:
        sys.path[:] = paths
        for name in list(sys.modules):
            if name.partition(".")[0] in ("who_is_exact", "common", "exact_peers"):
                sys.modules.pop(name, None)


def test_the_page_has_every_row_and_stack(benchmark):
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert [row for row in benchmark.ROWS if not any(f"`{row}`" in line for line in lines)] == []
    assert [name for name in benchmark.STACKS.values() if name not in PAGE] == []
    # the table has a cell for each stack in each row
    first = len(benchmark.STACKS) + 1
    rows = [line for line in lines if line.count(" | ") == first - 1 and "`" in line]
    assert len(rows) >= len(benchmark.ROWS)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stack", ["ours", "trainer", "trl"])
def test_a_cell_runs(benchmark, stack):
    found = benchmark.cell(stack, "gqa", seconds=120)
    assert found.kind == "figure"
    assert 0 < found.error <= benchmark.EXACT
