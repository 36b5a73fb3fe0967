"""scripts/gpu_check.py as far as it goes without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cpu_flash import CpuFlash

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_check.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SEGMENTS = {
        "causal": ([1, 0, 61], [1, 0, 61], True),
        "rectangles": ([5, 0, 9], [0, 7, 33], False),
    }
    return module


@pytest.mark.processes
def test_without_a_gpu_it_says_so_in_one_line():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gpu_check needs a CUDA GPU, and torch sees none here"
    assert not done.stdout


def test_a_right_kernel_holds(gpu_check):
    lines, holds = gpu_check.kernel_report(CPU)
    assert holds
    assert sum("| cpu_flash |" in line and "| ok |" in line for line in lines) == len(
        gpu_check.SEGMENTS
    )


def test_a_wrong_kernel_does_not(gpu_check, monkeypatch):
    class Wrong(CpuFlash):
        def forward(self, *args, scale):
            return super().forward(*args, scale=scale * 1.1)

    monkeypatch.setitem(CANDIDATES, "cpu", (Wrong(),))
    lines, holds = gpu_check.kernel_report(CPU)
    assert not holds
    assert any("FAILED" in line for line in lines)


@pytest.mark.processes
def test_both_trainers_train_alike(gpu_check):
    sizes = gpu_check.Sizes(layers=1, hidden=128, longest=64, batch=2, steps=3, warmup=1)
    runs = {name: gpu_check.train(name, sizes, use_cpu=True) for name in ("stock", "flexseq")}
    lines, holds = gpu_check.training_report(runs)
    assert holds
    assert len(runs["flexseq"]["losses"]) == 3
    assert runs["flexseq"]["tokens_per_s"] > 0
    assert sum("| ok |" in line for line in lines) == 2


@pytest.mark.processes
def test_a_run_that_dies_is_reported(gpu_check):
    died = gpu_check.launch([sys.executable, "-c", "raise ValueError('no luck')"])
    lines, holds = gpu_check.training_report({"stock": died})
    assert not holds
    assert "no luck" in lines[-1]
