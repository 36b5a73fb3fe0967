"""Files that hf_flexseq reads (plans, traces, plans of pipelines, cost models, lengths), mutated:
values become strange or go, bytes flip, files are cut, joined, or replaced by a pickle that would
leave a mark. Each mutation follows from a seed and its index.

A command ends with 0, or with 2 and one line, and within 10 seconds. On 0 no printed or written
number is infinite or NaN, and a written plan passes the check. Nobody's pickle runs.
"""

import copy
import io
import json
import math
import pickle
import random
import re
import time

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.pipeline.planning import PipelineOptions, make_pipeline_plan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from tests.planted import Planted, marks

MOST_S = 10.0
TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
COST = PRESETS["llama-3.1-8b-h200"]
MACHINE = ("--topology", "2x4", "--cost-model", COST.name)
CAP = ("--max-tokens-per-rank", "6000")
LENGTHS = (900, 12_000, 40, 2500, 7, 300, 5000, 64, 128, 1)
STRANGE = (
    *(0, -1, 1, 2, 7, -(2**63), 2**31, 2**63, 10**9, 10**18, 10**30, 10**400),
    *(0.0, -0.5, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "x", "7", "\x1b[31mred\x1b[0m", "\u202eleft", "a\nb", "\ud800"),
    *("y" * 5000, [], {}, [[]], [1], [True], {"a": 1}, ["\x1b]0;title\x07"]),
    json.loads("[" * 150 + "]" * 150),
)
NOT_FINITE = re.compile(r"(?<![\w/.-])-?(nan|inf|infinity)(?![\w/.-])", re.IGNORECASE)


def originals():
    """The lines of each kind of file, as JSON values."""
    options = PlanOptions(max_tokens_per_rank=6000)
    plan = make_plan(LENGTHS, TOPOLOGY, COST, options).to_record()
    measured = [0.25] * len(plan["micro_batches"])
    stages = PipelineCost.of_model(COST, 4)
    pipelined = make_pipeline_plan((900, 5000, 40), stages, PipelineOptions(schedule="seq1f1b"))
    line = {"step": 3, "measured_s": [0.5], "replica": 0, "sequences": [0, 1, 2]}
    return {
        "plan": [plan],
        "trace": [{"step": step, "measured_s": measured, **plan} for step in range(3)],
        "pipeline plan": [{**line, "pipeline_cost": stages.to_record(), **pipelined.to_record()}],
        "cost model": [COST.to_record()],
        "list of lengths": [list(LENGTHS)],
        "lengths": list(LENGTHS),
        "rows": [{"length": length, "input_ids": [1] * (length % 50)} for length in LENGTHS],
    }


def mutated_value(value, rng):
    """A JSON value with something in it changed, gone or added."""
    value = copy.deepcopy(value)
    holder, key = {"": value}, ""
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.9:
        holder = holder[key]
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    act, old = rng.randrange(4), holder[key]
    if act == 0 and key != "":
        del holder[key]
    elif act == 1 and isinstance(holder, list):
        holder.insert(key, old)
    elif act == 1 and key != "":
        holder["extra"] = old
    elif act == 2 and type(old) in (int, float):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 10**9, old / 2))
    else:
        holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return holder[""] if key == "" else value


def mutated_bytes(data, rng, folder):
    """The bytes of a file after an accident or an attack."""
    at = rng.randrange(len(data) + 1)
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            bytes(flipped),
            data[:at],
            data + data[at:],
            data[:at] + rng.choice((b"\x00", b"\xff\xfe", b"\x1b[2J", b"[" * 100_000)) + data[at:],
            pickle.dumps(Planted(folder)),
            rng.choice((b"", b"\n", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000)),
            re.sub(rb"\d+", lambda found: found[0] * rng.choice((1, 1, 1, 2, 900)), data),
            data.replace(b"{", rng.choice((b'{"version": 2, ', b'{"lengths": [1], ', b"{{")), 1),
        )
    )


def command(kind, path, folder, rng):
    """A command that reads the file, and what it may write."""
    written = folder / "written.json"
    written.unlink(missing_ok=True)
    write = rng.choice(([], ["--json", str(written)]))
    if kind == "cost model":
        (folder / "good.json").write_text(json.dumps(LENGTHS))
        words = ["--lengths", str(folder / "good.json"), *MACHINE[:3], path]
        return ["plan", *words, *rng.choice(((), CAP)), *write], written
    if kind in ("plan", "trace", "pipeline plan"):
        more = rng.choice(([], [*MACHINE, "--step", "1"], ["--chrome", str(written)]))
        return ["view", path, *more], written
    planner = rng.choice(("auto", "zeppelin", "megatron"))
    return ["plan", "--lengths", path, *MACHINE, *CAP, "--planner", planner, *write], written


def ended(argv, capsys):
    """The exit status of a command that keeps its promise."""
    began = time.perf_counter()
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code
    assert time.perf_counter() - began < MOST_S
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert status in (0, 2)
    reasons = re.fullmatch(r"(\d+) reasons to refuse this:", lines[0]) if lines else None
    assert len(lines) == (1 + int(reasons[1]) if reasons else 1) or (status == 0 and not lines)
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    if status == 0:
        assert all(line.isprintable() for line in said.out.split("\n"))
        assert not NOT_FINITE.search(said.out)
        assert "predicted -" not in said.out
        assert "measured -" not in said.out
    return status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"),
    [(13, 240), pytest.param(0, 4000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_mutated_inputs_end_with_a_result_or_one_line(tmp_path, monkeypatch, capsys, seed, count):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    path = tmp_path / "input.json"
    files = originals()
    seen = set()
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        kind = list(files)[index % len(files)]
        lines = list(files[kind])
        by_value = rng.random() < 0.6
        if by_value:
            at = rng.randrange(len(lines))
            lines[at] = mutated_value(lines[at], rng)
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path.write_bytes(data if by_value else mutated_bytes(data, rng, tmp_path))
        argv, written = command(kind, str(path), tmp_path, rng)
        status = ended(argv, capsys)
        seen.add((kind, status))
        for line in written.read_text().splitlines() if written.exists() else ():
            assert not NOT_FINITE.search(line)
            if argv[0] == "plan" and status == 0:
                check(Plan.from_json(line), TOPOLOGY)
    assert not marks(tmp_path)
    # of a trace with a broken line the other lines are shown
    assert {(kind, 2) for kind in files if kind != "trace"} <= seen
    assert sum(status == 0 for _, status in seen) > 5
