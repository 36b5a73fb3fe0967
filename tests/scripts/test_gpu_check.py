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

from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels import fused_operations
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.planner.process.client import Planner
from tests.matching import Launches
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


def test_parts_run_once_and_numbers_are_above_0(capsys):
    parser = runpy.run_path(str(SCRIPT))["parser"]()
    assert parser.parse_args(["--parts", "scans", "host", "scans"]).parts == ["scans", "host"]
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
    words = ["--rehearse", "--parts", "kernels", "hsdp", "--out", tmp_path]
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
    launch, training = part("report").launch, part("training")
    died = launch([sys.executable, "-c", "raise ValueError('no luck')"])
    section = training.section_of({"stock": died}, training.SHORT)
    assert not section.holds
    assert "no luck" in section.text()
    late = launch([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5)
    assert "had not ended" in late["error"]


# ---- each part


@pytest.mark.parametrize(
    ("module", "name", "rows"),
    [
        ("kernels", "kernel_errors", 4),
        ("fused", "fused", 1),
        pytest.param("one_device", "plans", 4, marks=ONCE_A_WEEK),
        pytest.param("one_device", "pipelines", 2, marks=ONCE_A_WEEK),
        pytest.param("several", "plans", 12, marks=ONCE_A_WEEK),
    ],
)
def test_what_is_right_holds(module, name, rows):
    section = rehearsed(module, name)
    assert section.holds, section.text()
    assert section.text().count("| ok |") == rows


WAYS = ("| {} | no |", "| {} | yes |")
HOST = [WAYS[0].format(work) for work in ("local", "zigzag", "balanced")]
HOST += [way.format(work) for work in ("ulysses", "hybrid", "three zones") for way in WAYS]


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("kernels", "kernel_seconds", ["| cpu_flash | 0.", "| FA3 | not run: it runs on CUDA"]),
        pytest.param("lost_rank", "lost_rank", ["| 0 | yes |"], marks=ONCE_A_WEEK),
        pytest.param("figures", "calibration", ["not judged"], marks=ONCE_A_WEEK),
        pytest.param("figures", "memory", ["not judged"], marks=ONCE_A_WEEK),
        pytest.param("figures", "host", HOST, marks=ONCE_A_WEEK),
    ],
)
def test_what_is_seen_is_on_the_page(module, name, said):
    section = rehearsed(module, name)
    assert section.holds
    for words in said:
        assert words in section.text()


@pytest.mark.parametrize(
    ("module", "name"), [("several", "RandomPlans"), ("lost_rank", "OneRing")]
)
def test_planners_of_the_checks_are_called_as_all_planners_are(module, name):
    made = getattr(part(module), name)
    for method in ("submit", "wait", "result", "close"):
        wanted = inspect.signature(getattr(Planner, method)).parameters
        assert inspect.signature(getattr(made, method)).parameters.keys() == wanted.keys()


@once_a_week
def test_both_trainers_train_alike():
    training = part("training")
    names = ("stock", "flexseq")
    runs = {name: training.train(name, training.SHORT, use_cpu=True) for name in names}
    section = training.section_of(runs, training.SHORT)
    assert section.holds
    assert len(runs["flexseq"]["losses"]) == 3
    assert runs["flexseq"]["tokens_per_s"] > 0
    assert section.text().count("| ok |") == 2


@once_a_week
def test_images_train_as_with_the_stock_trainer():
    section = rehearsed("images", "images")
    assert section.holds, section.text()
    assert section.text().count("| ok |") == 6


def test_on_a_gpu_both_trainers_run_under_fsdp2_too_and_quickly_where_that_is_asked():
    training, report = part("training"), part("report")
    setting = report.Setting(rehearse=False, plans=1, quick=True)
    commands = training.fsdp_commands(setting)
    assert list(commands) == ["stock, FSDP2", "flexseq, FSDP2"]
    assert training.FSDP2.exists()
    assert f"--config_file={training.FSDP2}" in commands["flexseq, FSDP2"]
    assert training._sizes(setting) == training.FULL._replace(steps=training.QUICK_STEPS)
    assert training.options_of("flexseq", setting) == {"cost_model": "estimate"}
    assert training.options_of("stock", setting) == {}
    slow = report.Setting(rehearse=False, plans=1)
    assert training.options_of("flexseq", slow) == {}


def test_a_trainer_that_fails_is_a_row_and_the_other_one_runs(monkeypatch):
    training = part("training")

    def fails(name, sizes, **options):
        if name == "flexseq":
            raise RuntimeError("no kernel\nin many words")
        return {"attention": "sdpa", "losses": [1.0, 0.5], "tokens_per_s": 3.0, "peak_gib": 0.0}

    monkeypatch.setattr(training, "train", fails)
    section = rehearsed("training", "training")
    assert not section.holds
    assert "| flexseq | FAILED: RuntimeError: no kernel |" in section.lines
    assert any(line.startswith("| stock | sdpa | 3 ") for line in section.lines)


# ---- time


def test_minutes_are_kept_for_every_part_that_can_run_here():
    command = importlib.import_module("gpu_check")
    stages = command.stages_of(list(command.PARTS))
    assert set(stages[0]) == command.UNTIMED
    assert [name for stage in stages for name in stage if len(stage) == 1] == [
        name for name in command.PARTS if name not in command.UNTIMED
    ]
    kept = [command.kept_share(stages, first, 1) for first in range(len(stages) + 1)]
    own = [before - after for before, after in itertools.pairwise(kept)]
    assert kept[0] == pytest.approx(1)
    assert kept[-1] == 0
    for stage, share in zip(stages, own, strict=True):
        can_run = stage[0] not in command.LEAST_GPUS
        assert (share > 0.02) == can_run, stage
    # alone, a part has all of the time
    assert command.kept_share(command.stages_of(["images"]), 1, 1) == 0


@pytest.mark.processes  # git
def test_a_part_that_hangs_takes_no_time_of_those_after_it(monkeypatch, capsys):
    command, report = importlib.import_module("gpu_check"), part("report")
    limits = {}

    def hangs(name, setting, seconds):
        limits[name] = seconds
        return report.Section(title=name, lines=("fine",))

    monkeypatch.setattr(command, "section_of", hangs)
    words = ["--rehearse", "--minutes", "10", "--parts", "images", "scans", "kernels"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    assert command.main() == 0
    assert list(limits) == ["kernels", "images", "scans"]
    shares = [command.SHARES.get(name, 1) for name in limits]
    after = [sum(shares[number + 1 :]) for number in range(3)]
    wanted = [600 * (1 - left / sum(shares)) for left in after]
    assert list(limits.values()) == pytest.approx(wanted, abs=5)


@pytest.mark.processes
def test_parts_that_train_nothing_load_no_trainer():
    modules = "gpu_check, gpu_checks.kernels, gpu_checks.fused, gpu_checks.kinds"
    code = f"import sys, {modules}, gpu_checks.recurrent; sys.exit('transformers' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SCRIPT.parent)))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_every_part_and_every_process_of_one_is_there():
    command = importlib.import_module("gpu_check")
    places = [*command.PARTS.values(), "several.run_ranks", "lost_rank.run_rank"]
    assert all(callable(command.function_of(place)) for place in places)


@pytest.fixture
def tuned_kernel():
    """A tuned kernel of three configurations, of which the first one needs too much memory, and
    what was asked of it: a configuration and whether it is to be compiled only."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    errors = importlib.import_module("triton.runtime.errors")
    asked = []

    class Kernel:
        def run(self, x, *, grid, warmup, BLOCK, **options):
            asked.append((BLOCK, warmup))
            if not warmup and BLOCK == 1:
                raise errors.OutOfResources(2, 1, "shared memory")
            return x, BLOCK

        @staticmethod
        def fn():
            """Only its name is used."""

    configs = [autotuner.Config({"BLOCK": block}) for block in (1, 2, 3)]
    tuner = autotuner.Autotuner(
        Kernel(), ["x"], configs, [], None, None, do_bench=lambda call, quantiles: [call() or 0.0]
    )
    return tuner, asked


def test_a_tuned_kernel_takes_the_first_configuration_that_fits(tuned_kernel):
    tuner, asked = tuned_kernel
    with part("tuning").first_configurations():
        assert tuner.run(7, grid=(1,), warmup=False) == (7, 2)
    assert asked == [(1, False), (2, False)]
    tuner.configs = tuner.configs[:1]
    with (
        part("tuning").first_configurations(),
        pytest.raises(RuntimeError, match="no configuration of fn fits"),
    ):
        tuner.run(7, grid=(1,), warmup=False)


def test_all_configurations_are_compiled_before_one_is_timed(tuned_kernel):
    tuner, asked = tuned_kernel
    with part("tuning").compiled_side_by_side():
        assert tuner.run(7, grid=(1,), warmup=False) == (7, 2)
    assert sorted(asked[:3]) == [(1, True), (2, True), (3, True)]
    assert asked[3:] == [(1, False), (2, False), (3, False), (2, False)]


# ---- what is wrong is found


def test_a_wrong_kernel_is_found(monkeypatch):
    class Wrong(CpuFlash):
        def forward(self, call):
            return super().forward(call._replace(scale=call.scale * 1.1))

    monkeypatch.setitem(CANDIDATES, "cpu", (Wrong(),))
    section = part("kernels").errors_of(CPU, part("kernels").SHORT_CASES)
    assert not section.holds
    assert "FAILED" in section.text()


@pytest.mark.parametrize("operation", ["merge", "add", "gather", "pack", "unpack"])
def test_an_operation_that_leaves_something_out_is_found(operation):
    wrong = type("Wrong", (TorchFused,), {operation: lambda *_: None})()
    section = part("fused").section_of(wrong, CPU, part("fused").SHORT_CASES)
    assert not section.holds
    assert "FAILED" in section.text()


def test_without_triton_s_interpreter_a_cpu_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    said = "Not run: on a CPU it needs Triton's interpreter: set TRITON_INTERPRET=1."
    assert said in rehearsed("fused", "fused").text()


def test_a_ring_that_loses_a_hundredth_is_found(monkeypatch):
    subject, one_device = part("subject"), part("one_device")
    merge = fused_operations.merge_into

    def wrong(out, lse, part_out, part_lse):
        merge(out, lse, 0.99 * part_out, part_lse)

    examples = subject.documents(part("report").Setting(rehearse=True, plans=1))
    lengths = [len(one["input_ids"]) for rank in range(2) for one in examples[rank::2]]
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
    assert one_device._error_of(case, model, examples, true) < subject.FLOAT32_BOUND
    monkeypatch.setattr(fused_operations, "merge_into", wrong)
    assert one_device._error_of(case, model, examples, true) > subject.FLOAT32_BOUND


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
    setting = part("report").Setting(rehearse=True, plans=1)
    figures._timed(figures._works(16)[0], setting, use_blocks=False)
    assert seen == ["error"] * 4  # two rounds, forward and backward
    assert modes[-1] == "default"


@pytest.mark.slow
def test_a_strategy_is_held_to_the_error_of_a_kernel_call(monkeypatch):
    kinds = part("kinds")
    name = "window 128 with sinks"
    window = kinds.KINDS[name]._replace(reach=kinds.Reach(window=16))
    monkeypatch.setattr(kinds, "KINDS", {name: window})
    monkeypatch.setattr(kinds, "STRATEGIES", ("zigzag",))
    assert rehearsed("kinds", "kinds").holds
    monkeypatch.setattr(kinds, "MOST_OF_A_CALL", 0.01)
    assert not rehearsed("kinds", "kinds").holds


@pytest.mark.slow
def test_ranks_that_share_a_recurrence_are_held_to_the_error_of_one(monkeypatch):
    recurrent = part("recurrent")
    monkeypatch.setattr(recurrent, "KINDS", ("gated delta",))
    monkeypatch.setattr(recurrent, "STRATEGIES", ("zigzag",))
    section = rehearsed("recurrent", "recurrent")
    assert section.holds
    assert any("gated delta | chunked" in line for line in section.lines)
    monkeypatch.setattr(recurrent, "MOST_OF_ONE_RANK", 0.01)
    assert not rehearsed("recurrent", "recurrent").holds
