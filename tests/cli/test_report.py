"""`flexseq report` on lengths of every form, on plans, on traces, and on what is neither."""

import base64
import gzip
import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.files import PlannedStep
from hf_flexseq.plan.pipeline import parse
from hf_flexseq.planner import make_plan
from hf_flexseq.view import report
from hf_flexseq.view.report import data_uri, lengths_text, run_text, step_row, steps_figure
from pipelines import plan_of
from tests.cli.refused import failed

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

MACHINE = ["--topology", "2x4", "--cost-model", "llama-3.1-8b-h200"]
TWO = ["--topology", "1x2", "--cost-model", "llama-3.1-8b-h200"]
FAST = ["--planners", "auto", "static"]
LENGTHS = [900, 300, 50, 4000, 700, 20, 80, 60000]
VOID = {"meta", "img"}


class Parsed(HTMLParser):
    """A page: its elements as (name, attributes), its text, its pictures decoded, and its tables
    as rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        self.images = [self._decoded(one["src"] or "") for one in self.named("img")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "td":
            self.rows[-1][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @staticmethod
    def _decoded(address: str) -> bytes:
        head, data = address.split(",", 1)
        assert head in ("data:image/svg+xml;base64", "data:image/png;base64")
        return base64.b64decode(data)


@pytest.fixture(scope="module")
def plan() -> Plan:
    topology = Topology(nodes=2, ranks_per_node=4)
    return make_plan(LENGTHS, topology, PRESETS["llama-3.1-8b-h200"])


def made(argv: list[str], tmp_path: Path) -> Parsed:
    """The page that a command writes, which is one document that fetches and runs nothing."""
    path = tmp_path / "page.html"
    assert main(["report", *argv, "--html", str(path)]) == 0
    text = path.read_text()
    parsed = Parsed(text)
    names = {name for name, _ in parsed.elements}
    assert not names & {"script", "link", "iframe", "object", "form", "base", "a"}
    for _, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on")]
    assert "http:" not in text
    assert "https:" not in text
    (policy,) = (one["content"] for one in parsed.named("meta") if "http-equiv" in one)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return parsed


def trace(tmp_path: Path, lines: list[dict[str, Any]]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(plan: Plan, step: int, seconds: float, **more: Any) -> dict[str, Any]:
    measured = [seconds / len(plan.micro_batches)] * len(plan.micro_batches)
    return {"step": step, "measured_s": measured, **more, **plan.to_record()}


# ---- lengths


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
    assert "8 sequences with 66,050 tokens" in page.text
    shown = capsys.readouterr().out
    assert "of the best single degree (degree " in shown
    assert shown.splitlines()[0] in page.text
    assert "page.html: " in shown


def test_a_report_has_the_table_of_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, LENGTHS * 3)))
    of_steps = ["--sequences-per-step", "8", "--steps", "2", *MACHINE, *FAST]
    assert main(["compare", "--lengths", str(path), *of_steps]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    page = made([str(path), *of_steps], tmp_path)
    assert "The first 2 of 3 steps were planned." in page.text
    cells = [re.split(r"\s\s+", one) for one in lines]
    for row in cells:
        assert [one[:-1] for one in page.rows if one[:1] == row[:1]] == [row[:-1]]  # but planning
    assert [row[0] for row in page.rows if row[:1] in (["0"], ["1"], ["2"])] == ["0", "1"]


def test_a_planner_without_figures_has_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, LENGTHS)))
    words = [*MACHINE, *FAST, "--sp-degree", "1", "--max-tokens-per-rank", "9000"]
    page = made([str(path), *words], tmp_path)
    assert "static: step 0: sequence 7 has 60000 tokens" in page.text
    assert "no single degree can run these lengths" in page.text


def test_lengths_in_a_sentence() -> None:
    said = lengths_text([1, 2, 3, 4, 90])
    assert said == (
        "5 sequences with 100 tokens: 20 on average, 3 at the median, 90 at most. "
        "The longest 5 % have 90 % of the tokens."
    )


# ---- a trace


def test_steps_have_their_tokens_degrees_and_seconds(plan: Plan, tmp_path: Path) -> None:
    twice = 2 * plan.objective_s
    path = trace(tmp_path, [line(plan, n, twice, waited_s=0.1 * twice) for n in range(3)])
    page = made([path], tmp_path)
    rows = [row for row in page.rows if row[:1] in (["0"], ["1"], ["2"])]
    degrees: dict[int, int] = {}
    for group in (group for batch in plan.micro_batches for group in batch.groups):
        degrees[group.degree] = degrees.get(group.degree, 0) + 1
    how = ", ".join(f"{count} x {degree}" for degree, count in sorted(degrees.items()))
    predicted, measured = f"{plan.objective_s:.3f}", f"{twice:.3f}"
    assert rows == [[str(n), "8", "66,050", predicted, measured, "2.00x", how] for n in range(3)]
    assert "a step's prediction is 50 % off at the median" in page.text
    assert "Training waited for plans for 10.0 % of that time." in page.text
    assert len(page.images) == 3  # the steps, one step, the lengths


def test_totals_of_a_run_by_hand() -> None:
    def ran(number: int, tokens: int, measured: float | None, waited: float) -> PlannedStep:
        group = Group(ranks=(0,), sequences=(0,), strategy="local")
        made = Plan(
            lengths=(tokens,), micro_batches=(MicroBatch(groups=(group,)),), objective_s=2.0,
            lower_bound_s=1.0, planner="hand", planning_s=0.0,
        )  # fmt: skip
        seconds = None if measured is None else (measured,)
        return PlannedStep(number=number, plan=made, measured_s=seconds, waited_s=waited)

    rows = [step_row([one]) for one in (ran(0, 60, 4.0, 0.3), ran(1, 40, 1.0, 0.2))]
    rows.append(step_row([ran(2, 40, None, 1.0)]))
    assert run_text(rows) == (
        "2 measured steps took 5.0 s, 20 tokens per second. Predicted were 4.0 s; a step's "
        "prediction is 75 % off at the median. Training waited for plans for 10.0 % of that time."
    )
    assert run_text(rows[2:]) == ""


def test_a_trace_is_planned_again_with_a_machine(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, [line(plan, n, 1.0) for n in range(3)])
    page = made([path, *MACHINE, *FAST, "--steps", "2"], tmp_path)
    assert "The table of planners is of the first 2 steps." in page.text
    assert "predicted by the cost model llama-3.1-8b-h200" in page.text
    assert "exposed transfers" in page.images[1].decode()
    alone = made([path], tmp_path)
    assert "exposed transfers" not in alone.images[1].decode()
    assert "Planners" not in alone.text


def test_the_median_step_is_drawn_unless_another_is_asked_for(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, [line(plan, 40 + n, s) for n, s in enumerate((9.0, 1.0, 5.0, 7.0))])
    assert "Step 42, the median step by its seconds" in made([path], tmp_path).text
    assert "Step 41, the step of --step" in made([path, "--step", "41"], tmp_path).text
    said = failed(["report", path, "--html", str(tmp_path / "x"), "--step", "3"], capsys)
    assert "expected --step from 40 to 43, got 3" in said


def test_steps_that_ran_again_count_once_and_torn_lines_are_named(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(plan, n, 1.0) for n in (0, 1, 2)]
    lines += [line(plan, n, 3.0, repeat=True, passes=2) for n in (1, 2)]
    path = trace(tmp_path, lines)
    with open(path, "a") as file:
        file.write('{"step": 3, "cost')
    page = made([path], tmp_path)
    assert "Left out: 2 lines of steps that ran again later." in page.text
    assert "Line 6 cannot be read, 5 can" in page.text
    assert "Micro-batches ran up to 2 times in a step" in page.text
    shown = capsys.readouterr()
    assert "3 measured steps took 7.0 s" in shown.out
    assert shown.err.count("\n") == 1


def test_replicas_of_a_pipeline_are_one_step(tmp_path: Path) -> None:
    first, last = parse("0F0.0 0B0.0"), parse("1F0.0 1B0.0")
    record = plan_of((first, last), sizes=[1]).to_record()
    lines = []
    for step in range(2):
        for replica in range(2):
            seconds = [0.5 + replica]
            lines.append({"step": step, "replica": replica, "measured_s": seconds, **record})
    page = made([trace(tmp_path, lines), *TWO], tmp_path)
    rows = [row for row in page.rows if row[:1] in (["0"], ["1"])]
    assert [(row[1], row[4]) for row in rows] == [("2", "1.500")] * 2
    assert "1 chunks through 2 stages, 1 chunks through 2 stages" in rows[0][-1]
    assert "Planners" not in page.text


def test_a_plan_that_was_not_run_is_drawn(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_record(), indent=1))
    page = made([str(tmp_path / "plan.json")], tmp_path)
    assert "Step 0, the only step" in page.text
    assert "measured steps" not in page.text


def test_a_step_above_the_limit_is_left_out_with_the_way_to_raise_it(
    plan: Plan, tmp_path: Path
) -> None:
    path = trace(tmp_path, [line(plan, 0, 1.0)])
    page = made([path, *MACHINE, *FAST, "--limit", "work=5"], tmp_path)
    assert "Not drawn: step 0 may be" in page.text
    assert "raise it with --limit work=" in page.text
    assert len(page.images) == 1  # the lengths


def test_a_long_run_is_drawn_by_means_and_its_table_ends(plan: Plan, tmp_path: Path) -> None:
    random.seed(0)
    lines = [line(plan, n, 1.0 + random.random()) for n in range(300)]
    page = made([trace(tmp_path, lines)], tmp_path)
    assert "100 later steps are not in the table." in page.text
    rows = [step_row([PlannedStep(number=n, plan=plan, measured_s=None)]) for n in range(5000)]
    assert len(data_uri(steps_figure(rows))) < 300_000


def test_a_large_picture_is_a_png(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [step_row([PlannedStep(number=n, plan=plan, measured_s=None)]) for n in range(2)]
    assert data_uri(steps_figure(rows)).startswith("data:image/svg+xml;base64,")
    monkeypatch.setattr(report, "MOST_SVG_BYTES", 1000)
    assert data_uri(steps_figure(rows)).startswith("data:image/png;base64,")


# ---- what a file brings


def test_hostile_names_stay_text(plan: Plan, tmp_path: Path) -> None:
    """A file, a planner and a cost model named like markup, and like mathematics of matplotlib."""
    evil = "<img src=x onerror=alert(1)>$\\frac{$&\"'"
    folder = tmp_path / "<script>"
    folder.mkdir()
    record = line(plan, 0, 1.0) | {"planner": evil, "notes": [evil]}
    path = tmp_path / f"{evil}.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"step": 1}))
    model = PRESETS["llama-3.1-8b-h200"].to_record() | {"name": evil}
    (folder / "cost.json").write_text(json.dumps(model))
    words = ["--topology", "2x4", "--cost-model", str(folder / "cost.json"), *FAST]
    page = made([str(path), *words], tmp_path)
    assert len(page.named("img")) == len(page.images) == 3
    assert f"{evil}.jsonl" in page.text
    assert f"by {evil}" in page.text
    assert f"the cost model {evil}" in page.text
    assert "<script>" not in page.text


def test_the_page_keeps_folders_of_its_author_to_itself(plan: Plan, tmp_path: Path) -> None:
    page = made([trace(tmp_path, [line(plan, 0, 1.0)])], tmp_path)
    assert str(tmp_path) not in page.text
    assert "flexseq report trace.jsonl --html page.html" in page.text


def test_the_template_refuses_a_value_that_is_missing() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="source"):
        report.page(summary=[])


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
        ([str(tmp_path / "bad"), *html, *MACHINE], "line 2 is not an integer"),
        ([str(tmp_path / "empty"), *html, *MACHINE], "holds no lengths"),
        ([str(tmp_path / "none.json"), *html], "not a plan: missing keys"),
        ([str(tmp_path / "absent"), *html], "No such file"),
        ([lengths, "--html", "/no/such/folder/x", *MACHINE], "/no/such/folder does not exist"),
        ([lengths, *MACHINE], "--html"),
        (
            [lengths, *html, *MACHINE, "--limit", "sequences=1"],
            "raise it with --limit sequences=2",
        ),
        ([lengths, *html, *MACHINE, "--step", "7"], "expected --step from 0 to 0, got 7"),
        ([other, *html, "--topology", "1x2"], "1 x 2"),
        ([other, *html, *MACHINE[2:]], "--cost-model also needs --topology"),
        ([lengths, *html, *TWO, "--max-tokens-per-rank", "1"], "no planner can plan this"),
    ):
        assert message in failed(["report", *argv], capsys)
    assert not (tmp_path / "page.html").exists()


def test_a_report_without_its_libraries_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = failed(["report", "x", "--html", str(tmp_path / "x")], capsys)
    assert 'reports need jinja2, which cannot be imported: pip install "hf_flexseq[pictures]"' in (
        said
    )
