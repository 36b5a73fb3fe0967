"""scripts/gpu_check.py, rehearsed on a CPU: every part but its lines for CUDA alone."""

import importlib
import inspect
import itertools
import os
import runpy
import subprocess
import sys

import pytest
import torch
import transformers

from hf_flexseq.kernels.cpu_flash import CpuFlash
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


def test_kernels_are_told_by_their_names():
    layers = part("layers")
    for name, kind in (
        ("void flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("nvjet_tst_128x256_64x4", "products"),
        ("merge_kernel", "ours"),
        ("unpack_kernel", "ours"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("vectorized_elementwise_kernel<4, ...>", "other"),
    ):
        assert layers.kind_of(name) == kind, name


def test_a_trainer_that_fails_is_a_row_and_the_other_one_runs():
    training = part("training")
    stock = {"losses": [1.0, 0.5], "tokens_per_s": 3.0, "peak_gib": 0.0}

    def fails():
        raise RuntimeError("no kernel\nin many words")

    ways = {"stock": lambda: stock, "flexseq": fails}
    section = training.compared("", ways)
    assert not section.holds
    assert "| flexseq | FAILED: RuntimeError: no kernel |" in section.lines
    assert any(line.startswith("| stock | 3 | 1.00x |") for line in section.lines)
    off = training.compared("", ways | {"flexseq": lambda: stock | {"losses": [1.0, 0.4]}})
    assert not off.holds


def test_packs_are_attended_to_by_torch_s_varlen_attention(monkeypatch):
    """As transformers calls it, and as this version of torch is called."""
    training = part("training")
    seen = []
    known = inspect.signature(training.varlen_attn)

    def attend(*args, **kwargs):
        seen.append(known.bind(*args, **kwargs).arguments)
        return args[0]

    attend.__signature__ = known
    monkeypatch.setattr(training, "varlen_attn", attend)
    q, k = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8)
    cu = torch.tensor([0, 5, 9])
    kwargs = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    out, _ = training.attend_packed(None, q, k, k, None, scaling=0.1, **kwargs)
    assert out.shape == (1, 9, 4, 8)
    assert seen[0]["cu_seq_q"].tolist() == [0, 5, 9]
    assert seen[0]["window_size"] == (-1, 0)
    assert seen[0]["scale"] == 0.1


# ---- time


def test_minutes_are_kept_for_every_part_that_can_run_here():
    command = importlib.import_module("gpu_check")
    parts = list(command.PARTS)
    kept = [command.kept_share(parts, first, 1) for first in range(len(parts) + 1)]
    own = [before - after for before, after in itertools.pairwise(kept)]
    assert kept[0] == pytest.approx(1)
    assert kept[-1] == 0
    for name, share in zip(parts, own, strict=True):
        assert (share > 0.02) == (name not in command.LEAST_GPUS), name
    # alone, a part has all of the time
    assert command.kept_share(["training"], 1, 1) == 0


@pytest.mark.processes  # git
def test_a_part_that_hangs_takes_no_time_of_those_after_it(monkeypatch, capsys):
    command, report = importlib.import_module("gpu_check"), part("report")
    limits = {}

    def hangs(name, setting, seconds):
        limits[name] = seconds
        return report.Section(title=name, lines=("fine",))

    monkeypatch.setattr(command, "section_of", hangs)
    words = ["--rehearse", "--minutes", "10", "--parts", "nccl", "layers", "rates", "nccl"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    assert command.main() == 0
    assert list(limits) == ["nccl", "layers", "rates"]
    shares = [command.SHARES[name] for name in limits]
    after = [sum(shares[number + 1 :]) for number in range(3)]
    wanted = [600 * (1 - left / sum(shares)) for left in after]
    assert list(limits.values()) == pytest.approx(wanted, abs=5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("gpu_check, gpu_checks.rates, gpu_checks.fused, gpu_checks.nccl", ["transformers"]),
        ("gpu_checks.training, gpu_checks.layers, gpu_checks.figures", []),
    ],
)
def test_parts_load_no_package_that_they_can_do_without(modules, heavy):
    unwanted = ["pytest", *heavy]
    code = f"import sys, {modules}; sys.exit(not sys.modules.keys().isdisjoint({unwanted}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SCRIPT.parent)))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_every_part_and_every_process_of_one_is_there():
    command = importlib.import_module("gpu_check")
    places = [*command.PARTS.values(), "several.run_ranks", "lost_rank.run_rank"]
    places.append("rates.run_cudnn")
    assert all(callable(command.function_of(place)) for place in places)


# ---- what is wrong is found


def test_last_words_name_a_rank_or_they_do_not():
    for words, is_named in (
        ("Error: rank 0 could not receive from rank 3 chunks [1]", True),
        ("rank 0 could not exchange with ranks [3] heads", True),
        ("rank 0 could not receive from rank 31", False),
        ("connection closed by peer", False),
    ):
        assert part("lost_rank").names(words, 3) == is_named


def test_waits_are_errors_inside_of_attention_and_nowhere_else(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    one_rank, seen = part("one_rank"), []

    class Looking(CpuFlash):
        def forward(self, *args, **kwargs):
            seen.append(modes[-1])
            return super().forward(*args, **kwargs)

        def backward(self, *args, **kwargs):
            seen.append(modes[-1])
            return super().backward(*args, **kwargs)

    monkeypatch.setattr(one_rank, "choose_kernel", lambda *asked: Looking())
    config = transformers.LlamaConfig(**one_rank.TINY)
    rank = one_rank.OneRank(config, CPU, torch.float32, checkpointing=False)
    with one_rank.host_waits_nowhere(True):
        rank.forward_backward([5, 3])
    assert seen == ["error"] * 4  # two layers, forward and backward
    assert modes[-1] == "default"
