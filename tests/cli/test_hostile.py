"""Files that are torn, hostile or too large: exit 2 and one line, or what can be shown of them."""

import json

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from tests.cli.refusal_output import failed

MACHINE = "--topology 2x4 --cost-model llama-3.1-8b-h200"


@pytest.fixture(scope="module")
def record():
    """A plan, as it is written to a file."""
    topology = Topology(nodes=2, ranks_per_node=4)
    return make_plan([900, 300, 50], topology, PRESETS["llama-3.1-8b-h200"]).to_record()


def trace(record, *steps):
    """Lines of a plan trace."""
    return [json.dumps({"step": step, "measured_s": [0.5], **record}) for step in steps]


def test_broken_lines_are_named_and_the_others_are_shown(record, refused, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    good = trace(record, 3, 4, 5)
    missing = json.dumps({"step": 3, **record, "lengths": [900, 300, 50, 7]})
    for lines, said in (
        ([*good, good[0][:200]], "line 4 cannot be read, 3 can (line 4 is not JSON"),
        (["\x1b[2J", good[0], "[" * 5000, "", missing, *good[1:]], "lines 1, 3, 5 cannot be read"),
    ):
        path.write_text("\n".join(lines))
        assert main(["view", str(path), "--step", "2"]) == 0
        shown = capsys.readouterr()
        assert "Step 5:" in shown.out
        assert said in shown.err
        assert shown.err.count("\n") == 1
        assert shown.err.rstrip("\n").isprintable()
        assert "expected --step below 3, got 3" in refused(f"view {path} --step 3")
    path.write_text('{"step": 1, "lengths"\n{"step": 2}\n')
    assert "holds no plan (line 1 is not JSON" in refused(f"view {path}")


def test_a_plan_on_many_lines_and_a_trace_of_before_versions_are_read(
    record, flexseq, refused, tmp_path
):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record, indent=1))
    flexseq(f"view {path}")
    old = {key: value for key, value in record.items() if key != "version"}
    path.write_text(json.dumps({"step": 7, "later": "more", **old}))
    assert "Step 7:" in flexseq(f"view {path}")
    path.write_text(json.dumps({**record, "version": 2}))
    assert "reads version 1" in refused(f"view {path}")


BEYOND = {"ranks": [10**9], "sequences": [0, 1, 2], "strategy": "local"}


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
        ({"micro_batches": [{"groups": [BEYOND]}]}, "ranks[0]=1000000000: must be at most"),
        ({"more": 1}, "unknown keys ['more']"),
    ],
)
def test_a_plan_with_nonsense_is_refused_by_its_key(change, message, record, refused, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(record | change))
    assert message in refused(f"view {tmp_path}/plan.json")


def test_costs_that_no_clock_can_count_are_refused(record, refused, tmp_path):
    cost = PRESETS["llama-3.1-8b-h200"].to_record()
    (tmp_path / "cost.json").write_text(json.dumps(cost | {"micro_batch_s": 9e8}))
    (tmp_path / "plan.json").write_text(json.dumps(record))
    (tmp_path / "lengths").write_text("[900, 300]")
    for words in (f"view {tmp_path}/plan.json", f"plan --lengths {tmp_path}/lengths"):
        said = refused(f"{words} --topology 2x4 --cost-model {tmp_path}/cost.json")
        assert "at most 1e+06 s can be counted" in said


def test_what_is_above_a_limit_names_it_and_the_option_that_raises_it(
    record, flexseq, refused, tmp_path
):
    (tmp_path / "lengths").write_text("7\n" * 20)
    (tmp_path / "plan.json").write_text(json.dumps(record))
    plan = f"plan --lengths {tmp_path}/lengths {MACHINE}"
    view = f"view {tmp_path}/plan.json"
    wide = plan.replace("2x4", "100000x8")
    assert "raise it with --limit ranks=800000" in refused(wide)
    for words, name, low in (
        (plan, "bytes", 4),
        (plan, "lengths", 4),
        (plan, "sequences", 4),
        (f"{view} {MACHINE}", "work", 4),
        (view, "ranks", 1),
    ):
        assert f"raise it with --limit {name}=" in refused(f"{words} --limit {name}={low}")
        flexseq(f"{words} --limit {name}={low} --limit {name}=99999")
    assert "expected NAME=VALUE" in refused(f"{plan} --limit time=3")


def test_arguments_act_on_no_terminal_and_stay_short(capsys):
    # what is typed, and how it is said: escapes are written out, and of a long one there is a part
    machine = MACHINE.split()
    for value, shown in (("\x1b[31m", r"\x1b[31m"), ("9" * 6000, "9" * 25), ("a\nb", r"a\nb")):
        for argv in (
            ["plan", "--lengths", value, *machine],
            ["plan", "--lengths", "x", "--topology", value, *machine[2:]],
            ["view", "x", "--step", value],
            ["plan", "--lengths", "x", "--topology", "2x4", "--cost-model", value],
        ):
            said = failed(argv, capsys)
            assert said.startswith(f"flexseq {argv[0]}: ")
            assert shown in said
