"""scripts/gpu_check.py, rehearsed on a CPU: every part but its lines for CUDA alone."""

import importlib
import os
import runpy
import subprocess
import sys

import pytest
import torch

from tests.programs import ROOT

SCRIPT = ROOT / "scripts/gpu_check.py"
CPU = torch.device("cpu")
ONCE_A_WEEK = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(600)]


def once_a_week(test):
    for mark in ONCE_A_WEEK:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def part(name):
    """A module of the checks."""
    return importlib.import_module(f"gpu_checks.{name}")


def rehearsed(module, name):
    """A section of a rehearsal."""
    setting = part("report").Setting(rehearse=True, plans=1)
    return getattr(part(module), f"{name}_section")(setting)


# ---- the command


def test_parts_are_named_and_numbers_are_above_0(capsys):
    parser = runpy.run_path(str(SCRIPT))["parser"]()
    assert parser.parse_args(["--parts", "split", "nccl"]).parts == ["split", "nccl"]
    for words in (["--minutes", "0"], ["--minutes", "nan"], ["--plans", "-1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert f"{words[0]}: expected a number above 0, got {words[1]}" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    assert said.err == "gpu_check needs a CUDA GPU, and torch sees none here\n"
    assert not said.out


@once_a_week
def test_a_rehearsal_writes_a_page_that_says_so(tmp_path):
    words = ["--rehearse", "--parts", "rates", "hsdp", "rates", "--out", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.iterdir()
    assert page.read_text() == done.stdout
    assert done.stdout.startswith("# Rehearsal of the GPU check on a CPU")
    assert "Not run: it needs 4 GPUs" in done.stdout


@pytest.mark.processes
def test_a_part_that_dies_or_hangs_is_on_the_page():
    launch = part("report").launch
    died = launch([sys.executable, "-c", "raise ValueError('no luck')"])
    assert "no luck" in died["error"]
    late = launch([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5)
    assert "had not ended" in late["error"]


# ---- each part


@once_a_week
def test_plans_of_several_ranks_hold():
    section = rehearsed("several", "plans")
    assert section.holds, section.text()
    assert section.text().count("| ok |") == 12


@once_a_week
def test_all_that_is_timed_on_one_device_is_rehearsed():
    for module, name, said in (
        ("rates", "split", "| none | 0 |"),
        ("rates", "cudnn", "Not run: it needs a GPU of Hopper's"),
        ("nccl", "nccl", "gloo in a world of one"),
        ("layers", "layers", "| compiled | pack |"),
        ("training", "training", "| flexseq, without cuDNN |"),
        ("training", "lengths", "| 128 tokens: flexseq |"),
        ("figures", "memory", "not judged"),
        ("figures", "calibration", "not judged"),
    ):
        section = rehearsed(module, name)
        assert section.holds, section.text()
        assert said in section.text(), section.text()
        assert "FAILED" not in section.text()


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("rates", "rates", "| 4 x 16 | 4 on 2 | 0."),
        ("fused", "fused", "| sizes that divide nothing | torch.float32 | torch |"),
        pytest.param("lost_rank", "lost_rank", "| 0 | yes |", marks=ONCE_A_WEEK),
    ],
)
def test_what_is_seen_is_on_the_page(module, name, said):
    section = rehearsed(module, name)
    assert section.holds
    assert said in section.text()
