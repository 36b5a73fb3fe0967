"""`python -m hf_flexseq.program`: prints the programs that a rank would run, or refuses."""

import io
import json
import sys
from pathlib import Path

import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.pipeline.planning import make_pipeline_plan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.program.__main__ import main
from hf_flexseq.program.instructions import LayerShape, RowShape
from tests.cli.refusal_output import failed
from tests.plans import group, plan_of_groups
from tests.program.rank_programs import OF_ATTENTION, OF_ROWS, programs_of

LLAMA = LayerShape(query_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
SMALL = LayerShape(query_heads=6, kv_heads=2, head_dim=8, dtype="float64")
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
FOUR = Topology(nodes=1, ranks_per_node=4)
LENGTHS = (16_000, 40, 900)
PLAN = plan_of_groups(
    LENGTHS, [group(0, 4, 0, strategy="zigzag")], [group(0, 2, 2), group(2, 3, 1)]
)
ALONE = plan_of_groups(LENGTHS, [group(0, 1, 0, 1, 2)])


class Command:
    """The command on a file."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capsys = capsys
        self.write(PLAN.to_json())

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def shown(self, *words: object, file: object = None) -> str:
        """What it prints when it does as it is told."""
        self.capsys.readouterr()
        assert main([str(file or self.path), *map(str, words)]) == 0
        return self.capsys.readouterr().out

    def refused(self, *words: object) -> str:
        """The one line that it prints when it refuses."""
        argv = [str(self.path), *map(str, words)]
        return failed(argv, self.capsys, main, name="python -m hf_flexseq.program: ")


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "plan.json", capsys)


def without_titles(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if " of rank " not in line)


THERE_AND_BACK = OF_ATTENTION[:2]
OF_SMALL = ("--layer", "6x2x8", "--dtype", "float64", "--device", "cpu")
REACHES = {"window:512": Reach(window=512), "chunk:2048": Reach(chunk=2048), "full": FULL}
RECURRENT = {
    "convolution:48x4": (RowShape(48, "bfloat16", 4), OF_ROWS[:2]),
    "scan:2x4x6": (RowShape(80, "float32"), OF_ROWS[2:]),
}


@pytest.mark.parametrize(
    ("micro_batch", "rank", "words", "device", "shape", "whats"),
    [
        *((n, rank, (), "cuda", LLAMA, THERE_AND_BACK) for n, rank in ((0, 0), (0, 3), (1, 2))),
        (0, 0, OF_SMALL, "cpu", SMALL, THERE_AND_BACK),
        *(
            (0, 1, ("--reach", word), "cuda", LLAMA._replace(reach=reach), THERE_AND_BACK)
            for word, reach in REACHES.items()
        ),
        *((0, 1, ("--recurrent", word), "cuda", *of_rows) for word, of_rows in RECURRENT.items()),
    ],
)
def test_what_a_rank_would_run_is_printed(
    command: Command, micro_batch, rank, words, device, shape, whats
) -> None:
    found = command.shown("--micro-batch", micro_batch, "--rank", rank, *words)
    programs = programs_of(
        PLAN.micro_batches[micro_batch],
        LENGTHS,
        FOUR,
        shape,
        device=device,
        ranks=[rank],
        whats=whats,
    )
    texts = [str(programs[what][rank]) for what in whats]
    assert without_titles(found) == "\n".join(texts)


def test_the_page_that_explains_a_program_shows_this_one(command: Command) -> None:
    (excerpt,) = [part for part in PAGE.read_text().split("```") if "\nforward of rank 1" in part]
    first, last = excerpt.removeprefix("text\n").split("...\n")
    out = command.shown("--rank", 1)
    assert out.startswith(first)
    assert f"\n{last}backward of rank 1" in out


def test_a_trace_is_read_by_step_and_its_broken_lines_are_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [{"step": 5 + n, **plan.to_record()} for n, plan in enumerate((PLAN, ALONE))]
    lines = [json.dumps(step) for step in steps]
    text = "\n".join([lines[0], "torn", lines[1]])
    command.write(text)
    assert main([str(command.path), "--step", "1"]) == 0
    said = command.capsys.readouterr()
    assert "forward of rank 0: 1 instructions, 1 attention calls" in said.out
    assert "line 2 cannot be read, 2 can" in said.err
    assert "expected --step below 2, got 2" in command.refused("--step", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert command.shown("--step", 1, file="-") == said.out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rank 4", "expected --rank below 4, got 4"),
        ("--rank -1", "expected a number from 0 to 2147483647, got -1"),
        (f"--rank {'9' * 6000}", "expected a whole number, got"),
        ("--micro-batch 2", "expected --micro-batch below 2, got 2"),
        ("--step 1", "expected --step below 1, got 1"),
        ("--topology 1x2", "1 x 2"),
        ("--layer 8", "expected QUERYxKVxSIZE"),
        ("--layer 8x0x8", "expected QUERYxKVxSIZE"),
        ("--layer 6x4x8", "a multiple of KV heads, got '6x4x8'"),
        ("--layer 999999x1x999999", "numbers a token"),
        ("--layer \x1b[31m", "expected QUERYxKVxSIZE"),
        ("--dtype int8", "invalid choice"),
        ("--device tpu", "invalid choice"),
        *(
            (f"--reach {written}", "expected full, window:N or chunk:N")
            for written in ("window", "window:0", "wide", "chunk:-1", "window:1.5")
        ),
        *(
            (f"--recurrent {written}", f"got '{written}'")
            for written in ("scan:2x4", "convolution:8", "mamba", "convolution:8x1")
        ),
        ("--recurrent convolution:8x65", "a convolution of 2 to 64 rows, got"),
        ("--recurrent scan:999999x999x999", "numbers a summary, got"),
        ("--limit ranks=3", "raise it with --limit ranks="),
        ("--limit work=3", "raise it with --limit work="),
    ],
)
def test_what_a_plan_has_not_is_refused_in_one_line(
    words: str, message: str, command: Command
) -> None:
    assert message in command.refused(*words.split())


def test_a_plan_of_a_pipeline_is_refused_by_name(command: Command) -> None:
    stage = StageCost(linear_ns=1000.0, attention_ns=0.7, chunk_ns=0.0, token_bytes=30.0)
    command.write(make_pipeline_plan([900, 300], PipelineCost.even(2, stage)).to_json())
    assert "got a pipeline's at step 0" in command.refused()


@pytest.mark.parametrize("text", ["", "{}", "[" * 5000, '{"lengths": [1]}'])
def test_what_is_no_plan_is_refused(text: str, command: Command) -> None:
    command.write(text)
    assert "plan.json" in command.refused()


def test_limits_can_be_raised_and_a_plan_that_would_take_minutes_is_refused(
    command: Command,
) -> None:
    command.shown("--limit", "ranks=99999", "--limit", "work=99999")
    large = plan_of_groups([9000] * 4000, [group(0, 4096, *range(4000), strategy="zigzag")])
    command.write(large.to_json())
    assert "events of rank 0" in command.refused()
