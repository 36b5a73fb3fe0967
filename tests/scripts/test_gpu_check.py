"""scripts/gpu_check.py, rehearsed on a CPU: every part but its lines for CUDA alone."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels import fused
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.fused import TorchFused
from tests.matching import Launches

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_check.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
CPU = torch.device("cpu")
MINUTES = pytest.mark.timeout(600)  # on a busy machine


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def part(name):
    """A module of the checks."""
    return importlib.import_module(f"gpu_checks.{name}")


def rehearsal(plans=1):
    return part("report").Setting(rehearse=True, plans=plans)


def command(*options, **variables):
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | variables,
        check=False,
    )


# ---- the command


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err == "gpu_check needs a CUDA GPU, and torch sees none here\n"
    assert not said.out


@pytest.mark.processes
@MINUTES
@pytest.mark.nightly
def test_a_rehearsal_writes_a_page_that_says_so(tmp_path):
    done = command("--rehearse", "--parts", "kernels", "hsdp", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.iterdir()
    assert page.read_text() == done.stdout
    assert done.stdout.startswith("# Rehearsal of the GPU check on a CPU")
    assert "Not run: it needs 4 GPUs" in done.stdout


@pytest.mark.processes
def test_a_part_that_dies_is_on_the_page():
    died = part("report").launch([sys.executable, "-c", "raise ValueError('no luck')"])
    section = part("training").section_of({"stock": died}, part("training").SHORT)
    assert not section.holds
    assert "no luck" in section.text()


@pytest.mark.processes
def test_a_part_that_hangs_is_ended():
    late = part("report").launch(
        [sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5
    )
    assert "had not ended" in late["error"]


# ---- kernels


def test_a_right_kernel_holds():
    section = part("kernels").kernel_errors_section(rehearsal())
    assert section.holds
    rows = [line for line in section.lines if "| cpu_flash |" in line and "| ok |" in line]
    assert len(rows) == len(part("kernels").SHORT_CASES)


def test_a_wrong_kernel_does_not(monkeypatch):
    class Wrong(CpuFlash):
        def forward(self, call):
            return super().forward(call._replace(scale=call.scale * 1.1))

    monkeypatch.setitem(CANDIDATES, "cpu", (Wrong(),))
    section = part("kernels").errors_of(CPU, part("kernels").SHORT_CASES)
    assert not section.holds
    assert "FAILED" in section.text()


def test_kernels_that_are_not_there_are_named_with_the_reason():
    text = part("kernels").kernel_seconds_section(rehearsal()).text()
    assert "| cpu_flash | 0." in text
    assert "| FA3 | not run: it runs on CUDA, not on cpu |" in text


# ---- between kernel calls


def test_triton_s_kernels_hold():
    section = part("fused").fused_section(rehearsal())
    assert section.holds, section.text()
    assert section.text().count("| ok |") == len(part("fused").SHORT_CASES)


@pytest.mark.parametrize("operation", ["merge", "add", "gather", "pack", "unpack"])
def test_an_operation_that_leaves_something_out_does_not(operation):
    class Wrong(TorchFused):
        pass

    setattr(Wrong, operation, lambda *_: None)
    section = part("fused").section_of(Wrong(), CPU, part("fused").SHORT_CASES)
    assert not section.holds
    assert "FAILED" in section.text()


def test_without_triton_s_interpreter_a_cpu_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    text = part("fused").fused_section(rehearsal()).text()
    assert "Not run: on a CPU it needs Triton's interpreter: set TRITON_INTERPRET=1." in text


# ---- plans


@MINUTES
@pytest.mark.nightly
def test_plans_on_threads_are_exact():
    section = part("one_device").plans_section(rehearsal())
    assert section.holds, section.text()
    assert section.text().count("| ok |") == 4


@MINUTES
@pytest.mark.nightly
def test_pipelines_on_threads_are_exact():
    section = part("one_device").pipelines_section(rehearsal())
    assert section.holds, section.text()
    assert section.text().count("| ok |") == 2


def test_a_ring_that_loses_a_hundredth_is_found(monkeypatch):
    subject, one_device = part("subject"), part("one_device")
    merge = fused.merge_into

    def wrong(out, lse, part_out, part_lse):
        merge(out, lse, 0.99 * part_out, part_lse)

    monkeypatch.setattr(fused, "merge_into", wrong)
    examples = subject.documents(rehearsal())
    lengths = []
    for rank in range(2):
        lengths += [len(example["input_ids"]) for example in examples[rank::2]]
    planner = part("lost_rank").OneRing(2)
    planner.submit(0, lengths)
    precision, _ = subject.precisions(CPU)
    case = one_device.Case(
        plan=planner.result(0),
        topology=Topology(nodes=1, ranks_per_node=2),
        launches=Launches.BY_LANE,
        blocks=False,
        seed=0,
        way=one_device.Way(precision=precision, lockstep=True, checkpointing=False, passes=False),
    )
    model = subject.small_llama(CPU, layers=1)
    true = subject.true_gradients(model, examples)
    assert one_device._error_of(case, model, examples, true) > subject.FLOAT32_BOUND
    monkeypatch.setattr(fused, "merge_into", merge)
    assert one_device._error_of(case, model, examples, true) < subject.FLOAT32_BOUND


@pytest.mark.processes
@MINUTES
@pytest.mark.nightly
def test_plans_on_two_processes_are_exact():
    section = part("several").plans_section(rehearsal())
    assert section.holds, section.text()
    assert section.text().count("| ok |") == 12


@pytest.mark.processes
@MINUTES
@pytest.mark.nightly
def test_a_killed_rank_is_named():
    section = part("lost_rank").lost_rank_section(rehearsal())
    assert section.holds, section.text()
    assert "| 0 | yes |" in section.text()


def test_last_words_name_a_rank_or_they_do_not():
    names = part("lost_rank").names
    assert names("Error: rank 0 could not receive from rank 3 chunks [1]", 3)
    assert names("rank 0 could not exchange with ranks [3] heads", 3)
    assert not names("rank 0 could not receive from rank 31", 3)
    assert not names("connection closed by peer", 3)


# ---- figures


@MINUTES
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["calibration", "memory"])
def test_figures_are_shown_and_not_judged(name):
    section = getattr(part("figures"), f"{name}_section")(rehearsal())
    assert section.holds
    assert "not judged" in section.text()


@MINUTES
@pytest.mark.nightly
def test_the_host_is_timed_in_every_kind_of_attention():
    text = part("figures").host_section(rehearsal()).text()
    for work in ("local", "ulysses", "zigzag", "balanced", "hybrid", "three zones"):
        assert f"| {work} | no |" in text
    for work in ("ulysses", "hybrid", "three zones"):
        assert f"| {work} | yes |" in text


def test_waits_are_errors_inside_of_attention_and_nowhere_else(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    figures, seen = part("figures"), []

    class Looking(CpuFlash):
        def forward(self, *args, **kwargs):
            seen.append(modes[-1])
            return super().forward(*args, **kwargs)

        def backward(self, *args, **kwargs):
            seen.append(modes[-1])
            return super().backward(*args, **kwargs)

    monkeypatch.setattr(figures, "choose_kernel", lambda *asked: Looking())
    guard = figures.host_waits_nowhere
    monkeypatch.setattr(figures, "host_waits_nowhere", lambda is_guarded: guard(True))
    figures._timed(figures._works(16)[0], rehearsal(), use_blocks=False)
    assert seen == ["error"] * 4  # two rounds, forward and backward
    assert modes[-1] == "default"


# ---- training


@pytest.mark.processes
@MINUTES
@pytest.mark.nightly
def test_both_trainers_train_alike():
    training = part("training")
    runs = {
        name: training.train(name, training.SHORT, use_cpu=True) for name in ("stock", "flexseq")
    }
    section = training.section_of(runs, training.SHORT)
    assert section.holds
    assert len(runs["flexseq"]["losses"]) == 3
    assert runs["flexseq"]["tokens_per_s"] > 0
    assert sum("| ok |" in line for line in section.lines) == 2


@pytest.mark.slow
def test_a_strategy_is_held_to_the_error_of_a_kernel_call(monkeypatch):
    kinds = part("kinds")
    name = "window 128 with sinks"
    window = kinds.KINDS[name]._replace(reach=kinds.Reach(window=16))
    monkeypatch.setattr(kinds, "KINDS", {name: window})
    monkeypatch.setattr(kinds, "STRATEGIES", ("zigzag",))
    assert kinds.kinds_section(rehearsal()).holds
    monkeypatch.setattr(kinds, "MOST_OF_A_CALL", 0.01)
    assert not kinds.kinds_section(rehearsal()).holds


@pytest.mark.slow
def test_ranks_that_share_a_recurrence_are_held_to_the_error_of_one(monkeypatch):
    recurrent = part("recurrent")
    monkeypatch.setattr(recurrent, "KINDS", ("convolution", "gated delta"))
    monkeypatch.setattr(recurrent, "STRATEGIES", ("zigzag",))
    section = recurrent.recurrent_section(rehearsal())
    assert section.holds
    assert any("gated delta | chunked" in line for line in section.lines)
    monkeypatch.setattr(recurrent, "MOST_OF_ONE_RANK", 0.01)
    assert not recurrent.recurrent_section(rehearsal()).holds
