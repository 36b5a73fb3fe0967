"""Training in which memory runs out starts again under a lower cap: all bits are those of a run
whose cap was lower before. On several ranks the next start has the lower cap."""

import json
import os
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.distributed.transport import LostRank
from hf_flexseq.hf.trainer.step_memory import RECORD
from hf_flexseq.plan import PlanInfeasible
from tests.budget import others_nightly
from tests.differential.case import sft_trainer
from tests.hf.test_tiles import starcoder
from tests.hf.tiny import documents
from tests.hf.trainers import CLOCKS, Run, loss_of_squares, trained, trainer_of, weights_of
from tests.hf.vision import tiny_vision_model, vision_examples
from tests.ranks import run_ranks

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
CAP = 100  # the longest document of `dataset` has 60 tokens
SOME = 20  # calls of linear layers: a micro-batch has 14 of them


def on_device():
    return torch.OutOfMemoryError(CUDA)


def on_host():
    return RuntimeError(CPU)


class _NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make_error):
        ctx.make_error = make_error
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.make_error()


class RunsOut(TrainerCallback):
    """Lets a linear layer run out of memory in chosen steps, in its forward or its backward."""

    def __init__(self, *steps, where="forward", make_error=on_device, call=SOME, times=1):
        self.steps = list(steps)
        self.where = where
        self.make_error = make_error  # an error keeps the frames that it went through
        self.call = call
        self.times = times  # to fail yet
        self.calls = None  # before one fails; None while none is to fail
        self.made = []  # storages of what the attempt has computed

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.steps.remove(state.global_step)
            self.calls = 0

    @contextmanager
    def planted(self):
        forward = nn.Linear.forward

        def counted(linear, x):
            found = forward(linear, x)
            if self.calls is None:
                return found
            self.made.append(StorageWeakRef(found.untyped_storage()))
            self.calls += 1
            if self.calls < self.call:
                return found
            self.times -= 1
            self.calls = 0 if self.times else None
            if self.where == "backward":
                return _NoMemory.apply(found, self.make_error)
            raise self.make_error()

        counted.__module__ = nn.Linear.__module__  # code of a user's would be tried, and counted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Linear, "forward", counted)
            yield


def figures(run):
    """What was logged, but for clocks, and a counter that SFTTrainer does not resume."""
    lines = []
    for line in run.log:
        names = [
            name for name in line if not any(clock in name for clock in (*CLOCKS, "num_tokens"))
        ]
        lines.append({name: line[name] for name in names})
    return lines


def plans(folder):
    """The micro-batches of each step of a plan trace."""
    lines = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    return [(line["step"], line["lengths"], line["micro_batches"]) for line in lines]


def checked_trainer(make, folder, fault, **options):
    """A trainer whose failed attempts have left nothing when training starts again."""
    folder.mkdir(exist_ok=True)
    flexseq = {"max_tokens_per_rank": CAP, "plan_trace": str(folder / "plans.jsonl")}
    flexseq |= options.pop("flexseq", {})
    trainer = make(folder, flexseq=flexseq, auto_find_batch_size=True, **options)
    trainer.add_callback(fault)
    memory = trainer._flexseq_memory
    start_again = memory.start_again

    def checked(resumed):
        folder = start_again(resumed)
        alive = [one for one in fault.made if not one.expired()]
        assert not alive, f"{len(alive)} of {len(fault.made)} tensors are alive"
        return folder

    memory.start_again = checked
    return trainer


def stock(folder, **settings):
    settings = {"batch": 6, "optim": "adamw_torch", "max_steps": 2, **settings}
    return trainer_of(Trainer, folder, **settings)


def with_dropout(folder, **settings):
    torch.manual_seed(0)
    model = starcoder(residual_dropout=0.2, embedding_dropout=0.2).double()
    return stock(folder, model=model, gradient_checkpointing=True, max_steps=3, **settings)


def of_trl(folder, flexseq, **settings):
    settings |= {"max_steps": 2}
    return sft_trainer(SFTTrainer, folder, 6, flexseq=flexseq, settings=settings)


def on_samples(folder, **settings):
    return stock(folder, compute_loss_func=loss_of_squares, **settings)


def with_images(folder, **settings):
    examples = vision_examples("qwen3_vl", [1, 0, 2, 1, 0, 1])
    settings |= {"model": tiny_vision_model("qwen3_vl"), "train_dataset": examples}
    return stock(folder, data_collator=DataCollatorForFlexSeq(), **settings)


KINDS = {
    "dropout": with_dropout,
    "trl": of_trl,
    "samples": on_samples,
    "images": with_images,
}
FIRST, SECOND = 0, 1  # steps that fail
CALLS = {  # in place of SOME
    "dropout": 30,  # 12 of a micro-batch, and 12 of its replay
    ("trl", FIRST): 34,
    ("trl", SECOND): 50,
    ("samples", SECOND): 40,  # of the second pass
}


def cap_after(folder):
    return json.loads((folder / RECORD).read_text())["max_tokens_per_rank"]


def assert_same(found, wanted):
    """Every bit of the weights, and every figure of a step, are the same."""
    losses = [[line for line in figures(run) if "loss" in line] for run in (found, wanted)]
    assert losses[0] == losses[1]
    assert losses[0]
    for name, weight in wanted.weights.items():
        assert (found.weights[name] == weight).all(), name


CASES = [
    (kind, where, step)
    for kind in KINDS
    for where in ("forward", "backward")
    for step in (FIRST, SECOND)
    if (kind, step) != ("dropout", FIRST)  # what dropped out in the first attempt comes no more
]
TRIED = [
    ("dropout", "backward", SECOND),
    ("trl", "forward", FIRST),
    ("samples", "backward", SECOND),
    ("samples", "backward", FIRST),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", others_nightly(CASES, tried=TRIED), ids=lambda case: "-".join(map(str, case))
)
def test_all_bits_are_those_of_a_run_with_the_lower_cap(tmp_path, case):
    kind, where, step = case
    failed, lower = tmp_path / "failed", tmp_path / "lower"
    # ahead of the failed step others have been planned, in a process
    flexseq = {"lookahead": 2 if kind == "dropout" else 0}
    saves = {"save_strategy": "steps", "save_steps": 1} if step else {}
    fault = RunsOut(step, where=where, call=CALLS.get((kind, step), CALLS.get(kind, SOME)))
    trainer = checked_trainer(KINDS[kind], failed, fault, flexseq=flexseq, **saves)
    with fault.planted():
        found = trained(trainer)
    assert fault.times == 0, "memory has run out"
    assert trainer.args.auto_find_batch_size
    cap = cap_after(failed)
    assert cap < CAP

    flexseq["max_tokens_per_rank"] = cap
    other = checked_trainer(KINDS[kind], lower, RunsOut(), flexseq=flexseq)
    if step:
        other.train(resume_from_checkpoint=str(failed / "checkpoint-1"))
        wanted = Run(start={}, weights=weights_of(other.model), log=other.state.log_history)
    else:
        wanted = trained(other)
    assert_same(found, wanted)
    assert plans(failed)[step:] == plans(lower)


# ---- where it ends


def test_a_sequence_that_fits_alone_nowhere_ends_the_run(tmp_path):
    rows = documents([50, 3])
    fault = RunsOut(0, call=1)
    trainer = checked_trainer(stock, tmp_path, fault, train_dataset=rows)
    with fault.planted(), pytest.raises(PlanInfeasible) as raised:
        trainer.train()
    assert "50" in str(raised.value)
    assert trainer.args.auto_find_batch_size
    assert cap_after(tmp_path) == 47


def test_weights_that_no_checkpoint_has_are_left_to_the_next_start(tmp_path):
    fault = RunsOut(1)
    trainer = checked_trainer(stock, tmp_path, fault)
    with fault.planted(), pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert f"as {tmp_path / RECORD} says: go on from the newest checkpoint" in note
    assert cap_after(tmp_path) < CAP


# ---- without auto_find_batch_size

ADVICE = "set max_tokens_per_rank=44, or activation_memory='auto', or activation checkpointing"
HELD = "rank 0 ran out of memory in micro-batch 2 of 5 of step 1, with 49 tokens: 0.00 of "


@pytest.mark.parametrize(("where", "make_error"), [("forward", on_device), ("backward", on_host)])
def test_an_error_says_what_was_held_and_what_to_set(tmp_path, where, make_error):
    fault = RunsOut(1, where=where, make_error=make_error)
    flexseq = {"max_tokens_per_rank": 60, "activation_memory": "as_set"}
    trainer = stock(tmp_path, flexseq=flexseq, callbacks=[fault])
    with fault.planted(), pytest.raises(RuntimeError) as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert note.startswith(HELD)
    assert ADVICE in note
    assert not (tmp_path / RECORD).exists()


# ---- several ranks


def on_ranks(rank, world_size, folder, fails):
    """The last step of a run; it ends as a process does where memory runs out."""
    fault = RunsOut(*([1] if fails and rank == 1 else []))
    trainer = stock(
        folder,
        flexseq={"max_tokens_per_rank": CAP, "plan_trace": str(folder / "plans.jsonl")},
        auto_find_batch_size=True,
        callbacks=[fault],
        save_strategy="steps",
        save_steps=1,
        max_steps=3,
    )
    try:
        with fault.planted():
            trainer.train(resume_from_checkpoint=not fails)
    except torch.OutOfMemoryError as error:
        (folder / "note").write_text(error.__notes__[0])
        os._exit(1)
    except LostRank as error:
        return str(error)
    return trainer.state.global_step


@pytest.mark.processes
def test_the_next_start_of_several_ranks_has_the_lower_cap(tmp_path):
    said, _ = run_ranks(on_ranks, 2, tmp_path, True, may_die=(1,))
    assert said.startswith("rank 0: rank 1 did not answer in step 1"), said
    cap = cap_after(tmp_path)
    note = (tmp_path / "note").read_text()
    assert note.startswith("rank 1 ran out of memory in micro-batch ")
    assert f"lowers the cap from {CAP} to {cap} tokens" in note
    assert run_ranks(on_ranks, 2, tmp_path, False) == [3, 3]
    first, *resumed = plans(tmp_path)
    assert fullest(*first) > cap >= max(fullest(*one) for one in resumed)
    assert [step for step, *_ in resumed] == [1, 2]


def fullest(step, lengths, micro_batches):
    """The most tokens of a group in a step; groups have one rank."""
    return max(
        sum(lengths[one] for one in group["sequences"])
        for micro_batch in micro_batches
        for group in micro_batch["groups"]
    )
