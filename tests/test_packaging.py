"""What a wheel holds, as pyproject.toml says: every file of the package, and a command that runs
where torch is not installed."""

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_flexseq

PACKAGE = Path(hf_flexseq.__file__).parent
CONFIG = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_of_the_package_is_in_the_wheel():
    """Modules in folders that are packages, and other files that the configuration names."""
    patterns = []
    for package, names in CONFIG["tool"]["setuptools"]["package-data"].items():
        folder = package.replace(".", "/").removeprefix("hf_flexseq").lstrip("/")
        patterns += [f"{folder}/{name}".lstrip("/") for name in names]
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").exists(), f"{name} is in no package"
        else:
            assert any(fnmatch.fnmatch(name, one) for one in patterns), f"{name} is left out"
    for one in patterns:
        assert list(PACKAGE.glob(one)), f"there is no {one}"


def test_every_command_is_where_the_configuration_says():
    assert CONFIG["project"]["scripts"] == {"flexseq": "hf_flexseq.cli:main"}


@pytest.mark.processes
def test_without_torch_lengths_are_planned_and_measuring_says_what_is_missing(tmp_path):
    """An interpreter that cannot import the heavy libraries, as after `pip install --no-deps`."""
    (tmp_path / "lengths.txt").write_text("900\n300\n50\n")
    machine = ["--topology", "1x2", "--cost-model", "llama-3.1-8b-h200"]
    lengths, plans, html = (str(tmp_path / name) for name in ("lengths.txt", "p.json", "r.html"))
    cap = ["--max-tokens-per-rank", "1000"]
    commands = [
        ["plan", "--lengths", lengths, *machine, *cap, "--json", plans],
        ["compare", "--lengths", lengths, *machine, *cap, "--planners", "auto"],
        ["view", plans],
        ["env"],
        ["report", plans, "--html", html],
        ["calibrate", "gpt2", "--json", str(tmp_path / "cost.json")],
    ]
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'accelerate', 'matplotlib', 'highspy'):\n"
        "    sys.modules[name] = None\n"
        "from hf_flexseq.cli import main\n"
        "from hf_flexseq.program.__main__ import main as program\n"
        f"print([main(words) for words in {commands!r}], program([{plans!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 2, 2] 0"
    assert done.stderr.count("\n") == 2
    said = "flexseq calibrate: training a model needs torch and transformers: pip install"
    assert said in done.stderr
    assert "flexseq report: reports need matplotlib, which cannot be imported: pip" in done.stderr
    assert "no torch: only planning works here" in done.stdout
