"""What a run says on the screen: lines are whole, and a wrong prediction is explained once."""

import io
import logging
import os

import pytest
from tqdm import tqdm

from hf_flexseq.steps import screen
from hf_flexseq.steps.screen import Predictions, beside_bars
from tests.hf.test_checks import make_trainer
from tests.hf.tiny import documents


def shown(text):
    """The lines that a terminal shows of what was written to it."""
    lines = []
    for row in text.split("\n"):
        cells = []
        for part in row.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def terminal_in_place_of_stderr(monkeypatch):
    """Called by a test itself: between its fixtures and the test pytest sets stderr again."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_a_line_and_a_bar_do_not_tear_each_other(monkeypatch):
    terminal = terminal_in_place_of_stderr(monkeypatch)
    with tqdm(total=3, ncols=60, mininterval=0) as bar:
        for step in range(3):
            bar.update()
            with beside_bars():
                terminal.write(f"step {step}\n")
    lines = shown(terminal.getvalue())
    assert lines[:3] == ["step 0", "step 1", "step 2"]
    assert lines[3].startswith("100%")


@pytest.mark.processes
def test_the_lines_of_steps_do_not_tear_the_bar_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = terminal_in_place_of_stderr(monkeypatch)
    logger = logging.getLogger("hf_flexseq")
    handler = logging.StreamHandler(terminal)
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        make_trainer(
            tmp_path,
            data=documents([5] * 12),
            cost_model="estimate",
            max_steps=4,
            per_device_train_batch_size=1,
            disable_tqdm=False,
            logging_steps=10,
        ).train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
    written = terminal.getvalue()
    assert "4/4" in written, "there is a bar"
    lines = shown(written)
    steps = [line for line in lines if "micro-batch(es), predicted" in line]
    assert len(steps) == 4
    assert all(line.startswith("step ") and "it/s" not in line for line in steps)
    notes = [line for line in lines if "degree 1 for every sequence" in line]
    assert len(notes) == 1
    assert notes[0].startswith("degree 1")


# ---- predictions


def figures(predicted, measured):
    return {"predicted_s": predicted, "measured_s": measured}


def verdict(measured, cost_model="estimate", first=1.0):
    predictions = Predictions(cost_model)
    predictions.add(figures(1.0, first))
    for _ in range(3):
        predictions.add(figures(1.0, measured))
    return predictions.verdict()


@pytest.fixture
def load(monkeypatch):
    def set_to(load):
        monkeypatch.setattr(screen.os, "getloadavg", lambda: (load, 0.0, 0.0))

    set_to(0.0)
    return set_to


def test_a_prediction_that_is_far_off_is_explained(load):
    assert verdict(1.9) is None
    assert verdict(0.6) is None
    assert verdict(1.0, first=50.0) is None, "the first step warms up"
    line = verdict(3.0)
    assert line.startswith("a step takes 3 s, 3 times the predicted 1 s (the first step")
    assert line.endswith(
        "cost_model='estimate' is arithmetic, cost_model='auto' measures this machine"
    )
    assert "\n" not in line
    assert "0.2 times the predicted 1 s" in verdict(0.2)
    assert "was measured at another load" in verdict(3.0, "auto")
    assert "describes other devices" in verdict(3.0, "flexsp-gpt-7b-a100")
    assert "'x.json' may describe another machine" in verdict(3.0, "x.json")


def test_a_busy_machine_is_named_where_it_can_be_the_reason(load):
    cores = os.cpu_count()
    load(3.0 * cores)
    busy = f"this machine is busy, load {3.0 * cores:.1f} on {cores} cores"
    assert busy in verdict(3.0)
    assert "busy" not in verdict(0.2)


def test_it_is_said_once_and_not_of_few_steps(load):
    predictions = Predictions("estimate")
    for _ in range(3):
        predictions.add(figures(1.0, 9.0))
        assert predictions.verdict() is None
    predictions.add(figures(1.0, 9.0))
    assert predictions.verdict() is not None
    for _ in range(4):
        predictions.add(figures(1.0, 9.0))
    assert predictions.verdict() is None


@pytest.mark.processes
def test_a_run_says_it_beside_its_metrics(tmp_path, load, caplog):
    make_trainer(
        tmp_path,
        data=documents([5] * 12),
        cost_model="flexsp-gpt-7b-a100",
        max_tokens_per_rank=100,
        max_steps=8,
        per_device_train_batch_size=1,
        logging_steps=1,
    ).train()
    said = [record for record in caplog.records if "the predicted" in record.getMessage()]
    assert len(said) == 1
    assert "'flexsp-gpt-7b-a100' describes other devices" in said[0].getMessage()
