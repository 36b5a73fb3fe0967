"""A run that is killed in the middle of an epoch and resumed goes on with the same data and the
same losses, and its plan trace with the same steps."""

import functools
import json
import os
import signal

import pytest
import torch
from transformers import TrainerCallback

from hf_flexseq.checkpoints import files
from hf_flexseq.checkpoints.manifest import is_torn
from hf_flexseq.hf.engine import cost_source
from tests.hf.plain import flexseq_trainer, logged
from tests.hf.tiny import documents, tiny_llama
from tests.hf.trainers import zero
from tests.ranks import run_ranks
from tests.versions import reads_optimizer_on_cpus

pytestmark = pytest.mark.processes


KILLED_AT = 5
TORN_AT = 4  # saves come every 2 steps
OPTIONS = {
    "ddp": {},
    "zero3": {},
    "pipeline": {"pipeline_parallel_size": 2},
}


class KilledAfter(TrainerCallback):
    """Ends the process as a kill would, without any clean-up."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os._exit(1)


def kill_within(module, name):
    """Let `module.name(what, path)` write half of an optimizer's file and be killed."""
    function = getattr(module, name)

    @functools.wraps(function)
    def killed(what, path, *args, **kwargs):
        function(what, path, *args, **kwargs)
        if "optimizer" in str(path) and f"checkpoint-{TORN_AT}" in str(path):
            os.truncate(path, 100)
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, killed)


def losses(rank, world_size, folder, kind, killed, resume, batch=1, rows=9, **options):
    """Of every step. killed: "at a step" or "while saving"; None for not at all."""
    if kind == "zero3":
        options["deepspeed"] = zero(3)
    if killed == "while saving" and kind == "pipeline" and rank == 1:
        kill_within(files, "save_file")
    if killed == "while saving" and kind == "ddp" and rank == 0:
        kill_within(torch, "save")
    trainer = flexseq_trainer(
        folder,
        batch=batch,
        accumulation=2,
        model=tiny_llama(torch.float32 if kind == "zero3" else torch.float64),
        train_dataset=documents([1 + (i * i * 7) % 30 for i in range(rows)]),
        callbacks=[KilledAfter(KILLED_AT)] if killed == "at a step" else None,
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=2,
        lookahead=3,
        **{"plan_trace": str(folder / "plans.jsonl"), **OPTIONS[kind], **options},
    )
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer.state.log_history, "loss")


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("ddp", ("at a step", "while saving"), marks=reads_optimizer_on_cpus),
        ("zero3", ("at a step",)),
        pytest.param("pipeline", ("while saving",), marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_with_the_same_losses(tmp_path, kind, kills):
    wanted = run_ranks(losses, 2, tmp_path / "whole", kind, None, None, seconds=120)
    assert len(wanted[0]) > KILLED_AT
    for killed in kills:
        folder = tmp_path / killed
        with pytest.raises(AssertionError, match="the process died"):
            run_ranks(losses, 2, folder, kind, killed, None, seconds=120)
        torn = [path.name for path in folder.glob("checkpoint-*") if is_torn(path)]
        assert torn == ([f"checkpoint-{TORN_AT}"] if killed == "while saving" else [])
        resumed = run_ranks(losses, 2, folder, kind, None, True, seconds=120)
        assert resumed == wanted
        if killed == "at a step":
            assert_traced(tmp_path / "whole", folder, len(wanted[0]))


def assert_traced(whole_folder, killed_folder, steps):
    """A resumed run's trace has the steps of a whole run's, after those of the killed run."""
    whole = traced(whole_folder)
    again = traced(killed_folder)
    assert [step for step, _ in whole] == list(range(steps))
    saved = KILLED_AT - 1  # steps in the last checkpoint
    assert again == whole[:KILLED_AT] + whole[saved:]


def traced(folder):
    """Step and lengths of every line of a trace."""
    found = []
    for line in (folder / "plans.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.append((record["step"], record["lengths"]))
    return found


def learning(rank, world_size, folder, kind, resume):
    """The losses of a run that begins with the estimate, and corrects it."""
    cost_source.HF_HOME = str(folder)
    trace = folder / ("resumed" if resume else "whole")
    options = {"cost_model": "auto", "plan_trace": str(trace), "rows": 17}
    return losses(rank, world_size, folder, kind, None, resume, **options)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("ddp", marks=reads_optimizer_on_cpus),
        pytest.param("pipeline", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_learns_resumes_bit_for_bit_with_the_plans_of_its_checkpoint(tmp_path, kind):
    """What the clocks of the resumed run say is not what those of the first one have said."""
    wanted = run_ranks(learning, 2, tmp_path, kind, None, seconds=120)
    resume = str(tmp_path / f"checkpoint-{TORN_AT}")
    assert run_ranks(learning, 2, tmp_path, kind, resume, seconds=120) == wanted
    whole, resumed = (
        [json.loads(line) for line in (tmp_path / name).open()] for name in ("whole", "resumed")
    )
    digests = [line["cost_model"] for line in whole]
    assert len({*digests}) == (2 if kind == "ddp" else 1), "one correction, and then a checkpoint"
    for name in ("step", "cost_model", "lengths", "objective_s"):
        assert [one[name] for one in resumed] == [one[name] for one in whole[TORN_AT:]]
