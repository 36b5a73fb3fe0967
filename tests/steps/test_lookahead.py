"""Planning ahead changes when the planning happens and no result: losses, evaluation,
checkpoints. And what goes wrong on one rank is raised on all of them."""

import json
import re
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.planner.process.client import InlinePlanner
from hf_flexseq.steps.prefetch import PrefetchedSteps
from tests.hf.test_trainer import training_arguments
from tests.hf.tiny import documents, noting_figures, tiny_llama
from tests.ranks import join, run_cases, run_ranks, run_threads

# ---- under a Trainer


def run(rank, world_size, folder, lookahead):
    """The log without its timings, and the checkpoint after two steps."""
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_tokens_per_rank=40,
        lookahead=lookahead,
        cost_model="estimate",
    )
    examples = documents([1 + (i * i * 7) % 60 for i in range(21)])
    trainer = FlexSeqTrainer(
        model=tiny_llama(), args=args, train_dataset=examples[:14], eval_dataset=examples[14:]
    )
    steps = noting_figures(trainer)
    trainer.train()
    kept = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "step",
        "flexseq/micro_batches",
    )
    log = [
        {key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history
    ]
    log += [{"predicted_s": figures["predicted_s"]} for figures in steps]
    return log, {
        k: v.numpy() for k, v in load_file(folder / "checkpoint-2" / "model.safetensors").items()
    }


@pytest.mark.processes
def test_lookahead_changes_no_result(tmp_path):
    cases = [(tmp_path / str(lookahead), lookahead) for lookahead in (0, 1, 4, 50)]
    (wanted_log, wanted), *others = [by_rank[0] for by_rank in run_cases(run, 2, cases)]
    assert any("eval_loss" in entry for entry in wanted_log)
    for log, weights in others:
        assert log == wanted_log
        for name, in_place in wanted.items():
            assert (weights[name] == in_place).all(), name


class LosesASequence(InlinePlanner):
    """Its plans leave out the last group."""

    def result(self, step):
        plan = super().result(step)
        *others, last = plan.micro_batches
        return replace(plan, micro_batches=(*others, replace(last, groups=last.groups[:-1])))


class NeverGoesBackward(InlinePlanner):
    """Its plans leave out the last action of the first rank."""

    def result(self, step):
        step_plan = super().result(step)
        (plan,) = step_plan.plans
        first, *others = plan.actions
        return replace(step_plan, plans=(replace(plan, actions=(first[:-1], *others)),))


def wrongly_planned(rank, world_size, folder, stages):
    """What is raised, without ever running a step."""
    options = {"cost_model": "estimate", "pipeline_parallel_size": stages}
    args = training_arguments(
        FlexSeqConfig, folder, batch=2, accumulation=1, lookahead=0, **options
    )
    trainer = FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=documents([5, 3, 8, 2]))
    executor = trainer.flexseq.executor
    make = executor.planner

    def make_planner(*, ahead):
        planner = make(ahead=ahead)
        planner.__class__ = LosesASequence if stages == 1 else NeverGoesBackward
        return planner

    executor.planner = make_planner
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(("stages", "reason"), [(1, "sequences missing"), (2, "stage 0 has no 0")])
def test_an_illegal_plan_is_refused_on_every_rank(tmp_path, stages, reason):
    for message in run_ranks(wrongly_planned, 2, tmp_path, stages):
        assert message.startswith("planning of step 0 failed: ")
        assert reason in message


# ---- alone


class Echo:
    """A planner whose plan is what it was asked. waits: so many times it has not answered yet."""

    def __init__(self, waits=0):
        self.waits, self.submitted = waits, {}

    def submit(self, step, lengths):
        assert step not in self.submitted
        self.submitted[step] = list(lengths)

    def wait(self, step, seconds):
        if self.waits:
            self.waits -= 1
            time.sleep(max(seconds, 0))
            return "the planning process (4711 on node7)"
        return None

    def result(self, step):
        return SimpleNamespace(to_bytes=lambda: json.dumps(self.submitted[step]).encode())

    def close(self):
        pass


class Lengths(list):
    """A plan that is the lengths that were asked for."""

    notes = ()


def lookahead_of(rank, steps=0, planner=None, **options):
    """Steps that are planned, and not dispatched."""

    def dispatch(planned):
        drawn = planned.drawn
        return SimpleNamespace(number=drawn.number, drawn=drawn, planned=planned)

    return PrefetchedSteps(
        join(),
        (planner or Echo()) if rank == 0 else None,
        steps,
        dispatch=dispatch,
        check=lambda plan: None,
        read=lambda data: Lengths(json.loads(data)),
        **options,
    )


def batch_of(*lengths, **columns):
    examples = documents(list(lengths))
    for example in examples:
        for name, value in columns.items():
            example[name] = [value] * len(example["input_ids"])
    return DataCollatorForFlexSeq()(examples)


def raised_by(rank, batches, steps=0, planner=None, timeout_s=None):
    """Draw until an error, and return it with the number of steps before it."""
    lookahead = lookahead_of(rank, steps, planner)
    if timeout_s is not None:
        lookahead.communicator.cpu_group.timeout = timedelta(seconds=timeout_s)
    iterator = iter(batches)
    drawn = []
    with pytest.raises((ValueError, RuntimeError)) as raised:
        drawn.extend(iter(lambda: lookahead.next(iterator, 1), None))
    return len(drawn), type(raised.value), str(raised.value), raised.value.__cause__


def failing(kind):
    """Two good batches and one that cannot be drawn."""
    yield batch_of(3)
    yield batch_of(4)
    if kind == "dataset":
        raise KeyError("text")
    if kind == "collator":
        yield DataCollatorForFlexSeq()([{"input_ids": [1, 2]}])
    if kind == "no lengths":
        yield {"input_ids": torch.ones(1, 2)}
    if kind == "no labels":
        batch = batch_of(5)
        del batch["labels"]
        yield batch


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(
    ("kind", "error", "cause"),
    [
        ("dataset", RuntimeError, "KeyError: 'text'"),
        ("collator", ValueError, "example 0 has no labels: for plain language modelling"),
        ("no lengths", ValueError, "a batch with the keys .* has no 'lengths'"),
        ("no labels", RuntimeError, "KeyError: 'labels'"),
    ],
)
def test_data_that_one_rank_cannot_draw_is_an_error_on_all(steps, kind, error, cause):
    def draw(rank, world_size):
        batches = failing(kind) if rank == 1 else [batch_of(rank + 1) for _ in range(9)]
        return raised_by(rank, batches, steps)

    found = run_threads(draw, 3)
    messages = {message for _, _, message, _ in found}
    assert len(messages) == 1
    for rank, (drawn, kind_of_error, message, chained) in enumerate(found):
        assert drawn == (0 if steps else 2)
        assert kind_of_error is error
        assert re.match(f"rank 1, drawing step 2: {cause}", message)
        assert "\n" not in message
        assert (chained is not None) == (rank == 1)


@pytest.mark.parametrize("at", [0, 2])
def test_columns_that_differ_between_ranks_are_an_error_on_all(at):
    """Also where one rank has other ones than in the steps before."""

    def draw(rank, world_size):
        batches = [batch_of(3, weight=0.5) for _ in range(4)]
        if rank == 2:
            batches[at] = batch_of(3, mask=1, weight=1)
        return raised_by(rank, batches)

    for drawn, error, message, _ in run_threads(draw, 3):
        assert (drawn, error) == (at, ValueError)
        assert message == (
            f"ranks drew different columns in step {at}, gathering its lengths: "
            "rank 0 weight: float32, rank 2 mask: int64, weight: int64"
        )


def columns_of(rank, world_size):
    """Names and dtypes of every step; rank 1 is empty at first, and all change in the third."""
    first = [] if rank == 1 else [batch_of(3, weight=0.5), batch_of(2, weight=0.5)]
    later = [] if rank == 0 else [batch_of(4, mask=1)]
    found = []
    lookahead = lookahead_of(rank)
    for part in (first, later):
        iterator = iter(part)
        while (step := lookahead.next(iterator, 1)) is not None:
            found.append((step.drawn.lengths, sorted(step.drawn.row.dtypes.items())))
    return found


def test_a_rank_that_draws_nothing_has_the_columns_of_the_others():
    usual = [("input_ids", "int64"), ("labels", "int64"), ("position_ids", "int64")]
    first, second = run_threads(columns_of, 2)
    assert first == second
    assert first == [
        ((3,), [*usual, ("weight", "float32")]),
        ((2,), [*usual, ("weight", "float32")]),
        ((4,), sorted([*usual, ("mask", "int64")])),
    ]


def exchanges_of(rank, world_size):
    """How many exchanges of the host each step took."""
    lookahead = lookahead_of(rank)
    meetings = lookahead.communicator.transport.hub.meetings
    iterator = iter([batch_of(3) for _ in range(4)])
    counts = []
    for _ in range(4):
        before = meetings._next[rank]
        lookahead.next(iterator, 1)
        counts.append(meetings._next[rank] - before)
    return counts


def test_a_step_takes_two_exchanges_and_the_first_one_three():
    assert run_threads(exchanges_of, 2) == [[3, 2, 2, 2]] * 2


@pytest.mark.parametrize("timeout_s", [0.2, 0.5])
def test_a_planner_that_never_answers_fails_on_all_ranks_after_the_timeout(timeout_s):
    def draw(rank, world_size):
        began = time.monotonic()
        found = raised_by(rank, [batch_of(3)], planner=Echo(waits=10**6), timeout_s=timeout_s)
        return time.monotonic() - began, found

    for seconds, (drawn, error, message, _) in run_threads(draw, 3):
        assert seconds >= timeout_s
        assert (drawn, error) == (0, RuntimeError)
        assert message == (
            "planning of step 0 failed: the planning process (4711 on node7) has not answered for "
            f"{timeout_s} s; if it is slow and not stuck, raise ddp_timeout, the time that ranks "
            "wait for each other"
        )


def test_a_planner_that_is_merely_slow_is_waited_for():
    def draw(rank, world_size):
        lookahead = lookahead_of(rank, planner=Echo(waits=3))
        lookahead.communicator.cpu_group.timeout = timedelta(seconds=1.0)
        step = lookahead.next(iter([batch_of(3)]), 1)
        return step.number, step.planned.plan, step.planned.waited_s

    for number, plan, waited_s in run_threads(draw, 2):
        assert (number, plan) == (0, [3, 3])
        assert waited_s >= 0.7


def numbers_of(rank, world_size):
    """Numbers and lengths of steps of three iterators, of which the first one is broken off."""
    lookahead = lookahead_of(rank, 2, first_number=40)
    found = []
    for start, stop in ((1, 2), (11, 5), (21, 5)):
        iterator = iter([batch_of(start + index) for index in range(4)])
        for _ in range(stop):
            step = lookahead.next(iterator, 1)
            if step is not None:
                found.append((step.number, step.drawn.lengths, step.planned.plan))
    return found


def test_steps_count_on_from_the_first_number_without_those_that_never_ran():
    lengths = [1, 2, 11, 12, 13, 14, 21, 22, 23, 24]
    wanted = [(40 + index, (length,), [length]) for index, length in enumerate(lengths)]
    assert run_threads(numbers_of, 1) == [wanted]
