"""Files that are torn, hostile or too large: exit 2 and one line, or what can be shown of them."""

import json
from pathlib import Path

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan
from hf_flexseq.planner import make_plan
from tests.cli.refused import failed

MACHINE = ["--topology", "2x4", "--cost-model", "llama-3.1-8b-h200"]
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan([900, 300, 50], TOPOLOGY, PRESETS["llama-3.1-8b-h200"])


def trace(plan: Plan, *steps: int) -> list[str]:
    """Lines of a plan trace."""
    return [json.dumps({"step": step, "measured_s": [0.5], **plan.to_record()}) for step in steps]


def test_a_torn_line_is_named_and_the_others_are_shown(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace(plan, 3, 4, 5)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*lines, lines[0][:200]]))
    assert main(["view", str(path), "--step", "2"]) == 0
    shown = capsys.readouterr()
    assert "Step 5:" in shown.out
    assert shown.err.count("\n") == 1
    assert "line 4 cannot be read, 3 can (line 4 is not JSON" in shown.err
    assert "expected --step below 3, got 3" in failed(["view", str(path), "--step", "3"], capsys)


def test_broken_lines_of_every_kind_are_named(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = trace(plan, 1, 2)
    missing = json.dumps({"step": 3, **plan.to_record(), "lengths": [900, 300, 50, 7]})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(["\x1b[2J", good[0], "[" * 5000, "", missing, good[1]]))
    assert main(["view", str(path), "--step", "1", *MACHINE]) == 0
    shown = capsys.readouterr()
    assert "Step 2:" in shown.out
    assert "lines 1, 3, 5 cannot be read" in shown.err
    assert shown.err.rstrip("\n").isprintable()


def test_a_file_without_a_line_that_can_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"step": 1, "lengths"\n{"step": 2}\n')
    assert "holds no plan (line 1 is not JSON" in failed(["view", str(path)], capsys)


def test_a_plan_on_many_lines_and_a_trace_of_before_versions_are_read(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.json").write_text(json.dumps(plan.to_record(), indent=1))
    assert main(["view", str(tmp_path / "wide.json")]) == 0
    old = {key: value for key, value in plan.to_record().items() if key != "version"}
    (tmp_path / "old.jsonl").write_text(json.dumps({"step": 7, "later": "more", **old}))
    assert main(["view", str(tmp_path / "old.jsonl")]) == 0
    assert "Step 7:" in capsys.readouterr().out
    newer = {**plan.to_record(), "version": 2}
    (tmp_path / "new.json").write_text(json.dumps(newer))
    assert "reads version 1" in failed(["view", str(tmp_path / "new.json")], capsys)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"objective_s": -9223372035}, "objective_s=-9223372035: must not be negative"),
        ({"objective_s": 1e300}, "objective_s=1e+300: must be at most"),
        ({"planner": "\x1b[31mred"}, "must be one line without control characters"),
        ({"lengths": [900, 300, 2**40]}, "lengths[2]=1099511627776: must be at most"),
        ({"lengths": [900, 300]}, "sequences"),
        ({"measured_s": 3, "step": 1}, "measured_s=3: must be a list"),
        ({"step": -1}, "step=-1: must be at least 0"),
        ({"micro_batches": "none"}, "micro_batches='none': must be a list"),
        ({"more": 1}, "unknown keys ['more']"),
    ],
)
def test_a_plan_with_nonsense_is_refused_by_its_key(
    change: dict[str, object],
    message: str,
    plan: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_record() | change))
    assert message in failed(["view", str(tmp_path / "plan.json")], capsys)


def test_costs_that_no_clock_can_count_are_refused(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = PRESETS["llama-3.1-8b-h200"].to_record()
    (tmp_path / "cost.json").write_text(json.dumps(record | {"micro_batch_s": 9e8}))
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "lengths").write_text("[900, 300]")
    costly = ["--topology", "2x4", "--cost-model", str(tmp_path / "cost.json")]
    for argv in (
        ["view", str(tmp_path / "plan.json"), *costly],
        ["plan", "--lengths", str(tmp_path / "lengths"), *costly],
    ):
        assert "at most 1e+09 s can be counted" in failed(argv, capsys)


def test_what_is_above_a_limit_names_it_and_the_option_that_raises_it(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = str(tmp_path / "lengths")
    Path(lengths).write_text("7\n" * 20)
    (tmp_path / "plan.json").write_text(plan.to_json())
    of_lengths = ["plan", "--lengths", lengths, *MACHINE]
    of_plan = ["view", str(tmp_path / "plan.json"), *MACHINE]
    wide = ["plan", "--lengths", lengths, "--topology", "100000x8", *MACHINE[2:]]
    assert "raise it with --limit ranks=800000" in failed(wide, capsys)
    for argv, name in (
        (of_lengths, "bytes"),
        (of_lengths, "lengths"),
        (of_lengths, "sequences"),
        (of_plan, "work"),
        (["view", str(tmp_path / "plan.json")], "ranks"),
    ):
        said = failed([*argv, "--limit", f"{name}=4" if name != "ranks" else "ranks=1"], capsys)
        assert f"raise it with --limit {name}=" in said
        assert main([*argv, "--limit", f"{name}=4", "--limit", f"{name}=99999"]) == 0
    assert "expected NAME=VALUE" in failed([*of_lengths, "--limit", "time=3"], capsys)


def test_a_plan_that_names_a_rank_beyond_all_machines_is_refused(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plan.to_record()
    group = {"ranks": [10**9], "sequences": [0, 1, 2], "strategy": "local"}
    record["micro_batches"] = [{"groups": [group]}]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    said = failed(["view", str(tmp_path / "plan.json")], capsys)
    assert "ranks[0]=1000000000: must be at most" in said


def test_arguments_act_on_no_terminal_and_stay_short(capsys: pytest.CaptureFixture[str]) -> None:
    # what is typed, and how it is said: escapes are written out, and of a long one there is a part
    for value, shown in (("\x1b[31m", r"\x1b[31m"), ("9" * 6000, "9" * 25), ("a\nb", r"a\nb")):
        for argv in (
            ["plan", "--lengths", value, *MACHINE],
            ["plan", "--lengths", "x", "--topology", value, *MACHINE[2:]],
            ["view", "x", "--step", value],
            ["plan", "--lengths", "x", "--topology", "2x4", "--cost-model", value],
        ):
            said = failed(argv, capsys)
            assert said.startswith(f"flexseq {argv[0]}: ")
            assert shown in said
