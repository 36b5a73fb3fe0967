"""The documentation: what it names exists, and it knows every option."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import hf_flexseq
from hf_flexseq.hf.calibration import choose
from tests.hf.tiny import documents, tiny_llama

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "scripts/benchmarks/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# `plan/shard.py`, `hf_flexseq/planner/search/`, `tests/attention`, `scripts/test.sh`
PATH = re.compile(
    r"`((?:hf_flexseq|tests|scripts|recipes|docs|[a-z_]+)/[\w/.-]*?(?:\.(?:py|sh|md|yaml|txt)|/))`"
)
NOT_OURS = ("runs/", "build/")


def test_every_file_that_a_page_names_exists():
    missing = []
    for page in PAGES:
        # modules are named with and without the package, result pages beside their index
        places = (ROOT, ROOT / "hf_flexseq", page.parent)
        for name in PATH.findall(page.read_text()):
            is_there = any((place / name).exists() for place in places)
            if not name.startswith(NOT_OURS) and not is_there:
                missing.append((page.name, name))
    assert missing == []


def test_every_link_between_pages_leads_somewhere():
    missing = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        pages = [link for link in links if not link.startswith("http")]
        missing += [(page.name, link) for link in pages if not (page.parent / link).exists()]
    assert missing == []


def test_the_options_page_is_what_the_options_say():
    names = runpy.run_path(str(ROOT / "scripts/options_page.py"))
    page = (ROOT / "docs/options.md").read_text()
    assert names["with_options"](page) == page, "run python scripts/options_page.py"


def test_every_public_name_is_on_the_page_of_the_api():
    page = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^::: hf_flexseq\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(hf_flexseq.__all__)


def test_every_part_of_the_gpu_check_has_its_row(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    parts = runpy.run_path(str(ROOT / "scripts/gpu_check.py"))["PARTS"]
    page = (ROOT / "docs/gpus.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(parts)


@pytest.mark.processes
def test_the_first_snippet_trains_on_any_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "HF_HOME", tmp_path)  # a cost model is measured, and kept here
    page = (ROOT / "README.md").read_text()
    snippet = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    names = {"model": tiny_llama(torch.float32), "dataset": documents([5, 3, 8, 4])}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 3


def test_every_claim_of_the_readme_is_a_line_with_a_link():
    text = (ROOT / "README.md").read_text()
    claims = text.split("## Six claims")[1].split("\n\n")[1]
    items = re.split(r"^\* ", claims, flags=re.MULTILINE)[1:]
    assert len(items) == 6
    assert all("](" in item and len(item) < 250 for item in items)
