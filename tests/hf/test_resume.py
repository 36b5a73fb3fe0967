"""A run that is killed in the middle of an epoch and resumed goes on with the same data and the
same losses, and its plan trace with the same steps."""

import json
import os

import deepspeed
import pytest
import torch
from transformers import TrainerCallback

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.test_sharding import ZERO
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


KILLED_AT = 5


class KilledAfter(TrainerCallback):
    """Ends the process as a kill would, without any clean-up."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os._exit(1)


def losses(rank, world_size, folder, zero, killed, resume, batch=2):
    if zero:
        deepspeed.init_distributed("gloo")
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        save_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_tokens_per_rank=40,
        lookahead=3,
        cost_model="estimate",
        plan_trace=str(folder / "plans.jsonl"),
        deepspeed={**ZERO, "zero_optimization": {"stage": 3}} if zero else None,
    )
    trainer = FlexSeqTrainer(
        model=tiny_llama(torch.float32 if zero else torch.float64),
        args=args,
        train_dataset=documents([1 + (i * i * 7) % 60 for i in range(30)]),
        callbacks=[KilledAfter(KILLED_AT)] if killed else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("zero", [False, True], ids=["ddp", "zero3"])
def test_a_killed_run_resumes_with_the_same_losses(tmp_path, zero):
    wanted = run_ranks(losses, 2, tmp_path / "whole", zero, False, None, seconds=120)
    with pytest.raises(AssertionError, match="the process died"):
        run_ranks(losses, 2, tmp_path / "killed", zero, True, None, seconds=120)
    resumed = run_ranks(losses, 2, tmp_path / "killed", zero, False, True, seconds=120)
    assert len(wanted[0]) > KILLED_AT
    assert resumed == wanted
    whole = traced(tmp_path / "whole")
    again = traced(tmp_path / "killed")
    assert [step for step, *_ in whole] == list(range(len(wanted[0])))
    saved = KILLED_AT - 1  # steps in the last checkpoint
    assert again[:KILLED_AT] == whole[:KILLED_AT]
    assert again[KILLED_AT] == (saved, True, *whole[saved][2:])
    assert again[KILLED_AT + 1 :] == whole[KILLED_AT:]


def traced(folder):
    """Step, whether it is a repeat, and lengths, of every line of a trace."""
    found = []
    for line in (folder / "plans.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.append((record["step"], record.get("repeat", False), record["lengths"]))
    return found


def test_another_step_size_is_refused(tmp_path):
    run_ranks(losses, 2, tmp_path, False, False, None)
    with pytest.raises(AssertionError, match="8 sequences per optimizer step, this run draws 12"):
        run_ranks(losses, 2, tmp_path, False, False, True, 3)
    assert run_ranks(losses, 1, tmp_path, False, False, True, 4), (
        "the same step size on another number of ranks"
    )
