"""The page of a report: parsed, below its limit, free of what a file could smuggle into it."""

import base64
import hashlib
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.stages import PipelineCost, StageCost
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.plan_options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.pipeline import make_pipeline_plan
from hf_flexseq.simulate import Detail, simulate
from hf_flexseq.simulate.pipeline import simulate_pipeline
from hf_flexseq.timeline import Timeline, sketch
from hf_flexseq.topology import Topology
from hf_flexseq.view.report import Report, RunStep, Step, lengths_of, page, step
from hf_flexseq.view.report.charts import MARKS, ticks_up_to, values_up_to
from hf_flexseq.view.report.markup import Markup, element, joined
from hf_flexseq.view.report.page import summary
from hf_flexseq.view.report.run import POINTS, totals
from hf_flexseq.view.report.words import seconds, tokens
from hf_flexseq.view.results import Result

LARGE = Topology(nodes=8, ranks_per_node=8)
GEMMA = PRESETS["gemma-3-27b-h200"]
VOID = {"meta", "br", "input"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Parsed(HTMLParser):
    """The elements of a page: (name, attributes) each; texts by the element they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self) -> dict[str, object]:
        (text,) = (text for tag, text in self.texts if tag == "script" and text.startswith("{"))
        made: dict[str, object] = json.loads(text)
        return made


def lengths(count: int) -> list[int]:
    rng = random.Random(0)
    return [min(100_000, 1 + int(rng.lognormvariate(6.9, 1.5))) for _ in range(count)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(lengths(256), LARGE, GEMMA)


def drawn(plan: Plan, timeline: Timeline | None = None) -> Step:
    made = timeline or simulate(plan, LARGE, GEMMA, detail=Detail(layers=0))
    return Step(
        number=3, plan=plan, timeline=made, title="A step.", reason="Why.", ranks_per_node=8
    )


def about(plan: Plan, **changes: object) -> Report:
    return replace(
        Report(source="lengths.txt", lengths=lengths_of(plan.lengths), step=drawn(plan)),
        **changes,  # type: ignore[arg-type]
    )


AUTO = Result(name="auto", closed_s=0.63, gap=0.05, simulated_s=0.7, transfers=0.1, idle=0.02)
FIXED = Result(name="static, degree 8", closed_s=1.0, gap=0.6, simulated_s=1.0, transfers=0.4)


def test_a_page_is_one_document_that_fetches_nothing(plan: Plan) -> None:
    text = page(about(plan, results=(AUTO, FIXED), planned="Of 5 steps the first was planned."))
    parsed = Parsed(text)
    assert len(text.encode()) < 2_000_000
    for name, attributes in parsed.elements:
        assert not {"src", "href", "srcset", "onclick", "onload"} & set(attributes), name
        assert name not in ("link", "img", "iframe", "object", "form", "base")
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_policy_of_a_page_names_the_one_script_that_may_run(plan: Plan) -> None:
    parsed = Parsed(page(about(plan)))
    (policy,) = (one["content"] for one in parsed.named("meta") if "http-equiv" in one)
    scripts = [text for tag, text in parsed.texts if tag == "script" and not text.startswith("{")]
    digest = base64.b64encode(hashlib.sha256("".join(scripts).encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_what_a_file_brings_stays_text(plan: Plan) -> None:
    made = replace(plan, planner=EVIL[:60], notes=(EVIL,))
    hostile = about(
        made,
        source=EVIL,
        step=replace(drawn(made), title=EVIL, reason=EVIL),
        results=(replace(AUTO, name=EVIL), Result(name="x", problem=EVIL)),
        planned=EVIL,
        run=(RunStep(number=0, tokens=9, predicted_s=1, measured_s=1, waited_s=0, planning_s=0),),
        run_remarks=(EVIL,),
        length_remarks=(EVIL,),
        made_by=EVIL,
    )
    parsed = Parsed(page(hostile))
    assert parsed.named("img") == []
    assert len(parsed.named("script")) == 2
    assert parsed.data()["ranks"] == 64
    assert sum(EVIL in text for _, text in parsed.texts) >= 6
    assert step.data({"labels": [EVIL]}).count("<") == 2  # the element's own


def test_every_group_of_a_step_is_drawn_and_told(plan: Plan) -> None:
    parsed = Parsed(page(about(plan)))
    facts = parsed.data()
    groups = facts["groups"]
    assert isinstance(groups, dict)
    paths = [one for one in parsed.named("path") if "data-g" in one]
    shown = {f"{one['data-b']}.{one['data-g']}" for one in paths}
    wanted = {}
    for batch, micro_batch in enumerate(plan.micro_batches):
        for index, group in enumerate(micro_batch.groups):
            wanted[f"{batch}.{index}"] = group
    assert shown == set(groups) == set(wanted)
    for key, group in wanted.items():
        _, _, start, degree, strategy, count, members, longest = groups[key]
        assert (start, degree, strategy) == (group.start, group.degree, group.strategy)
        assert (count, members) == (group.tokens(plan.lengths), len(group.sequences))
        most = max(plan.lengths[sequence] for sequence in group.sequences)
        assert longest[0][1] == most
    labels = facts["labels"]
    assert {"attention", "attention, window 1024", "linear layers"} <= set(labels)  # type: ignore[call-overload]


def test_boxes_lie_where_the_simulated_events_do(plan: Plan) -> None:
    made = drawn(plan)
    busy = 0
    for attributes in Parsed(page(about(plan))).named("path"):
        if "data-l" in attributes:
            for x, y, width, tall in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)", attributes["d"]):
                assert int(x) + int(width) <= step.UNITS
                assert int(y) + int(tall) <= 64
                busy += int(width) * int(tall)
    share = 1 - made.timeline.share("wait")
    assert busy / (step.UNITS * 64) == pytest.approx(share, abs=0.001)


def test_degrees_have_a_colour_marks_and_a_number(plan: Plan) -> None:
    text = page(about(plan))
    degrees = {group.degree for mb in plan.micro_batches for group in mb.groups}
    assert len(degrees) > 1
    for degree in degrees:
        assert f"degree {degree} (" in text
        index = degree.bit_length() - 1
        assert f".by-degree .d{degree}{{fill:#" in text
        assert (f'fill="url(#m-d{degree})"' in text) == bool(MARKS[index])
    assert len(set(MARKS)) == len(MARKS)


def test_a_step_of_many_ranks_becomes_coarser_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    group = [Group(ranks=(r,), sequences=(r,), strategy="local") for r in range(64)]
    ring = Group(ranks=tuple(range(64)), sequences=(64,), strategy="zigzag")
    made = Plan(
        lengths=(*range(100, 164), 100_000),
        micro_batches=(MicroBatch(groups=(ring,)), MicroBatch(groups=tuple(group))),
        objective_s=1.0,
        lower_bound_s=0.5,
        planner="hand",
        planning_s=0.0,
    )
    whole = step.fitting(drawn(made))
    assert whole.remark == ""
    assert len(whole.boxes) > 1000  # the steps of a ring, on each of its ranks
    monkeypatch.setattr(step, "MOST_BYTES", 40_000)
    coarser = step.fitting(drawn(made))
    assert "a group is one box" in coarser.remark
    assert 65 <= len(coarser.boxes) < 200
    monkeypatch.setattr(step, "MOST_BYTES", 4_000)
    part = step.fitting(drawn(made))
    assert "Only the first 1 of 2 micro-batches are drawn." in part.remark
    assert "first 1 of 2" in page(about(made, step=drawn(made)))


def test_a_pipeline_s_actions_are_drawn_by_kind() -> None:
    stage = StageCost(linear_ns=1e3, attention_ns=1.0, chunk_ns=0.0, layers=2)
    cost = PipelineCost.even(2, stage)
    made = make_pipeline_plan([400, 300, 50, 20], cost, schedule="seq1f1b", chunks=2)
    text = page(about_pipeline(made, simulate_pipeline(made, cost)))
    parsed = Parsed(text)
    assert ".boxes [class='a0']{fill:#3f6fb0}" in text
    assert 'data-do="colours"' not in text
    assert "degree 1" not in text.split('id="step"')[1].split('id="lengths"')[0]
    told = parsed.data()
    assert len(told["chunks"]) == len(made.chunks)  # type: ignore[arg-type]
    assert "0F0.0" in told["labels"]  # type: ignore[operator]


def about_pipeline(made: PipelinePlan, timeline: Timeline) -> Report:
    one = Step(number=0, plan=made, timeline=timeline, title="A step.", reason="Why.")
    return Report(source="trace.jsonl", lengths=lengths_of(made.lengths), step=one)


@pytest.mark.parametrize("measured", [None, (0.5,)])
def test_a_step_without_a_cost_model_is_drawn_by_its_tokens(
    measured: tuple[float] | None,
) -> None:
    made = make_plan(
        [900, 300, 50],
        Topology(nodes=1, ranks_per_node=2),
        GEMMA,
        PlanOptions(max_tokens_per_rank=1000),
    )
    timeline = sketch(made, 2, measured)
    text = page(about(made, step=replace(drawn(made, timeline), measured_s=measured)))
    assert Parsed(text).data()["unit"] == ("tokens" if measured is None else "s")
    assert ("tokens per rank" in text) == (measured is None)


def test_an_empty_step_is_an_empty_picture() -> None:
    empty = Plan(
        lengths=(), micro_batches=(), objective_s=0.0, lower_bound_s=0.0, planner="x",
        planning_s=0.0,
    )  # fmt: skip
    text = page(Report(source="x", lengths=lengths_of([1]), step=drawn(empty, sketch(empty, 2))))
    assert Parsed(text).data()["groups"] == {}


# ---- lengths


def test_lengths_in_numbers_by_hand() -> None:
    made = lengths_of([1, 2, 3, 4, 90])
    assert (made.sequences, made.tokens, made.longest, made.mean) == (5, 100, 90, 20.0)
    assert made.quantiles == (3, 90, 90)
    assert made.share_of_longest == 0.9
    assert made.bins[0] == (1, 1, 1)
    assert made.bins[1] == (2, 2, 5)
    assert made.bins[-1] == (64, 1, 90)
    assert sum(count for _, count, _ in made.bins) == 5


# ---- the summary


def summed(**changes: object) -> str:
    made = Report(source="x", lengths=lengths_of([5]), results=(AUTO, FIXED))
    return " ".join(summary(replace(made, **changes)))  # type: ignore[arg-type]


def test_the_summary_says_what_planning_brings_and_when_it_brings_nothing() -> None:
    said = summed()
    assert "takes 0.63 of the seconds of the best fixed degree (degree 8)" in said
    assert "630 ms a step against 1.00 s" in said
    assert "10.0 % of the simulated time in communication, with the fixed degree 40.0 %" in said
    assert "predicted from the cost model, not measured" in said
    assert "brings little: it takes 0.99" in summed(results=(replace(AUTO, closed_s=0.99), FIXED))
    assert "brings little: it takes 1.20" in summed(results=(replace(AUTO, closed_s=1.2), FIXED))
    broken = replace(FIXED, problem="too long")
    assert "No fixed degree can run them" in summed(results=(AUTO, broken))
    assert "No planner but a fixed degree" in summed(results=(replace(AUTO, problem="no"), FIXED))
    zeppelin = replace(AUTO, name="zeppelin", closed_s=0.8)
    assert "takes 0.80 of" in summed(results=(zeppelin, FIXED))


# ---- runs


def ran(count: int, **changes: object) -> tuple[RunStep, ...]:
    rng = random.Random(1)
    steps = []
    for number in range(count):
        took = 1.0 + rng.random() + 50 * (number == 0)
        one = RunStep(
            number=number, tokens=1000, predicted_s=1.5, measured_s=took, waited_s=0.01,
            planning_s=0.1,
        )  # fmt: skip
        steps.append(replace(one, **changes))  # type: ignore[arg-type]
    return tuple(steps)


def test_totals_of_a_run_by_hand() -> None:
    steps = (
        RunStep(number=0, tokens=60, predicted_s=2, measured_s=4, waited_s=0.3, planning_s=1),
        RunStep(number=1, tokens=40, predicted_s=2, measured_s=1, waited_s=0.2, planning_s=1),
        RunStep(number=2, tokens=40, predicted_s=2, measured_s=None, waited_s=1.0, planning_s=1),
    )
    made = totals(steps)
    assert made is not None
    assert len(made.measured) == 2
    assert (made.ratio, made.tokens_per_s, made.waited) == (1.25, 20.0, pytest.approx(0.1))
    assert made.error == pytest.approx((0.5 + 1.0) / 2)
    assert totals(steps[2:]) is None
    said = summed(results=(), run=steps)
    assert "3 steps at 20 tokens per second. They took 1.25 of the predicted seconds" in said
    assert "waited for plans for 10.0 %" in said


def test_a_run_of_thousands_of_steps_is_drawn_as_some_hundred_points(plan: Plan) -> None:
    text = page(about(plan, run=ran(5000), step=None))
    assert len(text) < 300_000
    part = text.split('id="run"')[0].split("<section>")[-1] + text.split("</header>")[1]
    lines = [
        one["d"] or "" for one in Parsed(text).named("path") if one.get("class") == "line measured"
    ]
    assert len(lines) == 3
    assert all(line.count(" ") < 2 * POINTS + 2 for line in lines)
    assert "1 step above the chart, the highest at 5" in part
    assert "the band goes from least to most" in part


def test_a_run_says_what_its_trace_lacks(plan: Plan) -> None:
    assert "not in this trace" in page(about(plan, run=ran(3, waited_s=None)))
    assert "nobody ran" in page(about(plan, run=ran(3, measured_s=None)))
    Parsed(page(about(plan, run=ran(1))))


# ---- small parts


def test_elements_escape_all_that_is_no_markup() -> None:
    made = element("p", "a < b", element("b", "&"), None, class_="x", data_do='"')
    assert made == '<p class="x" data-do="&quot;">a &lt; b<b>&amp;</b></p>'
    assert element("br", class_=None) == "<br>"
    assert joined("<", Markup("<br>")) == "&lt;<br>"


def test_axes_have_round_values() -> None:
    assert values_up_to(76.0) == [0.0, 20.0, 40.0, 60.0]
    assert values_up_to(1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [tick.text for tick in ticks_up_to(0.5)] == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]
    assert [tick.text for tick in ticks_up_to(0.0)] == ["0"]


def test_figures_in_words() -> None:
    assert [seconds(s) for s in (1234.5, 76.01, 2.5, 0.0123, 1.2e-5)] == [
        "1,234 s", "76.0 s", "2.50 s", "12.3 ms", "12 us",
    ]  # fmt: skip
    assert [tokens(count) for count in (512, 1024, 131072, 2**21, 1000)] == [
        "512", "1K", "128K", "2M", "1,000",
    ]  # fmt: skip
