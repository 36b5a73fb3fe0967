"""The next step is dispatched while this one runs, and nothing shows of it: not in the order of
exchanges, not in numbers, samples or errors."""

import re
from types import SimpleNamespace

import pytest

from hf_flexseq.distributed.transport import LostRank
from hf_flexseq.plan import PlanInfeasible
from tests.ranks import host_exchanges, join, run_threads
from tests.steps.test_lookahead import Echo, batch_of, failing, steps_of


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


def test_the_end_of_the_data_is_found_ahead():
    def draw(rank, world_size):
        steps = prefetched_steps(rank, 4)
        iterator = batches_of(*[3] * (rank == 0))
        assert steps.next(iterator, 1).lengths == (3,)
        steps.prefetch()
        return [steps.next(iterator, 1), steps.next(iterator, 1)]

    assert run_threads(draw, 2) == [[None, None]] * 2
