"""Planning ahead, and dispatching the next step while this one runs, changes no step and no
exchange. And what goes wrong on one rank all raise."""

import re
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.distributed.transport import LostRank
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.process.client import InlinePlanner
from hf_flexseq.steps.prefetch import PrefetchedSteps
from tests.hf.plain import training_arguments
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import host_exchanges, join, run_cases, run_threads


def without_a_group(plan):
    *others, last = plan.micro_batches
    return replace(plan, micro_batches=(*others, replace(last, groups=last.groups[:-1])))


def without_an_action(step_plan):
    (plan,) = step_plan.plans
    first, *others = plan.actions
    return replace(step_plan, plans=(replace(plan, actions=(first[:-1], *others)),))


def wrongly_planned(rank, world_size, folder, stages, spoiled):
    """What is raised, without ever running a step. spoiled: what becomes of a plan."""
    options = {"cost_model": "estimate", "pipeline_parallel_size": stages, "lookahead": 0}
    args = training_arguments(FlexSeqConfig, folder, batch=2, accumulation=1, **options)
    trainer = FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=documents([5, 3, 8, 2]))
    result = InlinePlanner.result

    def spoiled_result(planner, step):
        return spoiled(result(planner, step))

    with (
        mock.patch.object(InlinePlanner, "result", spoiled_result),
        pytest.raises(RuntimeError) as raised,
    ):
        trainer.train()
    return str(raised.value)


@pytest.mark.processes
def test_an_illegal_plan_is_refused_on_every_rank(tmp_path):
    cases = [(tmp_path, 1, without_a_group), (tmp_path, 2, without_an_action)]
    reasons = ("sequences missing", "stage 0 has no 0")
    for messages, reason in zip(run_cases(wrongly_planned, 2, cases), reasons, strict=True):
        for message in messages:
            assert message.startswith("planning of step 0 failed: ")
            assert reason in message


# ---- alone


class Lengths(list):
    """A plan that is the lengths that were asked for."""

    notes = ()

    def to_record(self):
        return list(self)


class Echo:
    """A planner whose plan is what it was asked. waits: so many times it has not answered yet."""

    def __init__(self, waits=0):
        self.waits, self.submitted = waits, {}

    def submit(self, step, lengths, facts=None):
        assert step not in self.submitted
        self.submitted[step] = lengths

    def wait(self, step, seconds):
        if self.waits:
            self.waits -= 1
            time.sleep(max(seconds, 0))
            return "the planning process (4711 on node7)"
        return None

    def result(self, step):
        return Lengths(self.submitted[step])

    def close(self):
        pass


def steps_of(rank, lookahead=0, planner=None, *, communicator=None, timeout_s=None, **options):
    """Steps that are planned, and dispatched without any exchange."""

    def dispatch(planned):
        step = SimpleNamespace(number=planned.drawn.number, drawn=planned.drawn, planned=planned)
        step.begin_ahead = lambda: None
        return step

    communicator = communicator or join()
    if timeout_s is not None:
        communicator.cpu_group.timeout = timedelta(seconds=timeout_s)
    return PrefetchedSteps(
        communicator,
        (planner or Echo()) if rank == 0 else None,
        lookahead,
        check=lambda plan: None,
        read=Lengths,
        **{"dispatch": dispatch, **options},
    )


def batch_of(*lengths, **columns):
    examples = documents(list(lengths))
    for example in examples:
        for name, value in columns.items():
            example[name] = [value] * len(example["input_ids"])
    return DataCollatorForFlexSeq()(examples)


def raised_by(steps, batches):
    """Draw until an error, and return it with the number of steps before it."""
    iterator = iter(batches)
    drawn = []
    with pytest.raises((ValueError, RuntimeError)) as raised:
        drawn.extend(iter(lambda: steps.next(iterator, 1), None))
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


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize(
    ("kind", "error", "cause"),
    [
        ("dataset", RuntimeError, "KeyError: 'text'"),
        ("collator", ValueError, "example 0 has no labels: for plain language modelling"),
        ("no lengths", ValueError, "a batch with the keys .* has no 'lengths'"),
        ("no labels", RuntimeError, "KeyError: 'labels'"),
    ],
)
def test_data_that_one_rank_cannot_draw_is_an_error_on_all(lookahead, kind, error, cause):
    def draw(rank, world_size):
        batches = failing(kind) if rank == 1 else [batch_of(rank + 1) for _ in range(9)]
        return raised_by(steps_of(rank, lookahead), batches)

    found = run_threads(draw, 3)
    messages = {message for _, _, message, _ in found}
    assert len(messages) == 1
    for rank, (drawn, kind_of_error, message, chained) in enumerate(found):
        assert drawn == (0 if lookahead else 2)
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
        return raised_by(steps_of(rank), batches)

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
    steps = steps_of(rank)
    for part in (first, later):
        iterator = iter(part)
        while (step := steps.next(iterator, 1)) is not None:
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
    steps = steps_of(rank)
    iterator = iter([batch_of(3) for _ in range(4)])
    counts = []
    for _ in range(4):
        before = host_exchanges(steps.communicator)
        steps.next(iterator, 1)
        counts.append(host_exchanges(steps.communicator) - before)
    return counts


def test_a_step_takes_two_exchanges():
    assert run_threads(exchanges_of, 2) == [[2, 2, 2, 2]] * 2


def test_a_planner_that_never_answers_fails_on_all_ranks_after_the_timeout():
    def draw(rank, world_size):
        began = time.monotonic()
        steps = steps_of(rank, planner=Echo(waits=10**6), timeout_s=0.2)
        return raised_by(steps, [batch_of(3)]), time.monotonic() - began

    for (drawn, error, message, _), seconds in run_threads(draw, 3):
        assert seconds >= 0.2
        assert (drawn, error) == (0, RuntimeError)
        assert message == (
            "planning of step 0 failed: the planning process (4711 on node7) has not answered for "
            "0.2 s; if it is slow and not stuck, raise ddp_timeout, the time that ranks wait for "
            "each other"
        )


# ---- the next step is dispatched while this one runs


class Refuses(Echo):
    """A planner that plans no sequence of so many tokens."""

    def __init__(self, refused=None):
        super().__init__()
        self.refused = refused

    def result(self, step):
        if self.refused in self.submitted[step]:
            raise PlanInfeasible(f"{self.refused} tokens fit nowhere")
        return super().result(step)


def prefetched_steps(rank, lookahead, *, refused=None, log=None, lost_in=None, **options):
    """Steps that are dispatched by an exchange of all ranks. log: gets what happens, and when."""
    log = [] if log is None else log
    communicator = join()

    def dispatch(planned):
        drawn = planned.drawn
        if drawn.number == lost_in:
            raise LostRank("rank 1 is gone")
        communicator.cpu_group.gather_values(["dispatch", drawn.number])
        log.append(f"dispatched {drawn.number} in {communicator.cpu_group.phase}")
        step = SimpleNamespace(number=drawn.number, lengths=drawn.lengths, plan=planned.plan)
        step.begin_ahead = lambda: None
        return step

    planner = Refuses(refused)
    return steps_of(
        rank, lookahead, planner, communicator=communicator, dispatch=dispatch, **options
    )


def batches_of(*lengths):
    return iter([batch_of(length) for length in lengths])


def numbers_of(rank, world_size, lookahead, ahead):
    """Numbers, lengths and plans of steps of three iterators, of which the first two are broken
    off."""
    steps = prefetched_steps(rank, lookahead, first_number=40)
    found = []
    for start, stop in ((1, 2), (11, 1), (21, 5)):
        iterator = iter([batch_of(start + index, rank + 1) for index in range(4)])
        for _ in range(stop):
            step = steps.next(iterator, 1)
            if step is None:
                break
            found.append((step.number, step.lengths, step.plan))
            if ahead:
                steps.prefetch()
    return found


@pytest.mark.parametrize("lookahead", [0, 1, 3, 9])
def test_steps_are_those_that_are_dispatched_in_place(lookahead):
    """Also where an iterator is left whose next step was dispatched already: numbers count on from
    the first one without steps that never ran."""
    wanted = run_threads(numbers_of, 2, 0, False)
    firsts = [1, 2, 11, 21, 22, 23, 24]
    lengths = [(first, 1, first, 2) for first in firsts]
    assert wanted[0] == [(40 + i, own, list(own)) for i, own in enumerate(lengths)]
    assert run_threads(numbers_of, 2, lookahead, True) == wanted


def test_the_next_step_is_dispatched_in_this_one_and_handed_out_without_an_exchange():
    def draw(rank, world_size):
        log = []
        steps = prefetched_steps(rank, 1, log=log)
        cpu_group = steps.communicator.cpu_group
        iterator = batches_of(*[3] * 5)
        for _ in range(2):
            number = steps.next(iterator, 1).number
            log.append(f"run {number} in {cpu_group.phase}")
            cpu_group.phase = f"the middle of step {number}"
            steps.prefetch()
            assert cpu_group.phase == f"the middle of step {number}"
        before = host_exchanges(steps.communicator)
        assert steps.next(iterator, 1).number == 2
        assert host_exchanges(steps.communicator) == before
        return log

    for log in run_threads(draw, 3):
        assert log == [
            "dispatched 0 in step 0, exchanging tokens",
            "run 0 in step 0",
            "dispatched 1 in step 1, exchanging tokens",
            "run 1 in step 1",
            "dispatched 2 in step 2, exchanging tokens",
        ]


def test_what_fits_nowhere_is_raised_where_its_step_begins():
    def draw(rank, world_size):
        steps = prefetched_steps(rank, 2, refused=7)
        iterator = batches_of(3, 7, 4, 5)
        steps.next(iterator, 1)
        steps.prefetch()  # step 0 goes on
        with pytest.raises(PlanInfeasible, match="7 tokens fit nowhere"):
            steps.next(iterator, 1)
        return steps.next(iterator, 1).number

    assert run_threads(draw, 3) == [2] * 3


def test_data_that_one_rank_cannot_draw_is_an_error_of_the_step_that_asks_for_more():
    def draw(rank, world_size):
        steps = prefetched_steps(rank, 1)
        iterator = failing("dataset") if rank == 1 else batches_of(*[2] * 9)
        assert steps.next(iterator, 1).number == 0  # draws batches 0 and 1
        steps.prefetch()  # fails to draw batch 2
        with pytest.raises(RuntimeError) as raised:
            steps.next(iterator, 1)
        return str(raised.value), raised.value.__cause__ is not None

    for rank, (message, has_cause) in enumerate(run_threads(draw, 3)):
        assert re.match("rank 1, drawing step 2: KeyError: 'text'", message)
        assert has_cause == (rank == 1)


def test_a_lost_rank_is_an_error_at_once():
    def draw(rank, world_size):
        steps = prefetched_steps(rank, 1, lost_in=1)
        steps.next(batches_of(3, 3, 3, 3), 1)
        with pytest.raises(LostRank, match="rank 1 is gone"):
            steps.prefetch()

    run_threads(draw, 2)
