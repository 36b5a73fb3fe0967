"""The commands in-process: what they print and write, and exit status 2 with one line for what
cannot be."""

import io
import json
import random
import subprocess
import sys
import types

import pytest

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import compare as comparing
from hf_flexseq.cli import main
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.correction import ALL_TERMS, Correction
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from tests.plans import group, plan_of_groups

COST = "--cost-model flexsp-gpt-7b-a100"
MACHINE = f"--topology 2x4 {COST}"
CAP = "--max-tokens-per-rank 6000"
FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)


@pytest.fixture
def lengths(tmp_path):
    rng = random.Random(0)
    made = [min(40_000, 1 + int(rng.lognormvariate(6.5, 1.5))) for _ in range(24)]
    (tmp_path / "lengths.json").write_text(json.dumps(made))
    return tmp_path / "lengths.json"


@pytest.fixture
def plan_file(tmp_path, lengths):
    path = tmp_path / "plan.json"
    assert main(f"plan --lengths {lengths} {MACHINE} {CAP} --json {path}".split()) == 0
    return path


def test_plan_writes_what_make_plan_makes(flexseq, lengths, tmp_path):
    said = flexseq(f"plan --lengths {lengths} {MACHINE} {CAP} --json {tmp_path}/plan.json")
    assert "step 0: 24 sequences" in said
    made = Plan.from_json((tmp_path / "plan.json").read_text())
    options = PlanOptions(max_tokens_per_rank=6000)
    expected = make_plan(json.loads(lengths.read_text()), TOPOLOGY, FLEXSP, options)
    assert made.digest() == expected.digest()
    check(made, TOPOLOGY, 6000)


def test_plan_to_stdout_is_nothing_but_json_lines(flexseq, lengths):
    said = flexseq(
        f"plan --lengths {lengths} {MACHINE} {CAP} --planner static --sp-degree 8 "
        "--strategy ulysses --sync free --sequences-per-step 10 --json -"
    )
    plans = [Plan.from_json(line) for line in said.splitlines()]
    assert [len(plan.lengths) for plan in plans] == [10, 10, 4]
    assert all(set(plan.degrees()) == {8} for plan in plans)


def test_plan_takes_a_column_and_a_cost_model_file(flexseq, tmp_path):
    FLEXSP.save(tmp_path / "cost.json")
    (tmp_path / "rows.jsonl").write_text('{"n": 100}\n{"n": 200}\n')
    data = f"--lengths {tmp_path}/rows.jsonl --column n --cost-model {tmp_path}/cost.json"
    assert "2 sequences, 300 tokens" in flexseq(f"plan {data} --topology 1x2 {CAP}")


def test_view_reads_plans(flexseq, plan_file, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(plan_file.read_text()))
    flexseq(f"view - {MACHINE} --sync free")
    for options, unit in (("", "tokens"), ("--topology 2x4", "tokens"), (MACHINE, " s")):
        shown = flexseq(f"view {plan_file} {options}")
        assert "Step 0: 24 sequences" in shown
        assert unit in shown


@pytest.mark.slow
def test_view_draws_files(flexseq, plan_file, tmp_path):
    pytest.importorskip("matplotlib")
    files = " ".join(f"--{kind} {tmp_path}/view.{kind}" for kind in ("png", "svg", "chrome"))
    assert flexseq(f"view {plan_file} {MACHINE} {files}") == ""
    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "view.svg").read_bytes()
    assert json.loads((tmp_path / "view.chrome").read_text())["traceEvents"]


def test_view_reads_a_trace(flexseq, refused, plan_file, tmp_path):
    plan = Plan.from_json(plan_file.read_text())
    measured = [0.25] * len(plan.micro_batches)
    lines = [
        json.dumps({"step": n, "cost_model": "x", "measured_s": measured, **plan.to_record()})
        for n in (7, 8)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    shown = flexseq(f"view {tmp_path}/trace.jsonl --step 1")
    assert "Step 8:" in shown
    assert f"{0.25 * len(measured):.2f} s" in shown or "ms" in shown
    said = refused(f"view {tmp_path}/trace.jsonl --step 2")
    assert "expected --step below 2, got 2" in said


def test_compare_has_a_line_for_every_planner(flexseq, lengths):
    said = flexseq(f"compare --lengths {lengths} {MACHINE} {CAP} --sequences-per-step 6 --steps 1")
    head, columns, *rows = said.splitlines()
    assert head.startswith("1 step, 6 sequences")
    assert columns.split() == list(comparing.COLUMNS)
    assert [row.split()[0].rstrip(",") for row in rows] == list(PLANNERS)
    assert rows[list(PLANNERS).index("static")].startswith("static, degree ")


def test_commands_show_experts_over_ranks(flexseq, refused, lengths, tmp_path):
    machine = "--topology 2x4 --cost-model qwen3-30b-a3b-ep4-h100"
    path = tmp_path / "plan.json"
    said = flexseq(f"plan --lengths {lengths} {machine} {CAP} --json {path}")
    lies = "experts in 2 groups of 4 ranks (imbalance 1.1)"
    note = said.splitlines()[-1].strip()
    assert note.startswith(f"{lies}: ")
    share = note.split(": ")[1].removesuffix(" of the ranks' time")
    shown = flexseq(f"view {path} {machine}")
    assert lies in shown.splitlines()[0]
    assert "=" in shown.splitlines()[1]
    assert "= experts" in shown
    assert f"experts {share}, " in shown.splitlines()[-1]
    said = flexseq(f"compare --lengths {lengths} {machine} {CAP} --planners auto static")
    head, columns, row, _ = said.splitlines()
    assert lies in head
    assert columns.split()[-1] == "experts"
    assert row.endswith(f" {share}")
    assert "which meet in every layer" in refused(f"view {path} {machine} --sync free")
    assert "experts over 4 ranks on 6 ranks" in refused(
        f"plan --lengths {lengths} {machine.replace('2x4', '1x6')} {CAP}"
    )


def test_compare_leaves_the_slow_planner_out_unless_it_is_asked_for(
    flexseq, refused, lengths, monkeypatch
):
    pytest.importorskip("highspy")
    monkeypatch.setattr(comparing, "SOLVER_SEQUENCES", 5)
    words = f"compare --lengths {lengths} {MACHINE} {CAP} --sequences-per-step 3"
    shown = flexseq(f"{words} --steps 2").splitlines()
    (row,) = [line for line in shown if line.startswith("flexsp")]
    assert "left out: 6 sequences may take minutes; ask with --planners flexsp" in row
    for options, planners in (
        ("--steps 1 --planners zeppelin flexsp", ["zeppelin", "flexsp"]),
        ("--steps 2 --planners flexsp", ["flexsp"]),
    ):
        rows = [line.split() for line in flexseq(f"{words} {options}").splitlines()]
        assert [row[0] for row in rows if row[-1] == "ms"] == planners
    assert "--planners: invalid choice: 'fast'" in refused(f"{words} --planners fast")


def test_env_names_versions_and_kernels(flexseq):
    pytest.importorskip("torch")
    shown = flexseq("env")
    assert "torch 2" in shown
    assert "kernel cpu_flash: chosen" in shown
    assert "guaranteed by cpu_flash: float32, float64" in shown


def test_env_names_a_gpu_s_kernels_and_what_they_lack(flexseq, monkeypatch):
    torch = pytest.importorskip("torch")
    properties = types.SimpleNamespace(name="some GPU", total_memory=80 * 2**30)
    for owner, name, value in (
        (torch.cuda, "device_count", 1),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", (9, 0)),
        (torch.backends.cuda, "is_flash_attention_available", True),
        (torch.nn.attention, "current_flash_attention_impl", "FA4"),
    ):
        monkeypatch.setattr(owner, name, lambda *of, value=value: value, raising=False)
    shown = flexseq("env")
    assert "cuda:0: some GPU, 80 GiB" in shown
    assert "kernel torch_varlen: FA4 is active in torch" in shown
    assert "scan mamba2, chunked: chosen" in shown
    assert "guaranteed by torch_varlen" not in shown
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    assert "guaranteed by torch_varlen: bfloat16, float16" in flexseq("env")


def test_calibrate_trains_a_model_and_says_what_was_corrected(
    flexseq, refused, tmp_path, monkeypatch
):
    training = pytest.importorskip("hf_flexseq.hf.trainer.synthetic_models")
    asked = []

    def train(model, output, **options):
        asked.append((model, output, options))
        seen = (True, *[False] * (len(ALL_TERMS) - 1))
        return Correction((2.0,) * len(ALL_TERMS), 0.031, seen)

    monkeypatch.setattr(training, "train", train)
    path = str(tmp_path / "cost.json")
    said = flexseq(f"calibrate some/model --json {path} --fsdp --no-checkpointing")
    assert asked == [
        ("some/model", path, {"dtype": "auto", "checkpointing": False, "fsdp": True}),
    ]
    wanted = (
        f"the estimate with {ALL_TERMS[0]} x 2; off by 3 % at the median of their micro-batches"
    )
    assert said == f"{wanted}\n"
    assert "--json" in refused("calibrate some/model")


def test_calibrate_corrects_a_cost_model_by_a_trace(flexseq, refused, tmp_path):
    plan = plan_of_groups([8, 9], [group(0, 2, 0), group(0, 1, 1)])
    learned = {"sync": "free", "meetings_s": [[0.25]], "tower_s": 0.0}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"step": 0, "learned": learned} | plan.to_record()) + "\n")
    path = str(tmp_path / "cost.json")
    words = f"calibrate {trace} --json {path}"
    said = refused(words)
    assert "give --topology, and the --cost-model to correct" in said
    flexseq(f"{words} --topology 1x2 --cost-model llama-3.1-8b-h200")
    cost = CostModel.load(path)
    ranks = Topology(nodes=1, ranks_per_node=2)
    (nanoseconds,) = lockstep_ns(cost, plan.micro_batches, plan.lengths, ranks)
    assert nanoseconds / 1e9 == pytest.approx(0.25, rel=1e-3)


PLAN = "plan --lengths LENGTHS"


@pytest.mark.parametrize(
    "words, message",
    [
        (f"plan --lengths missing.txt {MACHINE}", "missing.txt"),
        (f"{PLAN} --topology 1x2 --cost-model x", "presets"),
        (f"{PLAN} --topology 8 --cost-model x", "NODESxRANKS"),
        (f"{PLAN} --topology 0x8 --cost-model x", "at least 1"),
        (f"{PLAN} {MACHINE} --max-tokens-per-rank 9", "infeasible: sequence"),
        (
            f"{PLAN} {MACHINE} --max-tokens-per-rank 0",
            "expected a number from 1 to 2147483647, got 0",
        ),
        (f"{PLAN} {MACHINE} --sp-degree x", "expected a whole number, got 'x'"),
        (f"{PLAN} {MACHINE} --planner best", "invalid choice"),
        (f"{PLAN} {MACHINE} {CAP} --sp-degree 2", "planner='static'"),
        (f"{PLAN} {MACHINE} {CAP} --strategy zigzag", "no ring_bytes"),
        (f"{PLAN} {MACHINE} {CAP} --json /no/such/folder/x", "folder"),
        (
            f"compare --lengths LENGTHS {MACHINE} --max-tokens-per-rank 2 --sp-degree 2",
            "no planner can plan this: step 0: sequence ",
        ),
        (f"view LENGTHS {MACHINE}", "not a plan"),
        (f"view PLAN --topology 1x4 {COST}", "1 x 4"),
        (f"view PLAN {COST}", "--topology"),
        (f"simulate PLAN {MACHINE}", "flexseq view"),
        (f"program PLAN {MACHINE}", "-m hf_flexseq.program"),
        ("", "COMMAND"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(words, message, lengths, plan_file, refused):
    words = words.replace("LENGTHS", str(lengths)).replace("PLAN", str(plan_file))
    assert message in refused(words)


# ---- in processes of their own


def started(*command, returns=0):
    """What a command of Python writes."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=90)
    assert done.returncode == returns, done.stderr
    return done


@pytest.mark.processes
def test_the_solver_writes_nothing_to_stdout(lengths):
    """A banner of the solver would go past Python to descriptor 1."""
    pytest.importorskip("highspy")
    words = f"plan --lengths {lengths} {MACHINE} {CAP} --planner flexsp --json -"
    done = started("-m", "hf_flexseq.cli", *words.split())
    assert Plan.from_json(done.stdout).planner == "flexsp"


@pytest.mark.processes
def test_the_command_line_imports_no_torch_and_runs_alone(lengths, tmp_path):
    """It plans, shows a program, and has imported none of the heavy libraries."""
    path = tmp_path / "plan.json"
    plan_words = f"plan --lengths {lengths} {MACHINE} {CAP} --json {path}".split()
    script = (
        "import sys\n"
        "from hf_flexseq.cli import main\n"
        "from hf_flexseq.program.__main__ import main as program\n"
        f"status = main({plan_words}) + program(['{path}', '--topology', '2x4'])\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'highspy', "
        "'matplotlib', 'jinja2', 'pyarrow', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = started("-c", script)
    assert Plan.from_json(path.read_text()).planner == "auto"
    assert "backward of rank 0: " in done.stdout
    assert done.stderr.strip() == "[]"


def test_compare_shows_the_gap_to_the_tight_bound(
    flexseq, refused, lengths, tmp_path, monkeypatch
):
    tight_bound = pytest.importorskip("hf_flexseq.planner.tight_bound")
    words = f"compare --lengths {lengths} {MACHINE} {CAP} --planners auto zeppelin"
    _, columns, *rows = flexseq(f"{words} --tight").splitlines()
    assert columns.endswith("planning  tight gap")
    for row, plain in zip(rows, flexseq(words).splitlines()[2:], strict=True):
        assert 0 <= float(row.split()[-2]) <= float(row.split()[2])
        assert row.split()[:3] == plain.split()[:3]
    monkeypatch.setattr(tight_bound, "SECONDS", 0.0)
    unsolved = flexseq(f"{words} --tight").splitlines()[2:]
    assert all(" <= " in row for row in unsolved)

    assert "leave out --sync free" in refused(f"{words} --tight --sync free")
    groups = tmp_path / "groups.jsonl"
    groups.write_text(json.dumps({"prefix": 200, "branches": [10, 20]}))
    assert "rows that share no prefix" in refused(f"compare --lengths {groups} {MACHINE} --tight")
    monkeypatch.setattr(comparing, "find_spec", lambda module: None)
    assert 'pip install "hf_flexseq[planner]"' in refused(f"{words} --tight")


# ---- groups that share prefixes


def test_groups_of_rows_are_planned_and_compared_with_and_without_sharing(flexseq, tmp_path):
    groups = [{"prefix": 2000, "branches": [100, 150, 90, 60]} for _ in range(8)]
    file = tmp_path / "groups.jsonl"
    file.write_text("\n".join(map(json.dumps, groups)))
    data = f"--lengths {file} {MACHINE}"
    said = flexseq(f"plan {data} --json {tmp_path}/plan.json")
    assert "32 of them share prefixes in 8 units, which spares 48,000 tokens" in said
    made = Plan.from_json((tmp_path / "plan.json").read_text())
    check(made, TOPOLOGY)
    assert made.tokens_spared == 8 * 3 * 2000
    assert "spares 48,000 tokens" in flexseq(f"view {tmp_path}/plan.json {MACHINE}")
    # steps that cut groups share what is left of them
    said = flexseq(f"plan {data} --sequences-per-step 6")
    assert "6 of them share prefixes in 2 units, which spares 8,000 tokens" in said

    said = flexseq(f"compare {data} --planners auto zeppelin")
    seconds = {line[:18].strip(): float(line[18:].split()[0]) for line in said.splitlines()[2:]}
    assert set(seconds) == {"auto", "auto, row by row", "zeppelin"}
    assert seconds["auto"] < 0.6 * seconds["auto, row by row"]
    said = flexseq(f"report {file} {MACHINE} --html {tmp_path}/report.html --planners auto static")
    assert "s row by row" in said
