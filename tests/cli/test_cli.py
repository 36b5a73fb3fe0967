"""The commands in-process: what they print and write, and exit status 2 with one line for what
cannot be."""

import io
import json
import random
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import compare as comparing
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from tests.cli.refused import failed

MACHINE = ["--topology", "2x4", "--cost-model", "flexsp-gpt-7b-a100"]
CAP = ["--max-tokens-per-rank", "6000"]
FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    rng = random.Random(0)
    made = [min(40_000, 1 + int(rng.lognormvariate(6.5, 1.5))) for _ in range(24)]
    (tmp_path / "lengths.json").write_text(json.dumps(made))
    return str(tmp_path / "lengths.json")


@pytest.fixture
def plan_file(tmp_path: Path, lengths: str) -> str:
    path = str(tmp_path / "plan.json")
    assert main(["plan", "--lengths", lengths, *MACHINE, *CAP, "--json", path]) == 0
    return path


def test_plan_writes_what_make_plan_makes(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plan", "--lengths", lengths, *MACHINE, *CAP, "--json", str(tmp_path / "plan.json")])
        == 0
    )
    made = Plan.from_json((tmp_path / "plan.json").read_text())
    expected = make_plan(
        json.loads(Path(lengths).read_text()),
        TOPOLOGY,
        FLEXSP,
        PlanOptions(max_tokens_per_rank=6000),
    )
    assert made.digest() == expected.digest()
    check(made, TOPOLOGY, 6000)
    assert "step 0: 24 sequences" in capsys.readouterr().out


def test_plan_to_stdout_is_nothing_but_json_lines(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--planner",
        "static",
        "--sp-degree",
        "8",
        "--strategy",
        "ulysses",
        "--sync",
        "free",
    ]
    assert (
        main(
            [
                "plan",
                "--lengths",
                lengths,
                *MACHINE,
                *CAP,
                *options,
                "--sequences-per-step",
                "10",
                "--json",
                "-",
            ]
        )
        == 0
    )
    plans = [Plan.from_json(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(plan.lengths) for plan in plans] == [10, 10, 4]
    assert all(set(plan.degrees()) == {8} for plan in plans)


def test_plan_takes_a_column_and_a_cost_model_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FLEXSP.save(tmp_path / "cost.json")
    (tmp_path / "rows.jsonl").write_text('{"n": 100}\n{"n": 200}\n')
    options = [
        "--lengths",
        str(tmp_path / "rows.jsonl"),
        "--column",
        "n",
        "--cost-model",
        str(tmp_path / "cost.json"),
    ]
    assert main(["plan", *options, "--topology", "1x2", *CAP]) == 0
    assert "2 sequences, 300 tokens" in capsys.readouterr().out


def test_view_reads_plans(
    plan_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(plan_file).read_text()))
    assert main(["view", "-", *MACHINE, "--sync", "free"]) == 0
    for options, unit in (([], "tokens"), (["--topology", "2x4"], "tokens"), (MACHINE, " s")):
        capsys.readouterr()
        assert main(["view", plan_file, *options]) == 0
        shown = capsys.readouterr().out
        assert "Step 0: 24 sequences" in shown
        assert unit in shown


def test_view_draws_files(
    plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    png, svg, chrome = (str(tmp_path / f"view.{name}") for name in ("png", "svg", "json"))
    capsys.readouterr()
    assert main(["view", plan_file, *MACHINE, "--png", png, "--svg", svg, "--chrome", chrome]) == 0
    assert capsys.readouterr().out == ""
    assert Path(png).read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in Path(svg).read_bytes()
    assert json.loads(Path(chrome).read_text())["traceEvents"]


def test_view_reads_a_trace(
    plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.from_json(Path(plan_file).read_text())
    measured = [0.25] * len(plan.micro_batches)
    lines = [
        json.dumps({"step": n, "cost_model": "x", "measured_s": measured, **plan.to_record()})
        for n in (7, 8)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert main(["view", str(tmp_path / "trace.jsonl"), "--step", "1"]) == 0
    assert "Step 8:" in (shown := capsys.readouterr().out)
    assert f"{0.25 * len(measured):.2f} s" in shown or "ms" in shown
    assert "expected --step below 2, got 2" in failed(
        ["view", str(tmp_path / "trace.jsonl"), "--step", "2"], capsys
    )


def test_compare_has_a_line_for_every_planner(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sequences-per-step", "6", "--steps", "1"]
    assert main(["compare", "--lengths", lengths, *MACHINE, *CAP, *options]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("1 step, 6 sequences")
    assert columns.split() == list(comparing.COLUMNS)
    assert [row.split()[0].rstrip(",") for row in rows] == list(PLANNERS)
    assert rows[list(PLANNERS).index("static")].startswith("static, degree ")


def test_commands_name_the_kinds_of_layers_that_they_price(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--topology", "2x4", "--cost-model", "gemma-3-27b-h100"]
    layers = "layers 83.9 % window 1024, 16.1 % full"
    path = str(tmp_path / "plan.json")
    assert main(["plan", "--lengths", lengths, *machine, *CAP, "--json", path]) == 0
    for words in (
        ["compare", "--lengths", lengths, *CAP, "--planners", "static"],
        ["view", path],
    ):
        assert main([*words, *machine]) == 0
        shown = capsys.readouterr().out
        assert layers in shown, words


def test_compare_leaves_the_slow_planner_out_unless_it_is_asked_for(
    lengths: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr(comparing, "SOLVER_SEQUENCES", 5)
    words = ["compare", "--lengths", lengths, *MACHINE, *CAP, "--sequences-per-step", "3"]
    assert main([*words, "--steps", "2"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("flexsp")]
    assert "left out: 6 sequences may take minutes; ask with --planners flexsp" in row
    assert main([*words, "--steps", "1", "--planners", "zeppelin", "flexsp"]) == 0
    assert main([*words, "--steps", "2", "--planners", "flexsp"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[-1] == "ms"] == ["zeppelin", "flexsp", "flexsp"]
    assert "--planners: invalid choice: 'fast'" in failed([*words, "--planners", "fast"], capsys)


def test_compare_fails_when_no_planner_can(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "compare",
        "--lengths",
        lengths,
        *MACHINE,
        "--max-tokens-per-rank",
        "2",
        "--sp-degree",
        "2",
    ]
    assert "no planner can plan this: step 0: sequence " in failed(argv, capsys)


def test_env_names_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "torch 2" in shown
    assert "kernel cpu_flash: chosen" in shown
    assert "guaranteed by cpu_flash: float32, float64" in shown


def test_env_names_a_gpu_s_kernels_and_what_they_lack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    properties = types.SimpleNamespace(name="some GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False
    )
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "cuda:0: some GPU, 80 GiB" in shown
    assert "kernel torch_varlen: FA4 is active in torch" in shown
    assert "guaranteed by torch_varlen" not in shown
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    assert main(["env"]) == 0
    assert "guaranteed by torch_varlen: bfloat16, float16" in capsys.readouterr().out


def test_calibrate_passes_its_options_on_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = pytest.importorskip("hf_flexseq.hf.calibration.command")
    asked: list[tuple[str, dict[str, object]]] = []

    def measured(model: str, **options: object) -> dict[str, object]:
        asked.append((model, options))
        hold_out = {"median": 0.031, "errors": [0.031, 0.08, 0.02]}
        machine = {
            "device": "cpu",
            "topology": [1, 2],
            "model": "Llama",
            "dtype": "float32",
            "torch": "2",
        }
        cost = replace(FLEXSP, launch_s=7e-6, post_s=9.5e-5)
        return {"cost_model": cost.to_record(), "hold_out": hold_out, **machine}

    monkeypatch.setattr(measuring, "calibrate", measured)
    path = str(tmp_path / "cost.json")
    assert (
        main(
            ["calibrate", "some/model", "--json", path, "--zero-stage", "3", "--no-checkpointing"]
        )
        == 0
    )
    assert asked == [
        ("some/model", {"dtype": "auto", "output": path, "checkpointing": False, "zero_stage": 3})
    ]
    said = capsys.readouterr().out
    assert "on 3 micro-batches held out of the fit: off by 3.1 % at the median" in said
    assert "the host, all layers: 7 us per launch, 95 us per post, 0 us per message" in said
    assert "--json" in failed(["calibrate", "some/model"], capsys)


BAD: list[tuple[str, Callable[[str], list[str]], str]] = [
    ("no file", lambda file: ["plan", "--lengths", "missing.txt", *MACHINE], "missing.txt"),
    (
        "no preset",
        lambda file: ["plan", "--lengths", file, "--topology", "1x2", "--cost-model", "x"],
        "presets",
    ),
    (
        "topology",
        lambda file: ["plan", "--lengths", file, "--topology", "8", "--cost-model", "x"],
        "NODESxRANKS",
    ),
    (
        "no rank",
        lambda file: ["plan", "--lengths", file, "--topology", "0x8", "--cost-model", "x"],
        "at least 1",
    ),
    (
        "cap",
        lambda file: ["plan", "--lengths", file, *MACHINE, "--max-tokens-per-rank", "9"],
        "infeasible: sequence",
    ),
    (
        "no cap",
        lambda file: ["plan", "--lengths", file, *MACHINE, "--max-tokens-per-rank", "0"],
        "expected a number from 1 to 2147483647, got 0",
    ),
    (
        "not a number",
        lambda file: ["plan", "--lengths", file, *MACHINE, "--sp-degree", "x"],
        "expected a whole number, got 'x'",
    ),
    (
        "planner",
        lambda file: ["plan", "--lengths", file, *MACHINE, "--planner", "best"],
        "invalid choice",
    ),
    (
        "degree",
        lambda file: ["plan", "--lengths", file, *MACHINE, *CAP, "--sp-degree", "2"],
        "planner='static'",
    ),
    (
        "ring",
        lambda file: ["plan", "--lengths", file, *MACHINE, *CAP, "--strategy", "zigzag"],
        "no ring_bytes",
    ),
    ("no plan", lambda file: ["view", file, *MACHINE], "not a plan"),
    ("no command", lambda file: [], "COMMAND"),
    (
        "unwritable",
        lambda file: ["plan", "--lengths", file, *MACHINE, *CAP, "--json", "/no/such/folder/x"],
        "folder",
    ),
]


@pytest.mark.parametrize(
    "argv, message", [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input_is_one_line_and_status_2(
    argv: Callable[[str], list[str]],
    message: str,
    lengths: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failed(argv(lengths), capsys)


@pytest.mark.parametrize("content", ["[3, 0]", "[3, -1]", "[]", "", '{"text": "x"}'])
def test_bad_lengths_are_one_line_and_status_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").write_text(content)
    assert "bad: " in failed(["plan", "--lengths", str(tmp_path / "bad"), *MACHINE], capsys)


@pytest.mark.parametrize(
    ("name", "instead"), [("simulate", "flexseq view"), ("program", "-m hf_flexseq.program")]
)
def test_a_removed_command_says_what_to_write_instead(
    name: str, instead: str, plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instead in failed([name, plan_file, *MACHINE], capsys)


@pytest.mark.processes
def test_the_solver_writes_nothing_to_stdout(lengths: str) -> None:
    """In a process of its own: a banner of the solver would go past Python to descriptor 1."""
    pytest.importorskip("highspy")
    words = ["plan", "--lengths", lengths, *MACHINE, *CAP, "--planner", "flexsp", "--json", "-"]
    command = [sys.executable, "-m", "hf_flexseq.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert Plan.from_json(done.stdout).planner == "flexsp"


def test_a_plan_of_another_world_is_refused(
    plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["--topology", "1x4", "--cost-model", "flexsp-gpt-7b-a100"]
    assert "1 x 4" in failed(["view", plan_file, *other], capsys)
    assert "--topology" in failed(["view", plan_file, *other[2:]], capsys)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"lengths"', '{"lengths": [1]}\n{"lengths": [2]}']
)
def test_what_is_no_plan_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert "bad.json" in failed(["view", str(tmp_path / "bad.json")], capsys)


@pytest.mark.processes
def test_the_command_line_imports_no_torch_and_runs_alone(lengths: str, tmp_path: Path) -> None:
    """In a process of its own: plans, shows a program, and has imported none of the heavy
    libraries."""
    path = str(tmp_path / "plan.json")
    plan_words = ["plan", "--lengths", lengths, *MACHINE, *CAP, "--json", path]
    program_words = [path, *MACHINE[:2]]
    script = (
        "import sys\n"
        "from hf_flexseq.cli import main\n"
        "from hf_flexseq.program.__main__ import main as program\n"
        f"status = main({plan_words!r}) + program({program_words!r})\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'pulp', 'highspy', "
        "'matplotlib', 'jinja2', 'pyarrow', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert Plan.from_json(Path(path).read_text()).planner == "auto"
    assert "backward of rank 0: " in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.processes
def test_the_module_can_be_run(lengths: str) -> None:
    command = [
        sys.executable,
        "-m",
        "hf_flexseq.cli",
        "plan",
        "--lengths",
        lengths,
        "--topology",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
