"""Ranks that are threads: what the transport holds them to, and the words in which it says so."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_flexseq.distributed.transport import Message
from tests.process_group import needs_new_names, run_threads_with_groups
from tests.threads import ThreadHub


def post(transport, tensor, *, tag=0):
    """Even ranks send a tensor to the next rank, odd ones receive from the one before."""
    lane = transport.open_lane("everyone", [range(transport.world_size)])
    messages = [Message(tensor, transport.rank ^ 1, tag)]
    is_sender = transport.rank % 2 == 0
    sends, recvs = (messages, []) if is_sender else ([], messages)
    return transport.post(lane, sends=sends, recvs=recvs, label=lambda peer, sent: "the words")


# ---- rules


def leave_out_a_wait(transport):
    pending = post(transport, torch.ones(3))
    if transport.rank == 1:
        pending.wait()


def read_before_the_wait(transport):
    tensor = torch.ones(2)
    pending = post(transport, tensor)
    read = tensor.tolist()
    pending.wait()
    assert read == tensor.tolist(), f"{read} was read"


def use_a_buffer_again(transport):
    tensor = torch.ones(2)
    pending = post(transport, tensor)
    if transport.rank == 0:
        tensor.add_(1)
    pending.wait()


def wait_twice(transport):
    pending = post(transport, torch.ones(2))
    pending.wait()
    pending.wait()


def count_tags_differently(transport):
    post(transport, torch.ones(2), tag=transport.rank).wait()


def end_early(transport):
    if transport.rank == 0:
        post(transport, torch.ones(3)).wait()


def call(transport, of_rank_0, of_rank_1):
    """Each rank calls what it is given of its group, on a tensor of the size that it is given."""
    group = transport.open_group([range(2)])
    chosen = (of_rank_0, of_rank_1)[transport.rank]
    if chosen is not None:
        name, size = chosen
        getattr(group, name)(torch.ones(size))


def expect_other_rows(transport):
    transport.cpu_group.exchange_rows(torch.zeros(3, 1), [1, 2], [transport.rank + 1, 1])


def fail(transport):
    if transport.rank == 1:
        raise KeyError("mine")
    post(transport, torch.empty(2)).wait()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (leave_out_a_wait, "nobody has waited for what was posted: rank 0, the words to rank 1"),
        (read_before_the_wait, r"\[nan, nan\] was read"),
        (use_a_buffer_again, "rank 0 has changed the words while it was being sent to rank 1"),
        (wait_twice, "this was already waited for"),
        (count_tags_differently, "but rank 1 expects .*: the order of messages differs"),
        (end_early, r"after the end of ranks \[1\]: rank 0 could not send to rank 1 the"),
        (partial(call, of_rank_0=("all_reduce", 2), of_rank_1=("all_reduce", 3)), "[3]"),
        (partial(call, of_rank_0=("all_reduce", 2), of_rank_1=("broadcast", 2)), "comes"),
        (partial(call, of_rank_0=("all_reduce", 2), of_rank_1=None), "is in all_reduce"),
        (expect_other_rows, r"rank 1 expects \[2, 1\] rows and is sent \[2, 2\]"),
        (fail, "mine"),
    ],
)
def test_what_breaks_a_rule_is_named(function, words):
    with pytest.raises((RuntimeError, AssertionError, KeyError), match=words):
        ThreadHub(2).run(function)


# ---- the course of events


def course(seed):
    """The order in which ranks come to their posts."""
    events = []

    def rank(transport):
        for step in range(4):
            events.append((transport.rank, step))
            post(transport, torch.ones(2), tag=step).wait()

    ThreadHub(4, seed=seed).run(rank)
    return events


def test_a_seed_stands_for_a_course_of_events():
    courses = [course(seed) for seed in range(5)]
    assert [course(seed) for seed in range(5)] == courses
    assert len({tuple(events) for events in courses}) > 3
    assert course(None) == course(None)


# ---- torch's process group over it; `tests/hf/test_one_order.py` reduces gradients by it


def reduce_asynchronously(rank, world_size):
    x = torch.full((3,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    before = x.clone()
    work.wait()
    work.wait()  # as torch does in some places
    return before, x


@needs_new_names
def test_what_is_reduced_cannot_be_read_before_the_wait():
    for before, after in run_threads_with_groups(reduce_asynchronously, 2):
        assert before.isnan().all()
        assert (after == 1).all()
