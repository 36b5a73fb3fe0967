"""What a wheel holds, as pyproject.toml says: every file of the package, and a command that runs
where torch is not installed. And which modules stand in hf/."""

import ast
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
        "for name in ('torch', 'transformers', 'accelerate', 'matplotlib', 'pulp', 'highspy'):\n"
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


# ---- hf/ is where HuggingFace libraries are used

HUGGINGFACE = {"transformers", "accelerate", "datasets", "deepspeed", "huggingface_hub"}
HUGGINGFACE |= {"peft", "tokenizers", "trl"}


def imported(source):
    """The top packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def modules(folder):
    """The modules of a folder, without those that hold nothing but a docstring."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        only_docstring = all(isinstance(node, ast.Expr) for node in body)
        if path.name != "__init__.py" and not only_docstring:
            found.append(path)
    return found


def test_modules_in_hf_use_a_huggingface_library():
    """A module that uses none, nor another module of hf, belongs in a lower folder."""
    paths = modules(PACKAGE / "hf")
    assert len(paths) > 50
    without = [
        str(path.relative_to(PACKAGE))
        for path in paths
        if not imported(source := path.read_text(encoding="utf-8")) & HUGGINGFACE
        and "from hf_flexseq.hf." not in source
    ]
    assert not without


def test_the_search_finds_imports_wherever_they_stand():
    source = "import os.path\ndef f():\n    from accelerate.utils import X\n    from . import y"
    assert imported(source) == {"os", "accelerate"}
