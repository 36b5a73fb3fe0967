"""Faults that are planted into the code are caught by the random runs, in words that lead to them.

Each fault is one that a careful change could make: a wait left out, two exchanges posted the other
way round on one rank, a buffer used again too early, a tag that one side computes differently, a
second wait, a receive left out, a reduction one micro-batch early.
"""

import pytest

from hf_flexseq.attention.replay import Replay
from hf_flexseq.distributed.links import StageLink
from hf_flexseq.program import ring
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.ring import Fetches
from tests import random_runs
from tests.matching import Launches
from tests.random_runs import MOST_ERROR, AttentionRun, PipelineRun, draw, error_of
from tests.ranks import this_rank
from tests.threads import ThreadPending, ThreadTransport

MOST_RUNS = 40  # among the first so many a fault must show


def leave_out_a_wait(monkeypatch):
    """Rank 0 goes on before what it has posted is over."""
    wait = Replay.wait

    def left_out(run, number):
        if this_rank() == 0:
            del run.pending[number]
        else:
            wait(run, number)

    monkeypatch.setattr(Replay, "wait", left_out)


def read_before_the_wait(monkeypatch):
    """Rank 0 reads what is to be received when it posts, and not after the wait."""
    post = Replay.post

    def early(run, *tensors_and_post):
        made = post(run, *tensors_and_post)
        return made if this_rank() else tuple(x.clone() for x in made)

    monkeypatch.setattr(Replay, "post", early)


def swap_fetches(monkeypatch):
    """Rank 0 posts the first fetches of a ring the other way round."""
    post_first = Fetches.post_first

    def swapped(fetches, counts):
        if this_rank() != 0:
            post_first(fetches, counts)
            return
        posts = []
        with pytest.MonkeyPatch.context() as collecting:
            collecting.setattr(ring, "post", lambda b, exchanges: posts.append((b, exchanges)))
            post_first(fetches, counts)
        for b, exchanges in reversed(posts):
            ring.post(b, exchanges)

    monkeypatch.setattr(Fetches, "post_first", swapped)


def use_a_buffer_again(monkeypatch):
    """Rank 0 writes to what it sends before it has been sent."""
    post = ThreadTransport.post

    def changed(transport, lane, *, sends, **options):
        pending = post(transport, lane, sends=sends, **options)
        if this_rank() == 0:
            for message in sends:
                message.tensor.add_(1)
        return pending

    monkeypatch.setattr(ThreadTransport, "post", changed)


def compute_another_tag(monkeypatch):
    """Rank 0 gives its messages other tags than its peers do."""
    tag = Channel.tag
    monkeypatch.setattr(
        Channel, "tag", lambda channel, message: tag(channel, message + (this_rank() == 0))
    )


def wait_twice(monkeypatch):
    """Rank 0 waits for every post twice."""
    wait = ThreadPending.wait

    def again(pending):
        wait(pending)
        if this_rank() == 0:
            wait(pending)

    monkeypatch.setattr(ThreadPending, "wait", again)


def leave_out_a_receive(monkeypatch):
    """Rank 0 does not post the last receive of a post."""
    post = ThreadTransport.post

    def without(transport, lane, *, sends, recvs, **options):
        kept = recvs[:-1] if this_rank() == 0 else recvs
        return post(transport, lane, sends=sends, recvs=kept, **options)

    monkeypatch.setattr(ThreadTransport, "post", without)


def reduce_early(monkeypatch):
    """Rank 0 sums gradients over all ranks one micro-batch early."""

    def early(index, micro_batches):
        last = micro_batches - 1
        return index == (max(last - 1, 0) if this_rank() == 0 else last)

    monkeypatch.setattr(random_runs, "reduces_after", early)


def receive_ahead(monkeypatch):
    """A stage posts a receive more than it needs, although posts are carried out in order."""
    monkeypatch.setattr(StageLink, "is_ordered", False)


FAULTS = {
    leave_out_a_wait: "nobody has waited for what was posted: rank 0, ",
    read_before_the_wait: "off by nan",
    swap_fetches: "no rank can go on: rank 0 .*; rank .* could not|the order of messages differs",
    use_a_buffer_again: "rank 0 has changed .* while it was being sent to rank",
    compute_another_tag: "rank 0 could not .*; rank . could not .* rank 0|but rank . expects",
    wait_twice: "this was already waited for",
    leave_out_a_receive: (
        "could not (receive .*, or )?send to rank 0 .*, of the .* group|but rank . expects"
    ),
    reduce_early: "rank 0 (is in|comes to) all_reduce|comes to all_reduce|off by",
    receive_ahead: "no rank can go on: .* could not receive from rank .* of a pipeline",
}
ORDERED = (Launches.BY_LANE, Launches.ONE_QUEUE)


def runs_with(launches, kind):
    """The first runs of a kind with these launches."""
    numbers = range(MOST_RUNS)
    if kind is PipelineRun:
        numbers = range(random_runs.PIPELINE_EVERY - 1, 3000, random_runs.PIPELINE_EVERY)
    drawn = [draw(number) for number in numbers]
    return [run for run in drawn if run.launches is launches and isinstance(run, kind)]


def test_without_a_fault_they_pass():
    for launches in Launches:
        for run in runs_with(launches, AttentionRun)[:3]:
            assert error_of(run) <= MOST_ERROR


@pytest.mark.parametrize(
    ("fault", "launches", "kind"),
    [
        *((leave_out_a_wait, launches, AttentionRun) for launches in Launches),
        *((read_before_the_wait, launches, AttentionRun) for launches in Launches),
        *((swap_fetches, launches, AttentionRun) for launches in ORDERED),
        *((use_a_buffer_again, launches, AttentionRun) for launches in Launches),
        *((compute_another_tag, launches, AttentionRun) for launches in Launches),
        *((wait_twice, launches, AttentionRun) for launches in Launches),
        *((leave_out_a_receive, launches, AttentionRun) for launches in Launches),
        *((reduce_early, launches, AttentionRun) for launches in Launches),
        (receive_ahead, Launches.ONE_QUEUE, PipelineRun),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, fault, launches, kind):
    runs = runs_with(launches, kind)
    fault(monkeypatch)

    def errors():
        for run in runs:
            error = error_of(run)
            if not error <= MOST_ERROR:
                raise AssertionError(f"off by {error}")

    with pytest.raises((RuntimeError, AssertionError), match=FAULTS[fault]):
        errors()
