"""What a run says on the screen: lines are whole, and a wrong prediction is explained once."""

import io
import logging

import pytest

from hf_flexseq.steps import console
from hf_flexseq.steps.console import Predictions
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


def train(folder, **options):
    data = documents([5] * 12)
    options = {"per_device_train_batch_size": 1, "lookahead": 0, **options}
    make_trainer(folder, data=data, **options).train()


@pytest.mark.slow
def test_the_lines_of_steps_do_not_tear_the_bar_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = terminal_in_place_of_stderr(monkeypatch)
    logger = logging.getLogger("hf_flexseq")
    handler = logging.StreamHandler(terminal)
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        options = {"disable_tqdm": False, "logging_steps": 10, "max_steps": 4}
        train(tmp_path, cost_model="estimate", **options)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
    written = terminal.getvalue()
    assert "4/4" in written, "there is a bar"
    lines = shown(written)
    steps = [line for line in lines if "micro-batch(es), predicted" in line]
    assert len(steps) == 4
    assert all(line.startswith("step ") and "it/s" not in line for line in steps)
    (note,) = [line for line in lines if "degree 1 for every sequence" in line]
    assert note.startswith("degree 1")


# ---- predictions


def add(predictions, *measured):
    for seconds in measured:
        predictions.add({"predicted_s": 1.0, "measured_s": seconds})


def verdict(measured, cost_model="estimate", first=1.0):
    predictions = Predictions(cost_model)
    add(predictions, first, *[measured] * 3)
    return predictions.verdict()


@pytest.fixture
def load(monkeypatch):
    def set_to(load):
        monkeypatch.setattr(console.os, "getloadavg", lambda: (load, 0.0, 0.0))

    set_to(0.0)
    return set_to


def test_a_prediction_that_is_far_off_is_explained(load):
    assert verdict(1.9) is None
    assert verdict(0.6) is None
    assert verdict(1.0, first=50.0) is None, "the first step warms up"
    line = verdict(3.0)
    assert line.startswith("a step takes 3 s, 3 times the predicted 1 s (the first step")
    assert line.endswith("'estimate' is arithmetic, cost_model='auto' corrects it by the steps")
    assert "\n" not in line
    assert "0.2 times the predicted 1 s" in verdict(0.2)
    assert "ran at another load of this machine" in verdict(3.0, "auto")
    assert "describes other devices" in verdict(3.0, "flexsp-gpt-7b-a100")
    assert "'x.json' may describe another machine" in verdict(3.0, "x.json")


@pytest.mark.slow
def test_a_run_says_it_beside_its_metrics(tmp_path, load, caplog):
    options = {"max_tokens_per_rank": 100, "max_steps": 8, "logging_steps": 1}
    train(tmp_path, cost_model="flexsp-gpt-7b-a100", **options)
    (said,) = [line for line in caplog.messages if "the predicted" in line]
    assert "'flexsp-gpt-7b-a100' describes other devices" in said
