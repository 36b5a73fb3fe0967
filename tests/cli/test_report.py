"""`flexseq report` on lengths of every form, on plans, on traces, and on what is neither."""

import base64
import gzip
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.pipeline.planning.plan import parse
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.files import RecordedStep
from hf_flexseq.planner import make_plan
from hf_flexseq.view.report import run_text, step_row
from tests.budget import others_slow
from tests.pipelines import plan_of

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

MACHINE = "--topology 2x4 --cost-model llama-3.1-8b-h200"
TWO = "--topology 1x2 --cost-model llama-3.1-8b-h200"
FAST = "--planners auto static"
LENGTHS = [900, 300, 50, 4000, 700, 20, 80, 60000]
LINES = "\n".join(map(str, LENGTHS))
VOID = {"meta", "img"}


class Parsed(HTMLParser):
    """A page: its elements as (name, attributes), its text, its pictures decoded, and its tables
    as rows of cells."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = ""
        self.rows = []
        self.open = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        self.images = []
        for one in self.named("img"):
            head, data = one["src"].split(",", 1)
            assert head in ("data:image/svg+xml;base64", "data:image/png;base64")
            self.images.append(base64.b64decode(data))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "td":
            self.rows[-1][-1] += data

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def steps(self):
        """The rows of the table of steps that are numbered 0 to 2."""
        return [row for row in self.rows if row[:1] in (["0"], ["1"], ["2"])]


@pytest.fixture(scope="module")
def plan():
    topology = Topology(nodes=2, ranks_per_node=4)
    return make_plan(LENGTHS, topology, PRESETS["llama-3.1-8b-h200"])


@pytest.fixture
def made(tmp_path):
    """A function that writes the page of a file, with options separated by spaces, and reads it.
    It is one document that fetches and runs nothing."""

    def make(source, words=""):
        path = tmp_path / "page.html"
        assert main(["report", str(source), "--html", str(path), *words.split()]) == 0
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

    return make


@pytest.fixture
def lengths(tmp_path):
    (tmp_path / "lengths").write_text(LINES)
    return tmp_path / "lengths"


@pytest.fixture
def trace(tmp_path):
    """A function that writes lines to a plan trace, and a torn one where it is asked for."""

    def write(lines, torn=""):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return path

    return write


def line(plan, step, seconds=1.0, **more):
    measured = [seconds / len(plan.micro_batches)] * len(plan.micro_batches)
    return {"step": step, "measured_s": measured, **more, **plan.to_record()}


# ---- lengths


@pytest.mark.parametrize("form", others_slow(["lines", "list", "rows", "gz"], tried=["gz"]))
def test_lengths_of_every_form_are_reported(form, made, tmp_path, capsys):
    path = tmp_path / f"lengths.{form}"
    rows = "\n".join(json.dumps({"text": "x", "length": n}) for n in LENGTHS)
    text = {"list": json.dumps(LENGTHS), "rows": rows}.get(form, LINES).encode()
    path.write_bytes(gzip.compress(text) if form == "gz" else text)
    page = made(path, f"{MACHINE} {FAST}")
    assert "8 sequences with 66,050 tokens" in page.text
    shown = capsys.readouterr().out
    assert "of the best single degree (degree " in shown
    assert shown.splitlines()[0] in page.text
    assert "page.html: " in shown


def test_a_report_has_the_table_of_compare(made, flexseq, lengths):
    lengths.write_text(f"{LINES}\n" * 3)
    of_steps = f"--sequences-per-step 8 --steps 2 {MACHINE} {FAST}"
    compared = flexseq(f"compare --lengths {lengths} {of_steps}").splitlines()[2:]
    page = made(lengths, of_steps)
    assert "The first 2 of 3 steps were planned." in page.text
    for row in (re.split(r"\s\s+", one) for one in compared):
        assert [one[:-1] for one in page.rows if one[:1] == row[:1]] == [row[:-1]]  # but planning
    assert [row[0] for row in page.steps()] == ["0", "1"]


# ---- a trace


def test_steps_have_their_tokens_degrees_and_seconds(plan, made, trace):
    twice = 2 * plan.objective_s
    page = made(trace([line(plan, n, twice, waited_s=0.1 * twice) for n in range(3)]))
    degrees = Counter(group.degree for batch in plan.micro_batches for group in batch.groups)
    how = ", ".join(f"{count} x {degree}" for degree, count in sorted(degrees.items()))
    seconds = [f"{plan.objective_s:.3f}", f"{twice:.3f}", "2.00x"]
    assert page.steps() == [[str(n), "8", "66,050", *seconds, how] for n in range(3)]
    assert "a step's prediction is 50 % off at the median" in page.text
    assert "Training waited for plans for 10.0 % of that time." in page.text
    assert len(page.images) == 3  # the steps, one step, the lengths


def test_totals_of_a_run_by_hand():
    def ran(number, tokens, measured, waited):
        group = Group(ranks=(0,), sequences=(0,), strategy="local")
        made = Plan(
            lengths=(tokens,), micro_batches=(MicroBatch(groups=(group,)),), objective_s=2.0,
            lower_bound_s=1.0, planner="hand", planning_s=0.0,
        )  # fmt: skip
        seconds = None if measured is None else (measured,)
        return step_row(
            [RecordedStep(number=number, plan=made, measured_s=seconds, waited_s=waited)]
        )

    rows = [ran(0, 60, 4.0, 0.3), ran(1, 40, 1.0, 0.2), ran(2, 40, None, 1.0)]
    assert run_text(rows) == (
        "2 measured steps took 5.0 s, 20 tokens per second. Predicted were 4.0 s; a step's "
        "prediction is 75 % off at the median. Training waited for plans for 10.0 % of that time."
    )
    assert run_text(rows[2:]) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "words", "said"),
    [
        ((1, 1, 1), f"{MACHINE} {FAST} --steps 2", "of planners is of the first 2 steps."),
        ((1, 1, 1), f"{MACHINE} {FAST}", "predicted by the cost model llama-3.1-8b-h200"),
        ((9, 1, 5, 7), "", "Step 2, the median step by its seconds"),
        ((9, 1, 5, 7), "", "flexseq report trace.jsonl --html page.html"),
        ((9, 1, 5, 7), "--step 1", "Step 1, the step of --step"),
        ((1,), f"{MACHINE} {FAST} --limit work=5", "raise it with --limit work="),
        ((1,) * 300, "", "100 later steps are not in the table."),
    ],
)
def test_a_page_says_what_it_shows(seconds, words, said, plan, made, trace, tmp_path):
    page = made(trace([line(plan, n, float(s)) for n, s in enumerate(seconds)]), words)
    assert said in page.text
    assert str(tmp_path) not in page.text, "it keeps the folders of its author to itself"
    is_priced, is_drawn = "--topology" in words, "--limit" not in words
    assert ("Planners" in page.text) == is_priced
    assert ("Not drawn: step 0 may be" in page.text) != is_drawn
    assert len(page.images) == (3 if is_drawn else 1)  # the steps, one step, the lengths
    if is_drawn:
        assert ("exposed transfers" in page.images[1].decode()) == is_priced


@pytest.mark.slow
def test_a_trace_whose_first_steps_are_empty_is_not_planned_again(plan, made, trace):
    empty = make_plan([], Topology(nodes=2, ranks_per_node=4), PRESETS["llama-3.1-8b-h200"])
    lines = [{"step": 0, **empty.to_record()}, line(plan, 1)]
    page = made(trace(lines), f"{MACHINE} {FAST} --steps 1")
    assert "The first 1 step had no sequences." in page.text
    assert "Planners" not in page.text


@pytest.mark.slow
def test_steps_that_ran_again_count_once_and_torn_lines_are_named(plan, made, trace, capsys):
    lines = [line(plan, n) for n in (0, 1, 2)]
    lines += [line(plan, n, 3.0, passes=2) for n in (1, 2)]
    page = made(trace(lines, torn='{"step": 3, "cost'))
    assert "Left out: 2 lines of steps that ran again later." in page.text
    assert "Line 6 cannot be read, 5 can" in page.text
    assert "Micro-batches ran up to 2 times in a step" in page.text
    shown = capsys.readouterr()
    assert "3 measured steps took 7.0 s" in shown.out
    assert shown.err.count("\n") == 1


def test_replicas_of_a_pipeline_are_one_step(made, trace):
    first, last = parse("0F0.0 0B0.0"), parse("1F0.0 1B0.0")
    record = plan_of((first, last), sizes=[1]).to_record()
    lines = [
        {"step": step, "replica": replica, "measured_s": [0.5 + replica], **record}
        for step in range(2)
        for replica in range(2)
    ]
    page = made(trace(lines), TWO)
    assert [(row[1], row[4]) for row in page.steps()] == [("2", "1.500")] * 2
    assert "1 chunks through 2 stages, 1 chunks through 2 stages" in page.steps()[0][-1]
    assert "Planners" not in page.text


# ---- images


@pytest.mark.slow
def test_a_trace_shows_the_tower_of_steps_that_have_images(plan, made, trace):
    towers = [{"images": 9, "seconds": 0.25, "imbalance": 1.5}, None, None]
    lines = [line(plan, n) | ({"tower": tower} if tower else {}) for n, tower in enumerate(towers)]
    page = made(trace(lines), f"{MACHINE} {FAST} --step 0")
    with_tower = plan.objective_s + 0.25
    predicted = [row[3] for row in page.steps()]
    assert predicted == [f"{with_tower:.3f}", *[f"{plan.objective_s:.3f}"] * 2]
    assert [row[6:9] for row in page.steps()] == [["9", "0.250", "1.500"], [""] * 3, [""] * 3]
    assert page.steps()[0][5] == f"{1 / with_tower:.2f}x"
    assert "encodes 9 images, each on one rank, in predicted 0.25 s per step" in page.text
    assert "0.250 s of the tower (imbalance 1.500)" in page.text
    assert "of the first 3 steps. It has sequences alone, without images." in " ".join(
        page.text.split()
    )
    assert "tower" in page.images[0].decode()


# ---- what a file brings


@pytest.mark.slow
def test_hostile_names_stay_text(plan, made, tmp_path):
    """A file, a planner and a cost model named like markup, and like mathematics of matplotlib."""
    evil = "<img src=x onerror=alert(1)>$\\frac{$&\"'"
    (tmp_path / "<script>").mkdir()
    record = line(plan, 0) | {"planner": evil, "notes": [evil]}
    path = tmp_path / f"{evil}.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"step": 1}))
    model = PRESETS["llama-3.1-8b-h200"].to_record() | {"name": evil}
    cost = tmp_path / "<script>/cost.json"
    cost.write_text(json.dumps(model))
    page = made(path, f"--topology 2x4 --cost-model {cost} {FAST}")
    assert len(page.named("img")) == len(page.images) == 3
    assert f"{evil}.jsonl" in page.text
    assert f"by {evil}" in page.text
    assert f"the cost model {evil}" in page.text
    assert "<script>" not in page.text


def test_what_cannot_be_reported_is_one_line(plan, trace, refused, lengths, tmp_path):
    html = f"--html {tmp_path}/page.html"
    texts = {"bad": "5\nx\n", "empty": "", "none.json": '{"objective_s": 1}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    other = trace([line(plan, 40)])
    for words, message in (
        (f"{lengths} {html}", "holds lengths: to plan them, give --topology and --cost-model"),
        (f"{tmp_path}/bad {html} {MACHINE}", "line 2 is not an integer"),
        (f"{tmp_path}/empty {html} {MACHINE}", "holds no lengths"),
        (f"{tmp_path}/none.json {html}", "not a plan: missing keys"),
        (f"{tmp_path}/absent {html}", "No such file"),
        (f"{lengths} --html /no/such/folder/x {MACHINE}", "/no/such/folder does not exist"),
        (f"{lengths} {MACHINE}", "--html"),
        (f"{lengths} {html} {MACHINE} --limit sequences=1", "raise it with --limit sequences=8"),
        (f"{other} {html} --step 7", "expected --step from 40 to 40, got 7"),
        (f"{other} {html} --topology 1x2", "1 x 2"),
        (f"{other} {html} --cost-model llama-3.1-8b-h200", "--cost-model also needs --topology"),
        (f"{lengths} {html} {TWO} --max-tokens-per-rank 1", "no planner can plan this"),
    ):
        assert message in refused(f"report {words}")
    assert not (tmp_path / "page.html").exists()


def test_a_report_without_its_libraries_names_the_extra(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = refused(f"report x --html {tmp_path}/x")
    assert 'jinja2, which cannot be imported: pip install "hf_flexseq[pictures]"' in said
