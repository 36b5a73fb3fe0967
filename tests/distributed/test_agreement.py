"""An error that one rank alone has met is raised on all of them, in one line."""

import pytest

from hf_flexseq.distributed.agreement import CAUSE_CHARACTERS, ErrorCapture
from tests.ranks import join, run_threads


def attempts(rank, world_size, errors):
    """What a rank raises whose attempt ends in the error under its number, if there is one."""
    cpu_group = join().cpu_group
    with ErrorCapture() as trying:
        if rank in errors:
            raise errors[rank]
    try:
        trying.raise_on_all_ranks(cpu_group.gather_values, "trying it")
    except (ValueError, RuntimeError) as error:
        return type(error), str(error), error.__cause__
    return None


IN_WORKER = (
    "Caught KeyError in worker 0.\nTraceback:\n  File 'x.py', line 1\n\nKeyError: 'labels'\n"
)


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (ValueError("no labels"), ValueError, "no labels"),
        (NotImplementedError("not there"), NotImplementedError, "not there"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, "'utf-8' codec"),
        (RuntimeError("out of memory"), RuntimeError, "out of memory"),
        (KeyError("labels"), RuntimeError, "KeyError: 'labels'"),
        (OSError(28, "No space left"), RuntimeError, "OSError: [Errno 28] No space left"),
        # a traceback is left to its own rank
        (RuntimeError(IN_WORKER), RuntimeError, "Caught KeyError in worker 0. ... KeyError: 'lab"),
        (ValueError("x" * 5000), ValueError, "x" * (CAUSE_CHARACTERS - 3) + "..."),
    ],
)
def test_all_ranks_raise_one_line_that_names_the_first_rank_and_its_cause(error, kind, cause):
    found = run_threads(attempts, 3, {1: error, 2: ValueError("another one")})
    for own_kind, message, _ in found:
        assert own_kind is kind
        assert message.startswith(f"rank 1, trying it: {cause}")
    assert len({message for _, message, _ in found}) == 1
    assert "\n" not in found[0][1]
    assert [chained for *_, chained in found][:2] == [None, error]


def test_nothing_is_raised_where_nobody_failed():
    assert run_threads(attempts, 3, {}) == [None] * 3


def test_ranks_that_failed_alike_raise_their_own_errors():
    with pytest.raises(KeyError, match="^'labels'$"):
        run_threads(attempts, 2, {rank: KeyError("labels") for rank in range(2)})
