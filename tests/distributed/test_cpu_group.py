"""Exchanges of values on the CPU, a rank that does not come to one, and an error that one rank
alone has met: all ranks raise it, in one line."""

import math
import os
import re
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch

from hf_flexseq.distributed import gloo_cpu_group
from hf_flexseq.distributed.agreement import CAUSE_CHARACTERS, ErrorCapture
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.transport import LostRank
from tests.ranks import be_silent, give_up, join, run_ranks, run_threads

LOST, TIMEOUT_S = 2, 1


# ---- values


TOO_LONG = 2 * gloo_cpu_group.INLINE_BYTES  # integers, for the message of a meeting


def exchange_all(rank, world_size):
    """Everything a CPU group can do, each rank with something of another size."""
    return exchange(join().cpu_group, rank, world_size)


def exchange_all_by_collectives(rank, world_size):
    """The same in a group of more ranks than send values in their meetings."""
    with mock.patch.object(gloo_cpu_group, "INLINE_RANKS", 2):
        cpu_group = gloo_cpu_group.GlooCpuGroup(timedelta(seconds=60))
    return exchange(cpu_group, rank, world_size)


def exchange(cpu_group, rank, world_size):
    own = list(range(rank))  # rank 0 has nothing
    counts = list(range(world_size))  # so many rows to each rank: none to rank 0
    rows = torch.arange(2 * sum(counts)).view(-1, 2) + 100 * rank
    total = torch.tensor([float(rank), 1.0])
    cpu_group.all_reduce(total)
    cpu_group.barrier()
    return [
        cpu_group.gather_values(own),
        cpu_group.gather_values([rank] * rank * TOO_LONG),
        cpu_group.gather_values({"of": rank, "text": "x" * 100 * rank}),
        cpu_group.broadcast_value({"plan": "y" * 10} if rank == 0 else rank),
        cpu_group.broadcast_value("y" * TOO_LONG if rank == 0 else rank),
        cpu_group.broadcast_bytes(b"\x00plan\n" if rank == 0 else b""),
        cpu_group.gather_values([0.1 * rank, math.inf]),
        cpu_group.exchange_rows(rows, counts, [rank] * world_size).tolist(),
        total.tolist(),
    ]


def assert_exchanged(results):
    ranks = range(len(results))
    for rank, found in enumerate(results):
        own_rows = range(sum(range(rank)), sum(range(rank + 1)))  # those before are others'
        assert found == [
            [list(range(of)) for of in ranks],
            [[of] * of * TOO_LONG for of in ranks],
            [{"of": of, "text": "x" * 100 * of} for of in ranks],
            {"plan": "y" * 10},
            "y" * TOO_LONG,
            b"\x00plan\n",
            [[0.1 * of, math.inf] for of in ranks],
            [[100 * of + 2 * row, 100 * of + 2 * row + 1] for of in ranks for row in own_rows],
            [sum(ranks), len(results)],
        ]


def test_exchanges_of_threads():
    assert_exchanged(run_threads(exchange_all, 3))


@pytest.mark.processes
@pytest.mark.parametrize("function", [exchange_all, exchange_all_by_collectives])
def test_exchanges_of_processes(function):
    assert_exchanged(run_ranks(function, 3))


# ---- lost ranks


def exchange_until_one_is_lost(rank, world_size, exchange, dies):
    """How long this rank was left waiting, and with which words it gave up."""
    timeout = timedelta(seconds=30 if dies else TIMEOUT_S)  # that of the job is longer
    cpu_group = connect(torch.device("cpu"), timeout=timeout).cpu_group
    cpu_group.phase = "step 12, doing something"
    cpu_group.gather_values(rank)
    if rank == LOST:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        be_silent()
        return None
    if dies:
        time.sleep(0.1 * rank)  # some post before it is gone, some after
    calls = {
        "gather_values": lambda: cpu_group.gather_values(rank),
        "broadcast_bytes": lambda: cpu_group.broadcast_bytes(b"plan"),
        "exchange_rows": lambda: cpu_group.exchange_rows(torch.zeros(4, 1), [1] * 4, [1] * 4),
        "all_reduce": lambda: cpu_group.all_reduce(torch.ones(2)),
        "barrier": cpu_group.barrier,
    }
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        calls[exchange]()
    seconds = time.monotonic() - began
    give_up()
    return seconds, str(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "dies"),
    [
        ("gather_values", False),
        ("broadcast_bytes", True),
        ("exchange_rows", True),
        ("exchange_rows", False),
        ("all_reduce", False),
        ("barrier", True),
    ],
)
def test_the_others_name_the_rank_and_what_it_was_about(exchange, dies):
    may_die = (LOST,) if dies else ()
    found = run_ranks(exchange_until_one_is_lost, 4, exchange, dies, may_die=may_die)
    assert found.pop(LOST) is None
    assert all(seconds < (10 if dies else 4 * TIMEOUT_S) for seconds, _ in found), found
    for _, message in found:
        wanted = rf"rank \d: rank {LOST} did not answer in step 12, doing something: "
        assert re.match(wanted, message), message


# ---- errors of one rank


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


def test_a_rank_that_nobody_answers_raises_its_own_error():
    lost = LostRank("rank 1 did not answer")

    def unanswered(value):
        raise lost

    for own in (None, ValueError("no labels")):
        with ErrorCapture() as trying:
            if own is not None:
                raise own
        with pytest.raises((LostRank, ValueError)) as raised:
            trying.raise_on_all_ranks(unanswered, "trying it")
        assert raised.value is (own or lost)
