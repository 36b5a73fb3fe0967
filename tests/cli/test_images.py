"""The commands on rows with images: the tower beside the plan, the cost of other ways, and what is
refused."""

import io
import json
import random
import re
import sys

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import compare as comparing
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Plan
from hf_flexseq.planner import make_plan

COST = PRESETS["qwen3-vl-8b-h100"]
MACHINE = "--topology 1x8 --cost-model qwen3-vl-8b-h100"
TOWER = re.compile(
    r"with ([\d,]+) images?, .* predicted ([\d.]+) s: ([\d.]+) s \([\d.]+ % above the bound\) "
    r"and ([\d.]+) s of the tower \(imbalance ([\d.]+)\)"
    r"(?:, which runs forward twice: its graph is not kept)?, planned"
)


def drawn(count, seed=0):
    """Rows of up to twenty images, whose patches are long-tailed from 256 to 16,384."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        sizes = [rng.lognormvariate(7.0, 1.0) for _ in range(rng.randint(0, 20))]
        patches = [4 * min(4096, max(64, round(size / 4))) for size in sizes]
        rows.append({"text": 50 + int(rng.lognormvariate(5.5, 1.0)), "images": patches})
    return rows


@pytest.fixture
def file(tmp_path):
    """A function that writes rows to a file."""

    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize(("count", "topology"), [(64, "1x8"), (512, "8x8")])
def test_long_tailed_images_are_balanced_over_all_ranks(count, topology, flexseq, file):
    rows = drawn(count)
    words = f"plan --lengths {file(rows)} --topology {topology} --cost-model qwen3-vl-8b-h100"
    images, total, groups, tower, imbalance = TOWER.search(flexseq(words)).groups()
    assert int(images.replace(",", "")) == sum(len(row["images"]) for row in rows)
    assert float(total) == pytest.approx(float(groups) + float(tower), abs=1.1e-3)
    assert float(imbalance) <= 1.05


def test_a_row_has_the_tokens_of_its_text_and_images_and_the_plan_leaves_room(
    flexseq, refused, file, tmp_path
):
    rows = drawn(24)
    path = tmp_path / "plan.json"
    flexseq(f"plan --lengths {file(rows)} {MACHINE} --json {path}")
    plan = Plan.from_json(path.read_text())
    lengths = [row["text"] + sum(row["images"]) // 4 for row in rows]
    assert plan.lengths == tuple(lengths)
    topology = Topology(nodes=1, ranks_per_node=8)
    sizes = [size for row in rows for size in row["images"]]
    # a rank's graph has an eighth of the patches at least, and it holds an eighth of the features
    features = sum(sizes) / 4 / 8 * COST.tower.token_bytes / COST.token_bytes
    least = features + sum(sizes) / 8 * COST.tower.patch_bytes / COST.token_bytes
    held = next(
        tokens
        for tokens in range(int(least), int(1.1 * least))
        if make_plan(lengths, topology, COST, held_tokens=tokens).digest() == plan.digest()
    )
    assert held
    # a sequence that needs all of the memory leaves none for the graph
    held = COST.max_tokens_per_rank(8) - most_that_fits(refused, file, rows)
    assert features <= held <= 1.1 * features + 1


def most_that_fits(refused, file, rows):
    """Tokens that one of eight ranks can hold beside the images of some rows."""
    longer = file([*rows, {"text": 5_000_000, "images": []}])
    line = refused(f"plan --lengths {longer} {MACHINE}")
    return int(re.search(r"max_tokens_per_rank=(\d+), what the step's images leave", line)[1])


def test_videos_are_divided_between_frames_and_steps_have_their_own_images(flexseq, file):
    image, video = 8192, {"patches": 8192, "frames": 8}
    path = file([{"text": 9, "images": images} for images in ([image], [video], [])])
    said = flexseq(f"plan --lengths {path} --sequences-per-step 1 {MACHINE}")
    first, second, third = [line for line in said.splitlines() if line.startswith("step")]
    seconds = [float(TOWER.search(line)[4]) for line in (first, second)]
    linear = 8192 * COST.tower.patch_s
    pairs = 8192**2 * COST.tower.pair_s
    assert seconds == pytest.approx([linear + pairs, (linear + pairs / 8) / 8], abs=6e-4)
    assert "imbalance 8.000" in first
    assert "1 sequence, 2,057 tokens with 8 images" in second
    assert "imbalance 1.000" in second
    assert "1 sequence, 9 tokens, 1 micro-batch(es)" in third
    assert "tower" not in third


def test_compare_has_the_tower_and_what_it_takes_in_groups(flexseq, file):
    rows = [{"text": 300, "images": [4096] * 10} for _ in range(8)]
    path = file(rows)
    words = f"compare --lengths {path} {MACHINE} --planners auto static --sp-degree 8"
    head, columns, *lines = flexseq(words).splitlines()
    assert "8 sequences, 84,320 tokens with 80 images on 1 x 8 ranks" in head
    assert columns.split()[-4:] == ["tower", "imbalance", "in", "groups"]
    assert columns.split()[:-4] == list(comparing.COLUMNS)
    image_s = 4096 * COST.tower.patch_s + 4096**2 * COST.tower.pair_s
    for line in lines:
        tower, imbalance, _ = map(float, line.split()[-3:])
        assert (tower, imbalance) == (pytest.approx(10 * image_s, abs=1e-3), 1.0)
    # every rank encodes all images: none is in more than one group
    assert float(lines[1].split()[-1]) == pytest.approx(80 * image_s, abs=1e-3)


@pytest.mark.parametrize(("command", "follows"), [("plan", ","), ("compare", " on 1 x 8 ranks")])
def test_rows_come_from_stdin_too(command, follows, flexseq, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"text": 3, "images": [16]}\n'))
    said = flexseq(f"{command} --lengths - {MACHINE}")
    assert f"1 sequence, 7 tokens with 1 image{follows}" in said


def test_what_cannot_be_planned_is_one_line(refused, file, tmp_path):
    good = file([{"text": 3, "images": [1024]}])
    other = f"plan --lengths {good} --topology 1x8 --cost-model llama-3.1-8b-h200"
    said = refused(other)
    assert "the cost model 'llama-3.1-8b-h200' has no vision tower: give --cost-model" in said
    assert "qwen3-vl-8b-h100, qwen3-vl-8b-h200, or what `flexseq calibrate` writes" in said
    assert "holds images: give --cost-model" in refused(f"report {good} --html {tmp_path}/x.html")
    (tmp_path / "torn.gz").write_bytes(b"no archive")
    torn = refused(f"plan --lengths {tmp_path}/torn.gz {MACHINE}")
    assert "torn.gz: is not gzipped text" in torn
    for rows, message in (
        (
            [{"text": 3, "images": [1024]}, {"text": 3}],
            "rows.jsonl: line 2: not a row",
        ),
        ([{"text": 3, "images": [2**31 - 1]}], "its tower may take"),
        ([{"text": 3, "images": [2**31]}], "must be at most 2,147,483,647"),
    ):
        assert message in refused(f"plan --lengths {file(rows)} {MACHINE}")
