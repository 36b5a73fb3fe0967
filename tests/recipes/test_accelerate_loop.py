"""The hand-written loop of the README runs as it is, on two processes, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


ROOT = Path(__file__).resolve().parents[2]


LAUNCH = [
    "accelerate",
    "launch",
    "--config_file",
    "recipes/accelerate_configs/cpu.yaml",
    "--main_process_port",
    "0",
]


def test_the_loop_learns():
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [*LAUNCH, "recipes/accelerate_loop.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 2
