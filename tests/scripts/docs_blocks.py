"""The code blocks of a page, and a reader who runs them in their order, in one folder.

```python title="train.py"     is written to that file; so are yaml files
```bash                        is run: commands start below, each in forks that have torch
```bash title="needs GPUs"     is left out, and so is every block whose title is no file
"""

import io
import os
import re
import runpy
import shlex
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import yaml
from accelerate.state import AcceleratorState

from hf_flexseq.cli import main
from tests.programs import ROOT, run_program, run_program_on_ranks
from tests.ranks import run_ranks

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\w[\w-]*\.(py|yaml)")
SHOWN = ("text", "json")  # what a program prints


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def is_file(self) -> bool:
        """Whether the block is written to the file of its title."""
        return FILE.fullmatch(self.title) is not None

    @property
    def is_run(self) -> bool:
        """Whether the block is a list of commands that run anywhere."""
        return self.language == "bash" and not self.title


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page of docs/ that are no output of a program."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(FENCE.findall(text)), "a fence is not understood"
    return [Block(*found) for found in FENCE.findall(text) if found[0] not in SHOWN]


def left_out(page: str) -> list[str]:
    """The titles of the blocks that are neither a file nor run."""
    return [block.title for block in blocks_of(page) if not block.is_file and not block.is_run]


def write_files(page: str, folder: Path) -> None:
    """Write every block with a file's name, once each."""
    for block in blocks_of(page):
        if block.is_file:
            path = folder / block.title
            assert not path.exists(), f"{path.name} is written twice"
            path.write_text(block.text, encoding="utf-8")


def commands_of(page: str) -> list[list[str]]:
    """The words of each command of the page, in order."""
    commands = []
    for block in blocks_of(page):
        if block.is_run:
            joined = block.text.replace("\\\n", " ")
            commands += [shlex.split(line) for line in joined.splitlines() if line.strip()]
    return commands


def run(words: list[str], folder: Path) -> str:
    """Run a command as a shell in `folder` would; return what its first process prints.

    A launcher becomes forks of this process, with the number of ranks that it was given.
    `run_together` is for the commands of torchrun.
    """
    program, *rest = words
    if program == "python":
        return run_program(folder / rest[0], *rest[1:], folder=folder)
    if program == "flexseq":
        return _printed_by_flexseq(rest, folder)
    assert [program, *rest[:2]] == ["accelerate", "launch", "--config_file"], words
    config, script, *arguments = rest[2:]
    count = yaml.safe_load((folder / config).read_text())["num_processes"]
    return run_program_on_ranks(count, folder / script, *arguments, folder=folder)[0]


def run_together(commands: list[list[str]], folder: Path) -> None:
    """Run scripts one after the other on two ranks, in one process each: to start a script takes
    longer than its few steps."""
    scripts = []
    for program, option, count, *script in commands:
        assert (program, option, count) == ("torchrun", "--nproc_per_node", "2")
        scripts.append(script)
    run_ranks(_on_a_rank, 2, scripts, folder, seconds=150)


def _on_a_rank(rank: int, world_size: int, scripts: list[list[str]], folder: Path) -> None:
    """scripts: each with its arguments."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for words in scripts:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        # the next one finds a process as a launcher starts it
        sys.modules.pop("my_data", None)
        AcceleratorState._reset_state(True)


def _printed_by_flexseq(words: list[str], folder: Path) -> str:
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed):
        assert main(words) == 0, words
    return printed.getvalue()
