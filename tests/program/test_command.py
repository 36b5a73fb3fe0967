"""`python -m hf_flexseq.program`: prints the programs that a rank would run, or refuses."""

import io
import json
import sys
from pathlib import Path

import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.stages import PipelineCost, StageCost
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.planner.pipeline import make_pipeline_plan
from hf_flexseq.program.__main__ import main
from hf_flexseq.program.compile import (
    HALO,
    HALO_RETURN,
    SUMMARIES_AFTER,
    SUMMARIES_BEFORE,
    Machine,
    MicroBatchLayout,
    backward,
    forward,
    of_rows,
)
from hf_flexseq.program.instructions import LayerShape, RowShape
from tests.cli.refused import failed

LLAMA = LayerShape(query_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
FOUR = Topology(nodes=1, ranks_per_node=4)
LENGTHS = (16_000, 40, 900)
MICRO_BATCHES = (
    MicroBatch(groups=(Group(ranks=(0, 1, 2, 3), sequences=(0,), strategy="zigzag"),)),
    MicroBatch(
        groups=(
            Group(ranks=(0, 1), sequences=(2,), strategy="ulysses"),
            Group(ranks=(2,), sequences=(1,), strategy="local"),
        )
    ),
)


def plan_of(micro_batches: tuple[MicroBatch, ...] = MICRO_BATCHES) -> Plan:
    return Plan(
        micro_batches=micro_batches,
        lengths=LENGTHS,
        objective_s=0.1,
        lower_bound_s=0.1,
        planner="static",
        planning_s=0.0,
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(plan_of().to_json())
    return str(path)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command prints that refuses."""
    return failed(argv, capsys, main, name="python -m hf_flexseq.program: ")


def shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that does as it is told."""
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def compiled(
    micro_batch: int,
    rank: int,
    *,
    topology: Topology = FOUR,
    shape: LayerShape = LLAMA,
    device: str = "cuda",
) -> list[str]:
    """The text of the programs that a rank runs, forward and backward."""
    machine = Machine(topology=topology, device=device, wide_gradients=device == "cpu")
    shard = make_shard(MICRO_BATCHES[micro_batch], LENGTHS, rank)
    parts = MicroBatchLayout(shard, machine).parts
    there = forward(parts, shape)
    return [str(there), str(backward(parts, shape, there.saved))]


def without_titles(text: str) -> str:
    lines = text.splitlines()
    kept = [line for line in lines if not line.startswith(("forward of", "backward of"))]
    return "\n".join(kept)


@pytest.mark.parametrize("micro_batch, rank", [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2)])
def test_what_a_rank_would_run_is_printed(
    micro_batch: int, rank: int, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [file, "--micro-batch", str(micro_batch), "--rank", str(rank)]
    out = shown(words, capsys)
    assert without_titles(out) == "\n".join(compiled(micro_batch, rank))


def test_a_title_counts_what_follows_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([file, "--rank", "1"], capsys).splitlines()
    (title,) = [line for line in lines if line.startswith("forward of rank 1: ")]
    program = lines[1 : lines.index(next(line for line in lines if line.startswith("outputs")))]
    operations = [line.split()[1] for line in program[1:]]
    assert f": {len(operations)} instructions, " in title
    assert f", {operations.count('attend')} attention calls, " in title
    assert f", {operations.count('post')} posts, " in title
    messages = sum(line.count(" rank ") for line in program)
    assert title.endswith(f", {messages} messages")


def test_the_page_that_explains_a_program_shows_this_one(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (excerpt,) = [part for part in PAGE.read_text().split("```") if "\nforward of rank 1" in part]
    first, last = excerpt.removeprefix("text\n").split("...\n")
    out = shown([file, "--rank", "1"], capsys)
    assert out.startswith(first)
    assert f"\n{last}backward of rank 1" in out


def test_layer_dtype_device_and_topology_are_those_asked_for(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = LayerShape(query_heads=6, kv_heads=2, head_dim=8, dtype="float64")
    words = ["--layer", "6x2x8", "--dtype", "float64", "--device", "cpu"]
    out = shown([file, *words], capsys)
    assert without_titles(out) == "\n".join(compiled(0, 0, shape=small, device="cpu"))
    assert without_titles(out) != "\n".join(compiled(0, 0))
    # messages to other nodes take a lane of their own
    one, two = (
        shown([file, "--rank", "1", "--topology", machine], capsys).splitlines()
        for machine in ("1x4", "2x2")
    )
    assert one[0] != two[0]
    assert without_titles("\n".join(one)) == without_titles("\n".join(two))


@pytest.mark.parametrize(
    ("written", "reach"),
    [("full", FULL), ("window:512", Reach(window=512)), ("chunk:2048", Reach(chunk=2048))],
)
def test_the_reach_of_the_layer_is_the_one_asked_for(
    file: str, capsys: pytest.CaptureFixture[str], written: str, reach: Reach
) -> None:
    out = shown([file, "--reach", written], capsys)
    assert without_titles(out) == "\n".join(compiled(0, 0, shape=LLAMA._replace(reach=reach)))


@pytest.mark.parametrize("written", ["window", "window:0", "wide", "chunk:-1", "window:1.5"])
def test_what_is_no_reach_is_refused(
    file: str, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    said = refused([file, "--reach", written], capsys)
    assert "expected full, window:N or chunk:N" in said


def test_a_rank_without_a_group_is_told_so(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([file, "--micro-batch", "1", "--rank", "3"], capsys)
    assert out == "rank 3 works in no group of micro-batch 1\n"


def test_a_trace_is_read_by_step_and_its_broken_lines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = MicroBatch(groups=(Group(ranks=(0,), sequences=(0, 1, 2), strategy="local"),))
    records = [plan_of().to_record(), plan_of((alone,)).to_record()]
    lines = [json.dumps({"step": 5 + n, **record}) for n, record in enumerate(records)]
    text = "\n".join([lines[0], "torn", lines[1]])
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main([str(path), "--step", "1"]) == 0
    said = capsys.readouterr()
    assert "forward of rank 0: 1 instructions, 1 attention calls" in said.out
    assert "line 2 cannot be read, 2 can" in said.err
    assert "expected --step below 2, got 2" in refused([str(path), "--step", "2"], capsys)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["-", "--step", "1"]) == 0
    assert capsys.readouterr().out == said.out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rank", "4"], "expected --rank below 4, got 4"),
        (["--rank", "-1"], "expected a number from 0 to 2147483647, got -1"),
        (["--rank", "9" * 6000], "expected a whole number, got"),
        (["--micro-batch", "2"], "expected --micro-batch below 2, got 2"),
        (["--step", "1"], "expected --step below 1, got 1"),
        (["--topology", "1x2"], "1 x 2"),
        (["--layer", "8"], "expected QUERYxKVxSIZE"),
        (["--layer", "8x0x8"], "expected QUERYxKVxSIZE"),
        (["--layer", "6x4x8"], "a multiple of KV heads, got '6x4x8'"),
        (["--layer", "999999x1x999999"], "numbers a token"),
        (["--layer", "\x1b[31m"], "expected QUERYxKVxSIZE"),
        (["--dtype", "int8"], "invalid choice"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_what_a_plan_has_not_is_refused_in_one_line(
    words: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([file, *words], capsys)


def test_a_plan_of_a_pipeline_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = StageCost(linear_ns=1000.0, attention_ns=0.7, chunk_ns=0.0, token_bytes=30.0)
    path = tmp_path / "plan.json"
    path.write_text(make_pipeline_plan([900, 300], PipelineCost.even(2, stage)).to_json())
    assert "got a pipeline's at step 0" in refused([str(path)], capsys)


@pytest.mark.parametrize("text", ["", "{}", "[" * 5000, '{"lengths": [1]}'])
def test_what_is_no_plan_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert "bad.json" in refused([str(path)], capsys)


def test_ranks_and_work_have_limits_that_can_be_raised(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ranks", "work"):
        limit = ["--limit", f"{name}=3"]
        said = refused([file, *limit], capsys)
        assert f"raise it with --limit {name}=" in said
        shown([file, *limit, "--limit", f"{name}=99999"], capsys)
    # a plan of many sequences on many ranks, which would take minutes
    group = Group(ranks=tuple(range(4096)), sequences=tuple(range(4000)), strategy="zigzag")
    record = plan_of((MicroBatch(groups=(group,)),)).to_record() | {"lengths": [9000] * 4000}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(record))
    assert "events of rank 0" in refused([str(path)], capsys)


@pytest.mark.parametrize(
    ("written", "whats", "rows"),
    [
        ("convolution:48x4", (HALO, HALO_RETURN), RowShape(48, "bfloat16", 4)),
        ("scan:2x4x6", (SUMMARIES_BEFORE, SUMMARIES_AFTER), RowShape(80, "float32")),
    ],
)
def test_what_a_recurrent_layer_exchanges_is_printed(
    file: str,
    capsys: pytest.CaptureFixture[str],
    written: str,
    whats: tuple[str, ...],
    rows: RowShape,
) -> None:
    out = shown([file, "--rank", "1", "--recurrent", written], capsys)
    machine = Machine(topology=FOUR, device="cuda", wide_gradients=False)
    parts = MicroBatchLayout(make_shard(MICRO_BATCHES[0], LENGTHS, 1), machine).parts
    lines = [line for line in out.splitlines() if " of rank 1: " not in line]
    assert "\n".join(lines) == "\n".join(str(of_rows(parts, what, rows)) for what in whats)
    assert " post " in out


@pytest.mark.parametrize(
    "written", ["scan:2x4", "convolution:8", "mamba", "convolution:8x1", "convolution:8x65"]
)
def test_what_is_no_recurrent_layer_is_refused(
    file: str, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    said = refused([file, "--recurrent", written], capsys)
    assert written in said
