"""The documentation: files, pages and errors that it names exist; its tables are the code's."""

import ast
import inspect
import re
import runpy
from dataclasses import fields

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import hf_flexseq
from hf_flexseq import FlexSeqArguments
from tests.hf.tiny import documents, tiny_llama
from tests.programs import ROOT
from tests.scripts.docs_blocks import FENCE

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
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NOT_OURS = ("runs/", "build/")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_file_and_page_that_a_page_names_exists():
    missing = []
    for path in PAGES:
        # modules are named with and without the package, result pages beside their index
        places = (ROOT, ROOT / "hf_flexseq", path.parent)
        for name in PATH.findall(path.read_text()):
            is_there = any((place / name).exists() for place in places)
            if not name.startswith(NOT_OURS) and not is_there:
                missing.append((path.name, name))
        for link in LINK.findall(path.read_text()):
            if not link.startswith("http") and not (path.parent / link).exists():
                missing.append((path.name, link))
    assert missing == []


def test_every_public_name_is_on_the_page_of_the_api():
    named = re.findall(r"^::: hf_flexseq\.(\w+)$", page("docs/api.md"), re.MULTILINE)
    assert sorted(named) == sorted(hf_flexseq.__all__)


def test_every_part_of_the_gpu_check_has_its_row(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    parts = runpy.run_path(str(ROOT / "scripts/gpu_check.py"))["PARTS"]
    section = page("docs/limits.md").split("\n## GPUs\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(parts)


def test_every_claim_of_the_readme_is_a_line_with_a_link():
    claims = page("README.md").split("## Six claims")[1].split("\n\n")[1]
    items = re.split(r"^\* ", claims, flags=re.MULTILINE)[1:]
    assert len(items) == 6
    assert all("](" in item and len(item) < 250 for item in items)


@pytest.mark.processes
def test_the_first_snippet_trains_on_any_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"^```python\n(.*?)^```", page("README.md"), re.MULTILINE | re.DOTALL)[1]
    names = {"model": tiny_llama(torch.float32), "dataset": documents([5, 3, 8, 4])}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 3


# ---- tables and redirects that are made when the site is built

RENDER = runpy.run_path(str(ROOT / "scripts/pages/render.py"))


def test_every_table_stands_on_one_page_and_names_its_rows():
    marked = [name for path in PAGES for name in RENDER["MARK"].findall(path.read_text())]
    assert sorted(marked) == sorted(RENDER["TABLES"])
    made = RENDER["on_page_markdown"](page("docs/options.md"))
    assert "<!-- table" not in made
    for option in fields(FlexSeqArguments):
        assert f"`{option.name}` |" in made
    refused = RENDER["TABLES"]["refusals"]()
    assert all(rule.instead in refused for rules in RENDER["REFUSALS"].values() for rule in rules)
    overridden = RENDER["TABLES"]["overrides"]()
    rules = RENDER["data"]("overrides.yaml")
    assert all(f"`{name}`" in overridden for rule in rules for name in rule["names"])
    with pytest.raises(KeyError, match="option"):
        RENDER["on_page_markdown"]("<!-- table: option -->")


def test_every_place_where_a_user_can_put_code_is_in_the_tables():
    places = RENDER["data"]("places.yaml")
    arguments = set(inspect.signature(Trainer.__init__).parameters)
    assert set(places["Arguments of the constructor"]) == arguments - {"self", "model", "args"}
    hooks = {name for name in {*dir(nn.Module), *dir(torch.Tensor)} if name[:9] == "register_"}
    assert set(places["Hooks on modules and parameters"]) == hooks
    events = {name for name in dir(TrainerCallback) if name[:3] == "on_"}
    assert set(places["Events of a callback"]) == events


def test_a_page_that_went_redirects_to_a_place_that_exists(tmp_path):
    for old, target in RENDER["data"]("moved.yaml").items():
        assert not (ROOT / "docs" / f"{old}.md").exists()
        folder, _, anchor = target.partition("#")
        assert (ROOT / "docs" / f"{folder.rstrip('/')}.md").exists()
        (tmp_path / folder).mkdir(exist_ok=True)
        with open(tmp_path / folder / "index.html", "a") as file:
            file.write(f'<h2 id="{anchor}">')
    RENDER["on_post_build"]({"site_dir": str(tmp_path)})
    redirect = (tmp_path / "objectives/dpo/index.html").read_text()
    assert 'url=../../objectives/#dpo"' in redirect
    (tmp_path / "limits/index.html").write_text("")
    with pytest.raises(ValueError, match="limits/ has no"):
        RENDER["on_post_build"]({"site_dir": str(tmp_path)})


# ---- errors that docs/troubleshooting.md quotes

SHORTEST = 20  # letters of a string that say which message it is
LEAST = 0.25  # share of a message that is the same whatever is filled in


def patterns():
    """A pattern for each string of the package and the recipes: a group for each constant part."""
    found = set()
    for folder in ("hf_flexseq", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for parts in strings_of(ast.parse(path.read_text(encoding="utf-8"))):
                if sum(map(len, parts)) >= SHORTEST:
                    found.add(tuple(parts))
    return found


def strings_of(node):
    """The strings below a node, each as its parts before, between and behind what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield [node.value]
    elif isinstance(node, ast.JoinedStr):
        texts = [""]
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts[-1] += part.value
            else:
                texts.append("")
        yield texts
    else:
        for below in ast.iter_child_nodes(node):
            yield from strings_of(below)


def is_printed(message, strings):
    """Whether the strings of the code that are whole in a message make enough of it up."""
    covered = set()
    for parts in strings:
        if all(part in message for part in parts):  # most strings are none of this message's
            match = re.search(".+?".join(f"({re.escape(part)})" for part in parts), message)
            for group in range(len(parts) if match else 0):
                covered |= set(range(*match.span(group + 1)))
    return len(covered) >= LEAST * len(message)


@pytest.mark.slow
def test_every_quoted_error_is_one_of_the_code():
    fences = FENCE.findall(page("docs/troubleshooting.md"))
    quoted = [text.strip() for language, _, text in fences if language == "text"]
    assert 25 <= len(quoted) <= 30
    assert len(set(quoted)) == len(quoted)
    quoted.remove("torch.OutOfMemoryError: CUDA out of memory.")  # of torch
    strings = patterns()
    assert [message for message in quoted if not is_printed(message, strings)] == []
    message = next(one for one in quoted if "has no hf_flexseq options" in one)
    for changed in (
        message.replace("has no hf_flexseq", "lacks hf_flexseq"),
        message.removesuffix(message[-20:]),
    ):
        assert not is_printed(changed, strings), "a message with other words is noticed"
