"""The next step is dispatched while this one runs, and figures are read a step later where the
device works behind the host. Neither shows: in the log, in the plan trace, or in errors
(`test_nonfinite.py`)."""

import json

import pytest
from transformers import TrainerCallback

from hf_flexseq.steps import rank_step as steps
from hf_flexseq.steps.stopwatch import Stopwatch
from tests.hf.plain import dataset, flexseq_trainer

# ---- a device that works behind the host


class Behind(Stopwatch):
    """The stopwatch of such a device. `events` tells which steps ran and were read, in order."""

    __slots__ = ()

    is_behind = True
    events: list[tuple[str, int]] = []  # noqa: RUF012 (of one test at a time)

    def seconds(self):
        Behind.events.append("read")
        return super().seconds()


@pytest.fixture
def behind(monkeypatch):
    """Make every step one of a device that works behind the host; return its events."""
    events = []
    monkeypatch.setattr(Behind, "events", events)
    monkeypatch.setattr(steps, "Stopwatch", Behind)
    return events


class TracedWhenSaved(TrainerCallback):
    """Counts the lines of the plan trace at every save."""

    def __init__(self, trace):
        self.trace, self.found = trace, []

    def on_save(self, args, state, control, **kwargs):
        self.found.append((state.global_step, len(self.trace.read_text().splitlines())))


def train(folder, logging_steps, events=None):
    """The log without its seconds, the numbers of the traced steps, and how many of them are
    there when a checkpoint is saved."""
    trace = folder / "plans.jsonl"
    saves = TracedWhenSaved(trace)
    trainer = flexseq_trainer(
        folder,
        accumulation=2,
        eval_dataset=dataset(5),
        callbacks=[saves],
        max_tokens_per_rank=80,
        max_steps=5,
        logging_steps=logging_steps,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        plan_trace=str(trace),
    )
    if events is not None:
        run = trainer.flexseq.micro_batches

        def noted(step, *args, **options):
            events.append(step.number)
            return run(step, *args, **options)

        trainer.flexseq.micro_batches = noted
    trainer.train()
    timed = ("measured_s", "planning_ms_exposed", "tokens_per_s", "runtime", "per_second")
    log = []
    for entry in trainer.state.log_history:
        log.append({key: v for key, v in entry.items() if not key.endswith(timed)})
    traced = [json.loads(line)["step"] for line in trace.read_text().splitlines()]
    return log, traced, saves.found


@pytest.mark.processes
@pytest.mark.parametrize("logging_steps", [1, 500])
def test_the_log_and_the_trace_are_those_of_figures_that_are_read_at_once(
    tmp_path, request, logging_steps
):
    wanted = train(tmp_path / "at once", logging_steps)
    events = request.getfixturevalue("behind")
    found = train(tmp_path / "behind", logging_steps, events)
    assert found == wanted
    assert found[1] == list(range(5))
    assert found[2] == [(2, 2), (4, 4), (5, 5)]
    if logging_steps == 1:
        assert any("flexseq/micro_batches" in entry for entry in found[0])
    if logging_steps == 500:
        # A step is read behind the next one, or where the device is waited for anyway: for the
        # checkpoints after steps 1 and 3, and in the end.
        assert events == [0, 1, "read", "read", 2, 3, "read", "read", 4, "read"]
