"""An error that one rank alone has met is raised on all of them, in one line."""

import traceback

import pytest

from hf_flexseq.distributed.agreement import CAUSE_CHARACTERS, Attempt
from tests.ranks import join, run_threads

FAILS_ON = 1


def attempts(rank, world_size, errors):
    """What a rank raises whose attempt ends in the error under its number, if there is one."""
    cpu_group = join().cpu_group
    with Attempt() as trying:
        if rank in errors:
            raise errors[rank]
    try:
        trying.raise_together(cpu_group.gather_values, "trying it")
    except (ValueError, RuntimeError) as error:
        return type(error), str(error), error.__cause__
    return None


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (ValueError("no labels"), ValueError, "no labels"),
        (NotImplementedError("not there"), NotImplementedError, "not there"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, "'utf-8' codec"),
        (RuntimeError("out of memory"), RuntimeError, "out of memory"),
        (KeyError("labels"), RuntimeError, "KeyError: 'labels'"),
        (OSError(28, "No space left"), RuntimeError, "OSError: [Errno 28] No space left"),
    ],
)
def test_all_ranks_raise_one_line_that_names_rank_and_cause(error, kind, cause):
    found = run_threads(attempts, 3, {FAILS_ON: error})
    for own_kind, message, _ in found:
        assert own_kind is kind
        assert message.startswith(f"rank {FAILS_ON}, trying it: {cause}")
    assert len({message for _, message, _ in found}) == 1
    assert [chained for *_, chained in found] == [None, error, None]


def test_nothing_is_raised_where_nobody_failed():
    assert run_threads(attempts, 3, {}) == [None] * 3


def test_ranks_that_failed_alike_raise_their_own_errors():
    errors = {rank: KeyError("labels") for rank in range(2)}
    with pytest.raises(KeyError, match="^'labels'$"):
        run_threads(attempts, 2, errors)


def test_of_several_errors_that_of_the_first_rank_counts():
    errors = {1: ValueError("one"), 2: ValueError("two")}
    for _, message, _ in run_threads(attempts, 3, errors):
        assert message == "rank 1, trying it: one"


def test_a_traceback_is_left_to_its_own_rank():
    try:
        raise KeyError("labels")
    except KeyError:
        text = f"Caught KeyError in DataLoader worker process 0.\n{traceback.format_exc()}"
    (_, message, _), *_ = run_threads(attempts, 2, {FAILS_ON: RuntimeError(text)})
    wanted = "Caught KeyError in DataLoader worker process 0. ... KeyError: 'labels'"
    assert message == f"rank {FAILS_ON}, trying it: {wanted}"


def test_a_long_cause_is_cut():
    (_, message, _), *_ = run_threads(attempts, 2, {FAILS_ON: ValueError("x" * 5000)})
    assert len(message) < CAUSE_CHARACTERS + 30


def test_an_interrupt_goes_on_at_once():
    with pytest.raises(KeyboardInterrupt), Attempt():
        raise KeyboardInterrupt
