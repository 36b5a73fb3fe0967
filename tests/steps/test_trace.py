"""A step's end: what it does in which order, who refuses a trace, and the file of the trace, whose
lines are whole or absent and which never ends a training."""

import json
import logging
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_flexseq import FlexSeqArguments
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.hf.engine.finished_steps import FinishedSteps
from hf_flexseq.plan.images import place_images
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.steps import trace as tracing
from hf_flexseq.steps.trace import PlanTrace, logged_figures, plan_line
from hf_flexseq.steps.trace_file import TraceFile
from tests.plans import group, plan_of_groups
from tests.ranks import join, run_threads


def step_of(measured_s, share=0.0):
    return SimpleNamespace(
        number=3,
        plan=None,
        measured_s=measured_s,
        peak_share=lambda cost, world_size: share,
    )


def test_ranks_meet_before_they_wait_for_devices(monkeypatch):
    """A device whose peer is lost never ends its work, and only the host can say who is lost."""
    done = []

    def noting(what, result):
        return lambda *given: done.append(what) or result

    cpu_group = SimpleNamespace(
        barrier=noting("meet", None),
        gather_values=lambda own: noting(
            *(("reports", [None]) if own is None else ("figures", [own]))
        )(),
    )
    communicator = SimpleNamespace(rank=1, world_size=2, cpu_group=cpu_group)
    monkeypatch.setattr(tracing, "step_figures", noting("of all", {}))
    finished = FinishedSteps(
        SimpleNamespace(optimizer_step_was_skipped=False),
        communicator,
        FlexSeqArguments(),
        figures_of=lambda step, trace: trace.record(step, None),
        on_figures=None,
    )
    report = noting("wait for flags", None)
    monkeypatch.setattr(finished._watch, "report", report)
    step = step_of(noting("wait for the step", [0.5]))
    step.stopwatch = SimpleNamespace(is_behind=True)
    flags, figures = ["wait for flags", "reports"], ["wait for the step", "figures", "of all"]
    for act, wanted in (
        (lambda: finished.add(step), flags),  # of the step before, after which ranks have met
        (lambda: finished.add(step), flags + figures),
        (finished.check, ["meet", *flags, *figures]),
    ):
        done.clear()
        act()
        assert done == wanted


def opened(rank, world_size, paths):
    with pytest.raises(ValueError) as raised:
        PlanTrace(paths[rank], join())
    return str(raised.value)


def test_a_folder_that_is_not_there_on_rank_0_is_an_error_on_all_ranks(tmp_path):
    missing = str(tmp_path / "not-there" / "trace.jsonl")
    messages = run_threads(opened, 3, [missing] * 3)
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        f"rank 0, opening the plan trace: plan_trace='{missing}': directory"
    )


def test_all_ranks_have_the_seconds_of_the_slowest(monkeypatch):
    monkeypatch.setattr(tracing, "step_figures", lambda step, slowest: slowest)

    def measured(rank, world_size):
        return PlanTrace(None, join()).record(step_of(lambda: [1.0 + rank, 0.5 * rank]), None)

    assert run_threads(measured, 3) == [4.0] * 3


# ---- images


def traced(rank, world_size, path):
    """Record a step with three images and one without, on one rank."""
    trace = PlanTrace(str(path), join())
    plan = plan_of_groups((3,), [group(0, 1, 0)], objective_s=2.0)
    of_images = replace(place_images([5, 3, 4], 2), keeps_graph=False)
    for images in (SimpleNamespace(plan=of_images), None):
        step = step_of(lambda: [0.5])
        step.__dict__.update(plan=plan, images=images, waited_s=0.0, passes=1, tokens=3)
        trace.record(step, PRESETS["qwen3-vl-8b-h100"])


def test_a_line_has_the_load_of_the_tower_where_there_are_images(tmp_path):
    run_threads(traced, 1, tmp_path / "trace.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "trace.jsonl").open())
    assert first["tower"] == {
        "images": 3,
        "seconds": 7e-9,
        "imbalance": 14 / 12,
        "forwards": 2,
    }
    assert "tower" not in second


# ---- memory


def test_a_line_has_the_highest_peak_of_all_ranks_where_one_says_something(tmp_path):
    plan = plan_of_groups((3,), [group(0, 1, 0)], objective_s=2.0)
    shares = {0: [1.1, 0.0], 1: [1.3, 0.0]}

    def record(rank, world_size):
        trace = PlanTrace(str(tmp_path / "trace.jsonl"), join())
        for share in shares[rank]:
            step = step_of(lambda: [0.5], share)
            step.__dict__.update(plan=plan, images=None, waited_s=0.0, passes=1, tokens=3)
            trace.record(step, PRESETS["qwen3-vl-8b-h100"])

    run_threads(record, 2)
    first, second = (json.loads(line) for line in (tmp_path / "trace.jsonl").open())
    assert first["peak_share"] == 1.3
    assert "peak_share" not in second


def test_a_step_names_its_choices_in_the_log_and_in_the_trace(tmp_path):
    chosen = MemoryChoice(recomputed_layers=3, inputs_on_host=2)
    plan = plan_of_groups((3, 4, 5), *[[group(0, 1, index)] for index in range(3)])
    first, *others = plan.micro_batches
    others = [replace(one, memory=chosen) for one in others]
    plan = replace(plan, micro_batches=(first, *others), objective_s=2.0)
    step = step_of(lambda: [0.5] * 3)
    step.__dict__.update(plan=plan, images=None, waited_s=0.0, passes=1, tokens=12)

    def record(rank, world_size):
        trace = PlanTrace(str(tmp_path / "trace.jsonl"), join())
        return trace.record(step, PRESETS["qwen3-vl-8b-h100"])

    (figures,) = run_threads(record, 1)
    assert plan_line(figures) == (
        "3 x degree 1 in 3 micro-batch(es), predicted 2.000 s, measured 1.500 s, 8 tokens/s; "
        "2 micro-batch(es) with 3 layers recomputed, inputs of 2 on the host"
    )
    assert set(logged_figures([figures])) == {
        "flexseq/micro_batches",
        "flexseq/measured_s",
        "flexseq/tokens_per_s",
    }
    line = json.loads((tmp_path / "trace.jsonl").read_text())
    in_trace = [one.get("memory") for one in line["micro_batches"]]
    assert in_trace == [None, chosen.to_record(), chosen.to_record()]


# ---- the file

LINE = {"lengths": [3, 2], "measured_s": [0.5]}


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_of(path, steps, lines=(LINE,)):
    file = TraceFile(str(path))
    for step in steps:
        file.append(step, lines)
    return file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


# ---- what is refused before training


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{here}", "is a folder; give the path of a file"),
        ("{here}/not/there/trace.jsonl", "directory '{here}/not/there' does not exist; make it"),
        ("{here}/notes.txt/trace.jsonl", "does not exist"),
        ("{here}/notes.txt", "is not a plan trace; give the path of a new file"),
    ],
)
def test_a_path_that_cannot_work_is_refused_and_nothing_is_touched(tmp_path, path, message):
    (tmp_path / "notes.txt").write_text("not ours")
    with pytest.raises(ValueError, match=message.format(here=tmp_path)) as raised:
        TraceFile(path.format(here=tmp_path))
    assert str(raised.value).startswith("plan_trace='")
    assert "\n" not in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "not ours"


# ---- faults while training


def test_a_full_disk_warns_once_and_steps_are_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        run_of("/dev/full", range(3))
    (message,) = caplog.messages
    assert message.startswith(
        "plan_trace='/dev/full' cannot be written (No space left on device): training goes on"
    )


def test_a_vanished_folder_warns_once_and_the_trace_goes_on_when_it_is_back(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "trace.jsonl"
    file = run_of(path, [0])
    shutil.rmtree(folder)
    for step in (1, 2):
        file.append(step, [LINE])
    folder.mkdir()
    file.append(3, [LINE])
    assert [line["step"] for line in written(path)] == [3]
    assert len(caplog.records) == 1
    assert "No such file or directory" in caplog.text


def test_of_a_write_that_was_cut_short_nothing_stays(path, monkeypatch, caplog):
    file = run_of(path, [0])
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    file.append(1, [LINE])
    assert path.read_bytes() == before
    assert "only 7 of" in caplog.text
    monkeypatch.undo()
    file.append(1, [LINE])
    assert written(path) == [{"step": step, **LINE} for step in (0, 1)]


# ---- a run that goes on


@pytest.mark.parametrize(
    "before, torn",
    [
        (2, '{"step": 2, "lengths": [3,'),
        (2, '{"step": 2, "lengths": [3, 2]}'),  # the newline is missing
        (2, "\0\0\0\0"),
        (2, '{"st'),
        (0, '{"st'),
    ],
)
def test_a_torn_last_line_is_cut_off(path, caplog, before, torn):
    run_of(path, range(before))
    with path.open("a") as file:
        file.write(torn)
    run_of(path, [2, 3])
    assert written(path) == [{"step": step, **LINE} for step in (*range(before), 2, 3)]
    assert f"cut a torn last line of {len(torn)} bytes off" in caplog.text


def test_a_run_adds_to_a_file_of_whole_lines_whatever_they_say(path, caplog):
    """Whoever reads a trace skips broken lines, and takes the last run of a step."""
    run_of(path, range(4))
    with path.open("a") as file:
        file.write('{"step": 4, "leng\n')
    before = path.read_bytes()
    file = run_of(path, range(2, 6), lines=({"replica": 0}, {"replica": 1}))
    file.append(2, [LINE])  # the same trainer, trained again
    assert path.read_bytes().startswith(before)
    added = path.read_bytes().removeprefix(before).splitlines()
    assert [json.loads(line)["step"] for line in added] == [2, 2, 3, 3, 4, 4, 5, 5, 2]
    assert not caplog.records
