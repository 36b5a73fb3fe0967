"""`flexseq report` on lengths of every form, on plans, on traces, and on what is neither."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology
from tests.cli.refused import failed

MACHINE = ["--topology", "2x4", "--cost-model", "llama-3.1-8b-h200"]
TWO = ["--topology", "1x2", "--cost-model", "llama-3.1-8b-h200"]
FAST = ["--planners", "auto", "static"]
LENGTHS = [900, 300, 50, 4000, 700, 20, 80, 60000]


@pytest.fixture(scope="module")
def plan() -> Plan:
    topology = Topology(nodes=2, ranks_per_node=4)
    return make_plan(LENGTHS, topology, PRESETS["llama-3.1-8b-h200"])


def made(argv: list[str], tmp_path: Path) -> str:
    """The page that a command writes."""
    path = tmp_path / "page.html"
    assert main(["report", *argv, "--html", str(path)]) == 0
    return path.read_text()


def step_in(page: str) -> int:
    """The number of the step that a page draws."""
    found = re.search(r"<h2>Step (\d+)</h2>", page)
    assert found is not None
    return int(found[1])


def trace(tmp_path: Path, lines: list[dict[str, Any]]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(plan: Plan, step: int, seconds: float, **more: Any) -> dict[str, Any]:
    measured = [seconds / len(plan.micro_batches)] * len(plan.micro_batches)
    return {"step": step, "measured_s": measured, **more, **plan.to_record()}


@pytest.mark.parametrize("form", ["lines", "list", "rows", "gz"])
def test_lengths_of_every_form_are_reported(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "\n".join(map(str, LENGTHS))
    path = tmp_path / ("lengths.gz" if form == "gz" else "lengths")
    if form == "gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif form == "rows":
        path.write_text("\n".join(json.dumps({"text": "x", "length": n}) for n in LENGTHS))
    else:
        path.write_text(lines if form == "lines" else json.dumps(LENGTHS))
    page = made([str(path), *MACHINE, *FAST], tmp_path)
    assert "What planning brings: lengths" in page
    assert "66,050" in page  # tokens
    shown = capsys.readouterr().out
    assert "of the best fixed degree" in shown
    assert "page.html: " in shown


def test_a_report_has_the_figures_of_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, LENGTHS * 3)))
    of_steps = ["--sequences-per-step", "8", "--steps", "2", *MACHINE, *FAST]
    assert main(["compare", "--lengths", str(path), *of_steps]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:]]
    page = made([str(path), *of_steps], tmp_path)
    assert "Of 3 steps the first 2 were planned (--steps 3 plans all)" in page
    for row in rows:
        seconds, gap, _, simulated = row[-12:-8] if "degree" in row else row[1:5]
        for figure in (seconds, gap + " %", simulated):
            assert f"<td>{figure}</td>" in page


def test_the_median_step_is_drawn_unless_another_is_asked_for(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, [line(plan, 40 + n, s) for n, s in enumerate((9.0, 1.0, 5.0, 7.0))])
    page = made([path], tmp_path)
    assert step_in(page) == 42
    assert "The median of 4 steps by measured seconds" in page
    assert step_in(made([path, "--step", "41"], tmp_path)) == 41
    said = failed(["report", path, "--html", str(tmp_path / "x"), "--step", "3"], capsys)
    assert "there is no step 3: steps are 40 to 43" in said


def test_lengths_in_another_order_than_random_are_told(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, sorted(LENGTHS * 4))))
    page = made(
        [str(path), *MACHINE, *FAST, "--sequences-per-step", "8", "--steps", "1"], tmp_path
    )
    assert "The 8 sequences that were planned have" in page


def test_a_trace_is_compared_with_its_predictions(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = 2 * plan.objective_s
    path = trace(tmp_path, [line(plan, n, twice, waited_s=0.1 * twice) for n in range(3)])
    page = made([path, *MACHINE, *FAST], tmp_path)
    assert "What a run did: trace.jsonl" in page
    said = capsys.readouterr().out
    assert "They took 2.00 of the predicted seconds" in said
    assert "waited for plans for 10.0 % of the time" in said
    assert "of the best fixed degree" in said
    assert "exposed planning, ms" in page
    assert "simulated with the cost model" in page


def test_steps_that_ran_again_count_once_and_torn_lines_are_named(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(plan, n, 1.0) for n in (0, 1, 2)] + [
        line(plan, n, 3.0, repeat=True) for n in (1, 2)
    ]
    path = trace(tmp_path, lines)
    with open(path, "a") as file:
        file.write('{"step": 3, "cost')
    page = made([path], tmp_path)
    assert "2 lines of steps that ran again later are left out" in page
    assert "line 6 cannot be read, 5 can" in page
    shown = capsys.readouterr()
    assert "3 steps at " in shown.out
    assert "They took" in shown.out
    assert shown.err.count("\n") == 1


def test_replicas_of_a_pipeline_are_one_step(tmp_path: Path) -> None:
    from hf_flexseq.plan.pipeline import parse
    from pipelines import plan_of

    first, last = parse("0F0.0 0B0.0"), parse("1F0.0 1B0.0")
    record = plan_of((first, last), sizes=[1]).to_record()
    lines = []
    for step in range(2):
        for replica in range(2):
            lines.append(
                {"step": step, "replica": replica, "measured_s": [0.5], **record, "waited_s": 0.0}
            )
    page = made([trace(tmp_path, lines)], tmp_path)
    assert "2 of 2" in page  # measured steps
    assert "planners of groups are not compared" in page
    assert step_in(page) == 0


def test_a_plan_that_nobody_ran_is_drawn(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_record(), indent=1))
    page = made([str(tmp_path / "plan.json")], tmp_path)
    assert "What was planned: plan.json" in page
    assert "nobody ran" in page


def test_a_step_above_the_limit_is_left_out_with_the_way_to_raise_it(
    plan: Plan, tmp_path: Path
) -> None:
    path = trace(tmp_path, [line(plan, 0, 1.0)])
    page = made([path, *MACHINE, *FAST, "--limit", "work=5"], tmp_path)
    assert "No step is drawn: step 0 may be" in page
    assert "raise it with --limit work=" in page
    assert 'id="timeline"' not in page


def test_the_page_keeps_folders_of_its_author_to_itself(plan: Plan, tmp_path: Path) -> None:
    page = made([trace(tmp_path, [line(plan, 0, 1.0)])], tmp_path)
    assert str(tmp_path) not in page
    assert "flexseq report trace.jsonl --html page.html" in page


def test_what_cannot_be_reported_is_one_line(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = ["--html", str(tmp_path / "page.html")]
    (tmp_path / "lengths").write_text("5\n6\n")
    (tmp_path / "bad").write_text("5\nx\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "none.json").write_text('{"objective_s": 1}')
    lengths, other = str(tmp_path / "lengths"), trace(tmp_path, [line(plan, 0, 1.0)])
    for argv, message in (
        ([lengths, *html], "holds lengths: to plan them, give --topology and --cost-model"),
        ([str(tmp_path / "bad"), *html, *MACHINE], "line 2 is no integer"),
        ([str(tmp_path / "empty"), *html, *MACHINE], "holds no lengths"),
        ([str(tmp_path / "none.json"), *html], "not a plan: missing keys"),
        ([str(tmp_path / "absent"), *html], "No such file"),
        ([lengths, "--html", "/no/such/folder/x", *MACHINE], "is no folder"),
        ([lengths, *MACHINE], "--html"),
        (
            [lengths, *html, *MACHINE, "--limit", "sequences=1"],
            "raise it with --limit sequences=2",
        ),
        ([lengths, *html, *MACHINE, "--step", "7"], "there is no step 7: steps are 0 alone"),
        ([other, *html, "--topology", "1x2"], "1 x 2"),
        ([other, *html, *MACHINE[2:]], "--cost-model also needs --topology"),
        ([lengths, *html, *TWO, "--max-tokens-per-rank", "1"], "no planner can plan this"),
    ):
        assert message in failed(["report", *argv], capsys)
    assert not (tmp_path / "page.html").exists()
