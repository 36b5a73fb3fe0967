"""Faults that are planted into the code are caught by the random runs, in words that lead to them.

Each fault is one that a careful change could make, on rank 0 alone: a wait left out, two exchanges
posted the other way round, a buffer used again too early, a tag that one side computes
differently, a second wait, a receive left out, a reduction one micro-batch early.
"""

import pytest

from hf_flexseq.attention.replay import Replay
from hf_flexseq.distributed.links import StageLink
from hf_flexseq.program import ring_exchanges
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.ring_exchanges import Fetches
from tests import random_runs
from tests.matching import Launches
from tests.random_runs import (
    MOST_ERROR,
    AttentionRun,
    PipelineRun,
    draw,
    error_of,
)
from tests.ranks import this_rank
from tests.threads import ThreadPending, ThreadTransport

MOST_RUNS = 40  # among the first so many a fault must show
ORDERED = (Launches.BY_LANE, Launches.ONE_QUEUE)
FAULTS = []  # (where, name, what rank 0 does instead, words, launches)


def fault(owner, name, words, launches=tuple(Launches)):
    """Plant what follows as the method or function of this name, on rank 0."""

    def planted(function):
        for one in launches:
            values = (owner, name, function, words, one)
            FAULTS.append(pytest.param(*values, id=function.__name__))
        return function

    return planted


@fault(Replay, "wait", "nobody has waited for what was posted: rank 0, ")
def leave_out_a_wait(wait, run, number):
    del run.pending[number]


@fault(Replay, "post", "off by nan")
def read_before_the_wait(post, run, *tensors_and_post):
    return tuple(x.clone() for x in post(run, *tensors_and_post))


@fault(
    Fetches,
    "post_first",
    "no rank can go on: rank 0 .*; rank .* could not|the order of messages differs",
    ORDERED,
)
def swap_the_first_fetches_of_a_ring(post_first, fetches, counts):
    posts = []
    with pytest.MonkeyPatch.context() as collecting:
        collecting.setattr(
            ring_exchanges, "post", lambda b, exchanges: posts.append((b, exchanges))
        )
        post_first(fetches, counts)
    for b, exchanges in reversed(posts):
        ring_exchanges.post(b, exchanges)


@fault(ThreadTransport, "post", "rank 0 has changed .* while it was being sent to rank")
def use_a_buffer_again(post, transport, lane, *, sends, **options):
    pending = post(transport, lane, sends=sends, **options)
    for message in sends:
        message.tensor.add_(1)
    return pending


@fault(Channel, "tag", "rank 0 could not .*; rank . could not .* rank 0|but rank . expects")
def compute_another_tag(tag, channel, message):
    return tag(channel, message + 1)


@fault(ThreadPending, "wait", "this was already waited for")
def wait_twice(wait, pending):
    wait(pending)
    wait(pending)


@fault(
    ThreadTransport,
    "post",
    "could not (receive .*, or )?send to rank 0 .*, of the .* group|but rank . expects",
)
def leave_out_a_receive(post, transport, lane, *, recvs, **options):
    return post(transport, lane, recvs=recvs[:-1], **options)


@fault(
    random_runs,
    "reduces_after",
    "rank 0 (is in|comes to) all_reduce|comes to all_reduce|off by",
)
def reduce_early(reduces_after, index, micro_batches):
    return index == max(micro_batches - 2, 0)


def runs_with(launches, kind, numbers):
    """The runs of a kind with these launches."""
    drawn = [draw(number) for number in numbers]
    return [run for run in drawn if run.launches is launches and isinstance(run, kind)]


def check_all(runs):
    for run in runs:
        error = error_of(run)
        if not error <= MOST_ERROR:
            raise AssertionError(f"off by {error}")


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "function", "words", "launches"), FAULTS)
def test_a_planted_fault_is_caught(monkeypatch, owner, name, function, words, launches):
    original = getattr(owner, name)

    def planted(*args, **options):
        if this_rank() == 0:
            return function(original, *args, **options)
        return original(*args, **options)

    runs = runs_with(launches, AttentionRun, range(MOST_RUNS))
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((RuntimeError, AssertionError), match=words):
        check_all(runs)


def test_a_stage_that_posts_a_receive_too_many_is_caught(monkeypatch):
    numbers = range(random_runs.PIPELINE_EVERY - 1, 3000, random_runs.PIPELINE_EVERY)
    runs = runs_with(Launches.ONE_QUEUE, PipelineRun, numbers)
    monkeypatch.setattr(StageLink, "is_ordered", False)
    words = "no rank can go on: .* could not receive from rank .* of a pipeline"
    with pytest.raises((RuntimeError, AssertionError), match=words):
        check_all(runs)
