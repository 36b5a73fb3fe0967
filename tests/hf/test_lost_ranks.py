"""A rank that dies or falls silent, between two steps or in the middle of one, or the planner: all
that are left name it, and the step, whoever had called what they waited in."""

import os
import re
import signal
import time

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqEngine, PlanInfeasible
from hf_flexseq.distributed.transport import LostRank
from tests.hf.plain import Stream
from tests.hf.test_nonfinite import make_trainer
from tests.hf.tiny import documents, noting_figures, tiny_arguments, tiny_llama
from tests.hf.trainers import trainer_of
from tests.ranks import be_silent, give_up, run_cases, run_ranks

pytestmark = pytest.mark.processes

LOST, LOST_AFTER, TIMEOUT_S = 1, 2, 3  # after the step of this number
SHORT_S = 3  # a timeout where nothing but the lost rank takes long


def train_until(after):
    """Train until an error; how long its last step and the error took, and with which words it
    gave up. after: called with the engine after each step, and the step's index."""
    accelerator = Accelerator(cpu=True)
    args = tiny_arguments(max_tokens_per_rank=40, lookahead=1, strategy="local")
    engine = FlexSeqEngine(accelerator, args)
    model = tiny_llama(torch.float32)
    engine.attach(model)
    examples = documents([5 + index % 30 for index in range(60)])
    loader = DataLoader(examples, batch_size=2, collate_fn=DataCollatorForFlexSeq())
    model, loader = accelerator.prepare(model, loader)
    began = []  # when each step began, in which the next one is planned

    def train():
        for step, planned in enumerate(engine.steps(loader)):
            began.append(time.monotonic())
            planned.backward(model)
            after(engine, step)

    with pytest.raises(RuntimeError) as raised:
        train()
    engine.detach()
    seconds = time.monotonic() - began[-1]
    give_up()
    return seconds, str(raised.value)


def be_lost(dies):
    """Die, or fall silent until the others have given up."""
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    be_silent()
    raise RuntimeError("this rank was silent")


def limits(dies, timeout):
    """Options of `run_ranks` where a rank is lost in this way."""
    return {
        "group_seconds": 60 if dies else timeout,
        "may_die": (LOST,) if dies else (),
        "seconds": 100,
    }


def train_until_one_is_lost(rank, world_size, dies):
    def after(engine, step):
        if rank == LOST and step == LOST_AFTER:
            be_lost(dies)

    return train_until(after)


def train_until_the_planner_is_stopped(rank, world_size):
    """What `train_until` returns, and on rank 0 the planner's number and how it ended."""
    planners = []

    def after(engine, step):
        if rank == 0 and step == LOST_AFTER:
            planner = engine._training._planner
            planners.append(planner._process)
            os.kill(planner._process.pid, signal.SIGSTOP)

    seconds, message = train_until(after)
    return seconds, message, [(process.pid, process.returncode) for process in planners]


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "silent"])
def test_the_others_name_rank_and_step(dies):
    found = run_ranks(train_until_one_is_lost, 3, dies, **limits(dies, TIMEOUT_S))
    found.pop(LOST)
    for seconds, message in found:
        assert seconds < (30 if dies else 3 * TIMEOUT_S), found
        wanted = (
            rf"rank \d: rank {LOST} did not answer in step {LOST_AFTER}, gathering its figures"
        )
        assert re.match(wanted, message), message


def test_a_stopped_planner_fails_on_all_ranks_together_after_the_timeout():
    found = run_ranks(train_until_the_planner_is_stopped, 3, group_seconds=TIMEOUT_S)
    ((planner, ended),) = found[0][2]
    assert ended == -signal.SIGKILL, "detaching ends it, stopped as it is"
    assert len({message for _, message, _ in found}) == 1
    for seconds, message, _ in found:
        assert TIMEOUT_S <= seconds < 3 * TIMEOUT_S, found
        assert re.match(
            rf"planning of step \d+ failed: the planning process \({planner} on \S+\) has not "
            rf"answered for {TIMEOUT_S} s; if it is slow and not stuck, raise ddp_timeout",
            message,
        )


def lost_in_a_forward(rank, world_size, kind, folder, dies):
    """With which words this rank gave up, in a Trainer of which one rank was lost."""
    if kind == "zero":
        deepspeed.init_distributed("gloo")
    trainer = make_trainer(kind, folder / "model", folder, ddp_timeout=SHORT_S)

    def lose(*_):
        if trainer.state.global_step == LOST_AFTER:
            be_lost(dies)

    if rank == LOST:
        # the last layer is on every rank but the first of a pipeline
        trainer.model.model.layers[-1].register_forward_hook(lose)
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    if rank != LOST:
        give_up()
        assert isinstance(raised.value, LostRank), raised.value
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "dies"),
    [
        ("ddp", True),
        pytest.param("fsdp2", False, marks=pytest.mark.nightly),
        ("zero", True),
        ("pipeline", True),
    ],
)
def test_the_other_names_the_rank_that_is_lost_in_a_forward(tmp_path, kind, dies):
    if kind == "fsdp2":
        tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    options = limits(dies, SHORT_S)
    message, _ = run_ranks(lost_in_a_forward, 2, kind, tmp_path, dies, **options)
    assert message.startswith("rank 0")
    assert f"rank {LOST}" in message


# ---- sequences that fit on no rank, and a planner that is dead


def train_on_outlier(rank, world_size, folder, longest, streamed=False):
    """The figures of the first step, and how often the model had run by then."""
    data, calls, model = documents([longest, 3] * 10), [], tiny_llama()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    settings = {"batch": 1, "max_steps": 3, "train_sampling_strategy": "sequential"}
    settings["train_dataset"] = Stream(data) if streamed else data
    options = {"max_tokens_per_rank": 51}
    trainer = trainer_of(Trainer, folder, flexseq=options, model=model, **settings)
    steps = noting_figures(trainer)
    if longest <= 2 * 51:
        trainer.train()
        return steps[0], len(calls)
    said = "103 tokens.*max_tokens_per_rank=51.*raise max_tokens_per_rank to 52"
    with pytest.raises(PlanInfeasible, match=f"(?i){said}"):
        trainer.train()
    return None, len(calls)


def test_an_outlier_is_split_and_one_that_fits_nowhere_is_refused_before_any_compute(tmp_path):
    """Refused before training, or of a stream at its step."""
    cases = [(tmp_path, 101), (tmp_path, 103), (tmp_path, 103, True)]
    split, *refused = run_cases(train_on_outlier, 2, cases)
    for first, calls in split:
        assert first["groups_of_2"] >= 1
        assert calls >= 3
    assert refused == [[(None, 0)] * 2] * 2
