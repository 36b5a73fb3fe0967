"""The tests on the device, each set in a process of its own that installs the device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.late_device import build
from tests.programs import ROOT

ON_DEVICE = Path(__file__).parent / "on_device"
REASON = build.reason_unavailable()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(REASON is not None, reason=f"no device to test on: {REASON}"),
]


# Tests that a GPU can run: whole models, and the 16 bits of the device's own kernel.
AS_ON_A_GPU = ("tests/hf/test_reach.py", "tests/attention/test_bfloat16.py")
EVERY_PUSH = "Llama or close_to_one_kernel and 2"
# Recurrent layers ask for operations that the device lacks.
WEEKLY = (
    "tests/attention",
    "tests/pipeline/test_exactness.py",
    "--ignore=tests/attention/recurrent",
)


def run_on_device(*names, marks="not nightly"):
    """Run files of tests on the device; show what pytest says where one fails."""
    run_pytest(*(str(ON_DEVICE / f"{name}.py") for name in names), "-m", marks)


def run_pytest(*words):
    command = [sys.executable, "-m", "tests.late_device", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.first
@pytest.mark.timeout(600)  # it compiles the device where that has not been done
def test_the_device_finds_what_it_should_and_whole_steps_are_free_of_it():
    run_on_device("rules", "store", "memory", "planted", "trainers", "choices")


def test_what_a_gpu_can_run_runs_there():
    run_pytest("--device", "cuda", *AS_ON_A_GPU, "-k", EVERY_PUSH)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_that_a_gpu_can_run_runs_there():
    run_pytest("--device", "cuda", *WEEKLY)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_family_runs_there():
    words = ("tests/hf/test_reach.py", "-k", "a_family_is_exact", "-m", "nightly")
    run_pytest("--device", "cuda", *words)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["layers", "trainers", "choices", "objectives"])
def test_longer_steps_are_free_of_it_too(name):
    run_on_device(name, marks="nightly")
