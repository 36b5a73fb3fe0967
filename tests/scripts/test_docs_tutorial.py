"""The commands of docs/tutorial.md run in their order, on fewer documents and a smaller model.

What `flexseq calibrate` would measure is replaced by its estimate: timings of so little work on a
busy machine may allow no fit.
"""

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

# What every forked rank would import again.
import hf_flexseq.hf.trainer  # noqa: F401
from hf_flexseq.cli import main
from hf_flexseq.hf.calibration import choose
from hf_flexseq.profiler.calibrate import Calibration
from tests.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]

# What is smaller here: documents, model, run, and what a rank may hold, so that some are shared.
SMALLER = {
    '"*/*.py"': '"json/*.py"',
    '"hidden_size": 128': '"hidden_size": 16',
    '"intermediate_size": 352': '"intermediate_size": 24',
    "--max_steps 12": "--max_steps 1",
    "--per_device_train_batch_size 8": "--per_device_train_batch_size 2",
    "6144": "1024",
    "--step 3": "--step 0",
    "--sequences-per-step 16": "--sequences-per-step 4",
}
LAUNCHER = "torchrun --nproc_per_node 2 "


def smaller(text):
    for of_page, of_test in SMALLER.items():
        text = text.replace(of_page, of_test)
    return text


def estimated(probes, shape, estimate, communicator, **options):
    """A calibration that finds what was estimated."""
    return Calibration(cost=estimate, errors=(0.1,), tokens=1)


def run(rank, world_size, folder, words):
    """Run one command in the folder, as its program would."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules.pop("data", None)  # another program has a module of this name
    choose.calibrate = estimated
    program, *rest = words
    if program == "-m":
        assert rest[0] == "hf_flexseq.cli"
        assert main(rest[1:]) == 0
    elif program == "flexseq":
        assert main(rest) == 0
    else:
        sys.argv = rest if program == "python" else words
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.nightly
@pytest.mark.processes
def test_the_commands_of_the_tutorial_run_in_their_order(tmp_path):
    assert all(text in PAGE for text in SMALLER)
    for name, text in FILES.items():
        (tmp_path / name).write_text(smaller(text), encoding="utf-8")
    for command in COMMANDS:
        ranks = 2 if command.startswith(LAUNCHER) else 1
        words = shlex.split(smaller(command.removeprefix(LAUNCHER)))
        run_ranks(run, ranks, tmp_path, words)
    for html in re.findall(r"--html (\S+)", PAGE):
        assert (tmp_path / html).stat().st_size < 2e6
    plans = [json.loads((tmp_path / f"{kind}.jsonl").read_text()) for kind in ("auto", "static")]
    assert plans[0]["lengths"] == plans[1]["lengths"]
