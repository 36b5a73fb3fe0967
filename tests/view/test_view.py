"""Text grids by hand, pictures that hold what they should, and traces that a viewer can open."""

import functools
import json
import random
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.planner import make_plan
from hf_flexseq.view import (
    chrome,
    chrome_text,
    chrome_trace,
    picture,
    save_picture,
    sketch,
    text_grid,
    timeline_of,
)
from hf_flexseq.view.picture import colour_of
from hf_flexseq.view.shares import degrees, duration, shares
from hf_flexseq.view.timeline import Recorder, Timeline
from tests.plans import group, plan_of_groups

PLAN = plan_of_groups(
    (40, 30, 20, 10), [group(0, 4, 0), group(0, 2, 2)], [group(0, 2, 1), group(3, 4, 3)]
)


@functools.cache
def large() -> Timeline:
    """A step of 256 sequences on 64 ranks."""
    rng = random.Random(0)
    cluster, cost = Topology(nodes=8, ranks_per_node=8), PRESETS["flexsp-gpt-7b-a100"]
    lengths = [min(100_000, 1 + int(rng.lognormvariate(6.9, 1.5))) for _ in range(256)]
    return timeline_of(make_plan(lengths, cluster, cost), cluster, cost)


def lasting(*durations: int) -> Timeline:
    """Micro-batches of one rank."""
    recorder = Recorder(1)
    for each in durations:
        recorder.begin_micro_batch([0])
        recorder.work(0, each, "compute", "x", group=0, degree=1)
    return recorder.timeline("ns")


# ---- sketches and figures


def test_a_sketch_is_busy_in_proportion_to_tokens():
    timeline = sketch(PLAN, 4)
    assert (timeline.unit, timeline.stop, timeline.starts) == ("tokens", 35, (0, 20))
    busy = [(e.rank, e.start, e.stop, e.degree) for e in timeline.events if e.kind == "compute"]
    assert busy == [
        (0, 0, 10, 4), (0, 10, 20, 2), (0, 20, 35, 2),
        (1, 0, 10, 4), (1, 10, 20, 2), (1, 20, 35, 2),
        (2, 0, 10, 4), (3, 0, 10, 4), (3, 20, 30, 1),
    ]  # fmt: skip
    assert timeline.share("compute") == pytest.approx((35 + 35 + 10 + 20) / (4 * 35))


def test_a_measured_sketch_is_in_seconds():
    timeline = sketch(PLAN, 4, [2.0, 1.0])
    assert (timeline.unit, timeline.stop, timeline.starts) == ("ns", 3 * 10**9, (0, 2 * 10**9))
    assert degrees(timeline) == {1: 1, 2: 2, 4: 1}
    assert [duration(timeline, ns) for ns in (1_234_000_000, 1_234_000)] == ["1.23 s", "1.23 ms"]
    assert shares(timeline).startswith("compute ")


# ---- text


def test_text_grid_by_hand():
    lines = text_grid(sketch(PLAN, 4), title="Four ranks", width=40).splitlines()
    assert lines == [
        "Four ranks",
        " 0-1 44444444442222222222|22222222222222",
        "   2 4444444444..........|..............",
        "   3 4444444444..........|111111111.....",
        "     0                         35 tokens",
        "1 1 x degree 1   2 2 x degree 2",
        "4 1 x degree 4   . idle",
        "| next micro-batch",
        "compute 71.4 %, idle 28.6 %",
    ]


def test_text_fits_a_screen_and_merges_equal_ranks():
    lines = text_grid(large()).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 64 + 5
    whole = plan_of_groups((64,), [group(0, 64, 0)])
    assert text_grid(sketch(whole, 64)).splitlines()[0].split() == ["0-63", "A" * 93]
    many = plan_of_groups(range(1, 501), [group(rank, rank + 1, rank) for rank in range(500)])
    assert len(text_grid(sketch(many, 500)).splitlines()) <= 64 + 3


# ---- pictures


def test_an_svg_follows_the_colour_scheme_and_is_the_same_each_time(tmp_path):
    texts = []
    for name in ("a.svg", "b.svg"):
        save_picture(sketch(PLAN, 4), tmp_path / name, title="A step", ranks_per_node=2)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert "@media (prefers-color-scheme:dark)" in texts[0]
    drawn = texts[0].split("</style>", 1)[1]
    assert "currentColor" in drawn
    assert picture.INK not in drawn
    root = ElementTree.fromstring(texts[0])
    assert not [one for one in root.iter() if one.get("style", "").startswith("fill: #ffffff")]


@pytest.mark.parametrize("degree", [1, 6])
def test_a_picture_shows_groups_in_the_colour_of_their_degree(tmp_path, degree):
    image = pytest.importorskip("matplotlib.image")
    whole = plan_of_groups((degree,), [group(0, degree, 0)])
    save_picture(sketch(whole, 2 * degree), tmp_path / "a.png")
    pixels = (image.imread(tmp_path / "a.png")[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    colour = [int(colour_of(degree)[at : at + 2], 16) for at in (1, 3, 5)]
    assert (pixels[height // 3, width // 2] == colour).all()  # the upper half of the ranks works
    assert (pixels[int(height * 0.6), width // 2] == 255).all()  # the lower half is idle


def test_empty_timelines_can_be_shown(tmp_path):
    empty = sketch(plan_of_groups(()), 2)
    assert text_grid(empty).split() == ["0", "0", "tokens"]
    save_picture(empty, tmp_path / "empty.svg")


def test_names_in_a_title_are_neither_markup_nor_mathematics(tmp_path):
    evil = r"</text><script>alert(1)</script> $\frac{$ & \"'"
    for name in ("a.svg", "a.png"):
        save_picture(lasting(1), tmp_path / name, title=evil)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert not [one for one in root.iter() if one.tag.endswith("script")]
    assert evil in "".join(root.itertext())


def test_a_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "hf_flexseq\[pictures\]"'):
        save_picture(lasting(1), tmp_path / "a.png")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert any(needed.startswith("matplotlib") for needed in extras["pictures"])
    assert "hf_flexseq[pictures]" in extras["recipes"]


# ---- traces


def test_chrome_trace_is_json_with_ordered_lanes():
    timeline = large()
    trace = json.loads(json.dumps(chrome_trace(timeline, ranks_per_node=8)))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == set(range(8))
    assert len(slices) == sum(e.kind != "wait" for e in timeline.events)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.stop / 1e3)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names[:2] == ["node 0", "node 1"]
    assert {f"rank {rank}" for rank in range(64)} <= set(names)
    lanes: dict[int, float] = {}
    for e in slices:  # slices of a lane neither overlap nor go back
        assert e["ts"] >= lanes.get(e["tid"], 0.0) - 1e-6
        lanes[e["tid"]] = e["ts"] + e["dur"]
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert len(counters) == len(timeline.memory)


def test_a_trace_stays_small_and_says_what_it_lacks(monkeypatch):
    whole, shown = chrome_text(large(), ranks_per_node=8)
    assert json.loads(whole) == chrome_trace(large(), ranks_per_node=8)
    assert shown == ""
    monkeypatch.setattr(chrome, "MOST_BYTES", len(whole) // 10)
    least, shown = chrome_text(large(), ranks_per_node=8)
    assert len(least) <= len(whole) // 10
    ranks = {e["tid"] for e in json.loads(least)["traceEvents"] if e["ph"] == "X"}
    assert ranks == set(range(len(ranks)))
    assert 0 < len(ranks) < 64
    assert shown == f"the first {len(ranks)} of 64 ranks"
