"""Ranks that are threads: what the transport holds them to, and the words in which it says so.
`tests/attention/test_planted_faults.py` breaks more of its rules."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_flexseq.distributed.transport import Message
from tests.matching import Launches
from tests.process_group import needs_new_names, run_threads_with_groups
from tests.threads import ThreadHub


def run(function, world_size=2, **options):
    return ThreadHub(world_size, **options).run(function)


def post(transport, tensor, *, tag=0, kind="everyone"):
    """Even ranks send a tensor to the next rank, odd ones receive from the one before."""
    lane = transport.open_lane(kind, [range(transport.world_size)])
    messages = [Message(tensor, transport.rank ^ 1, tag)]
    is_sender = transport.rank % 2 == 0
    sends, recvs = (messages, []) if is_sender else ([], messages)
    return transport.post(lane, sends=sends, recvs=recvs, label=lambda peer, sent: "the words")


# ---- rules


def expect_another(transport, elements=3, dtype=torch.float32):
    if transport.rank == 0:
        post(transport, torch.ones(3)).wait()
    else:
        post(transport, torch.empty(elements, dtype=dtype)).wait()


def end_early(transport):
    if transport.rank == 0:
        post(transport, torch.ones(3)).wait()


def use_lanes_in_another_order(transport):
    """Rank 0 sends on a and then on b, rank 1 receives on b and then on a."""
    kinds = "ab" if transport.rank == 0 else "ba"
    for pending in [post(transport, torch.ones(3), kind=kind) for kind in kinds]:
        pending.wait()


def use_tags_in_another_order(transport):
    tags = (0, 1) if transport.rank == 0 else (1, 0)
    for pending in [post(transport, torch.ones(3 + tag), tag=tag) for tag in tags]:
        pending.wait()


def call(transport, of_rank_0, of_rank_1):
    """Each rank calls what it is given of its group, on a tensor of the size that it is given."""
    group = transport.open_group([range(2)])
    chosen = (of_rank_0, of_rank_1)[transport.rank]
    if chosen is not None:
        name, size = chosen
        getattr(group, name)(torch.ones(size))


def expect_other_rows(transport):
    transport.cpu_group.exchange_rows(torch.zeros(3, 1), [1, 2], [transport.rank + 1, 1])


def expect_other_elements(transport):
    group = transport.open_group([range(2)])
    received = [1 + transport.rank, 1]  # rank 1 expects two elements of rank 0
    group.all_to_all(torch.empty(sum(received)), torch.ones(2), received, [1, 1]).wait()


def miss_the_barrier(transport):
    if transport.rank == 0:
        transport.cpu_group.barrier()


def fail(transport):
    if transport.rank == 1:
        raise KeyError("mine")
    post(transport, torch.empty(2)).wait()


EXPECTS = r"rank 0 sends the words \(0, 3, .*but rank 1 expects"
BY_TAG, BY_LANE, ONE_QUEUE = Launches.BY_TAG, Launches.BY_LANE, Launches.ONE_QUEUE


@pytest.mark.parametrize(
    ("launches", "function", "words"),
    [
        (BY_LANE, partial(expect_another, elements=4), EXPECTS),
        (ONE_QUEUE, partial(expect_another, dtype=torch.int32), EXPECTS),
        (BY_TAG, end_early, r"after the end of ranks \[1\]: rank 0 could not send to rank 1 the"),
        (ONE_QUEUE, use_lanes_in_another_order, "no rank can go on: .*; rank 1 could not"),
        (BY_LANE, use_tags_in_another_order, "the order of messages differs"),
        (BY_LANE, partial(call, of_rank_0=("all_reduce", 2), of_rank_1=("all_reduce", 3)), "[3]"),
        (BY_LANE, partial(call, of_rank_0=("all_reduce", 2), of_rank_1=("broadcast", 2)), "comes"),
        (BY_LANE, partial(call, of_rank_0=("all_reduce", 2), of_rank_1=None), "is in all_reduce"),
        (BY_LANE, expect_other_rows, r"rank 1 expects \[2, 1\] rows and is sent \[2, 2\]"),
        (ONE_QUEUE, expect_other_elements, r"rank 1 gets 1 elements in all_to_all .* expects 2"),
        (BY_LANE, miss_the_barrier, "rank 0 is in exchange 0 of the CPU group"),
        (BY_LANE, fail, "mine"),
    ],
)
def test_what_breaks_a_rule_is_named(launches, function, words):
    with pytest.raises((RuntimeError, AssertionError, KeyError), match=words):
        run(function, launches=launches)


# ---- the course of events


def course(seed):
    """The order in which ranks come to their posts."""
    events = []

    def rank(transport):
        for step in range(4):
            events.append((transport.rank, step))
            post(transport, torch.ones(2), tag=step).wait()

    run(rank, 4, seed=seed)
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
