"""The code blocks of a page, and a reader who runs them in their order, in one folder.

```python title="train.py"     is written to that file; so are yaml and json files
```bash                        is run: commands start below, each in forks that have torch
```bash title="needs GPUs"     is left out, and so is every block whose title is no file
"""

import io
import re
import runpy
import shlex
import sys
from contextlib import chdir, redirect_stdout
from typing import NamedTuple

import yaml

from hf_flexseq.cli import main
from tests.programs import ROOT, run_program, run_program_on_ranks
from tests.ranks import run_ranks

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\w[\w-]*\.(py|yaml|json)")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks_of(page):
    """The blocks of a page of docs/ that are no output of a program."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = [Block(*found) for found in FENCE.findall(text)]
    assert text.count("\n```") == 2 * len(blocks), "a fence is not understood"
    return [one for one in blocks if one.title or one.language not in ("", "text", "json")]


def left_out(page):
    """The titles of the blocks that are neither a file nor run."""
    blocks = [one for one in blocks_of(page) if not FILE.fullmatch(one.title)]
    return [one.title or one.language for one in blocks if one.title or one.language != "bash"]


def files_of(page):
    """The text of every block with a file's name, by name."""
    found = {}
    for block in blocks_of(page):
        if FILE.fullmatch(block.title):
            assert block.title not in found, f"{block.title} is written twice"
            found[block.title] = block.text
    return found


def commands_of(page):
    """The commands of a page, in order."""
    text = "".join(
        one.text for one in blocks_of(page) if (one.language, one.title) == ("bash", "")
    )
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def run(command, folder, *more):
    """Run a command as a shell in `folder` would; return what its first process prints.

    A launcher becomes forks of this process, with the number of ranks that it was given. more:
    further words of a command of accelerate.
    """
    program, *rest = shlex.split(command)
    if program == "python":
        return run_program(folder / rest[0], *rest[1:], folder=folder)
    if program == "flexseq":
        printed = io.StringIO()
        with chdir(folder), redirect_stdout(printed):
            assert main(rest) == 0, command
        return printed.getvalue()
    if program == "torchrun":
        assert rest[0] == "--nproc_per_node"
        return run_ranks(_on_a_rank, int(rest[1]), rest[2:], folder, seconds=150)[0]
    assert [program, *rest[:2]] == ["accelerate", "launch", "--config_file"], command
    config, script, *words = rest[2:]
    count = yaml.safe_load((folder / config).read_text())["num_processes"]
    if script == "-m":
        return run_ranks(_on_a_rank, count, ["-m", *words, *more], folder, seconds=150)[0]
    return run_program_on_ranks(count, folder / script, *words, *more, folder=folder)[0]


def _on_a_rank(rank, world_size, words, folder):
    printed = io.StringIO()
    sys.path.insert(0, str(folder))
    with chdir(folder), redirect_stdout(printed):
        if words[:2] == ["-m", "hf_flexseq.cli"]:
            assert main(words[2:]) == 0
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__")
        else:
            sys.modules.pop("data", None)  # another program has a module of this name
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()
