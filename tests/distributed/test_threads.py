"""Ranks that are threads: what the transport holds them to, and the words in which it says so."""

import time

import pytest
import torch

from hf_flexseq.distributed.transport import Message
from tests.matching import Launches, poison
from tests.threads import ThreadHub

EVERYONE = "everyone"
ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
)


def run(function, world_size=2, **options):
    return ThreadHub(world_size, **options).run(function)


def lane_of(transport, kind=EVERYONE):
    return transport.open_lane(kind, [range(transport.world_size)])


def label(peer, sent):
    return "the words"


def send(transport, tensor, peer, *, tag=0, kind=EVERYONE, scratch=False):
    message = Message(tensor, peer, tag, scratch)
    return transport.post(lane_of(transport, kind), sends=[message], recvs=[], label=label)


def recv(transport, tensor, peer, *, tag=0, kind=EVERYONE):
    message = Message(tensor, peer, tag)
    return transport.post(lane_of(transport, kind), sends=[], recvs=[message], label=label)


# ---- data


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("dtype", [*ALL_DTYPES, torch.uint8, torch.bool])
def test_what_is_sent_arrives(launches, dtype):
    def rank(transport):
        if transport.rank == 0:
            send(transport, torch.tensor([1, 0, 1], dtype=dtype), 1).wait()
            return None
        received = torch.empty(3, dtype=dtype)
        recv(transport, received, 0).wait()
        return received

    _, received = run(rank, launches=launches)
    assert torch.equal(received, torch.tensor([1, 0, 1], dtype=dtype))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_what_is_received_is_poison_until_it_is_waited_for(dtype):
    def rank(transport):
        received = torch.ones(3, dtype=dtype)
        if transport.rank == 0:
            pending = send(transport, received, 1)
        else:
            pending = recv(transport, received, 0)
        transport.cpu_group.barrier()
        early = received.clone()
        pending.wait()
        return early, received

    _, (early, received) = run(rank)
    if dtype.is_floating_point:
        assert early.isnan().all()
    else:
        assert (early == torch.iinfo(dtype).min).all()
    assert (received == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_poisoned_bytes_are_nan_whatever_they_are_read_as(dtype):
    parcel = torch.zeros(16, dtype=torch.uint8)
    poison(parcel)
    assert parcel.view(dtype).isnan().all()


def test_a_scratch_tensor_is_poison_once_it_was_sent():
    def rank(transport):
        if transport.rank == 0:
            tensor = torch.ones(3)
            send(transport, tensor, 1, scratch=True).wait()
            return tensor
        received = torch.empty(3)
        recv(transport, received, 0).wait()
        return received

    sent, received = run(rank)
    assert sent.isnan().all()
    assert (received == 1).all()


# ---- rules


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_tensor_that_changes_while_it_is_sent_is_named(dtype):
    def rank(transport):
        if transport.rank == 0:
            tensor = torch.ones(3, dtype=dtype)
            pending = send(transport, tensor, 1)
            tensor[1] = 0
            pending.wait()
        else:
            recv(transport, torch.empty(3, dtype=dtype), 0).wait()

    with pytest.raises(
        RuntimeError, match="rank 0 has changed the words while it was being sent to rank 1"
    ):
        run(rank)


def test_a_second_wait_is_refused():
    def rank(transport):
        if transport.rank == 0:
            pending = send(transport, torch.ones(3), 1)
        else:
            pending = recv(transport, torch.empty(3), 0)
        pending.wait()
        pending.wait()

    with pytest.raises(AssertionError, match="already waited for"):
        run(rank)


def test_a_post_without_a_wait_is_named():
    def rank(transport):
        if transport.rank == 0:
            send(transport, torch.ones(3), 1).wait()
        else:
            recv(transport, torch.empty(3), 0)

    with pytest.raises(
        RuntimeError, match="nobody has waited for .*rank 1, the words from rank 0"
    ):
        run(rank)


@pytest.mark.parametrize("launches", [Launches.BY_LANE, Launches.ONE_QUEUE])
@pytest.mark.parametrize(
    ("tag", "elements", "dtype"),
    [(1, 3, torch.float32), (0, 4, torch.float32), (0, 3, torch.int32)],
)
def test_messages_that_do_not_fit_are_named_by_both_sides(launches, tag, elements, dtype):
    def rank(transport):
        if transport.rank == 0:
            send(transport, torch.ones(3), 1).wait()
        else:
            recv(transport, torch.empty(elements, dtype=dtype), 0, tag=tag).wait()

    with pytest.raises(RuntimeError, match=r"rank 0 sends the words \(0, 3, .*but rank 1 expects"):
        run(rank, launches=launches)


def test_a_receive_that_nobody_posts_is_a_deadlock_that_names_who_waits():
    def rank(transport):
        if transport.rank == 0:
            send(transport, torch.ones(3), 1, tag=5).wait()
        else:
            recv(transport, torch.empty(3), 0, tag=6).wait()

    with pytest.raises(RuntimeError, match="no rank can go on: ") as raised:
        run(rank, launches=Launches.BY_TAG)
    assert "rank 0 could not send to rank 1 the words" in str(raised.value)
    assert "rank 1 could not receive from rank 0 the words" in str(raised.value)


def test_who_has_ended_is_named_too():
    def rank(transport):
        if transport.rank == 0:
            send(transport, torch.ones(3), 1).wait()

    with pytest.raises(RuntimeError, match=r"after the end of ranks \[1\]: rank 0 could not send"):
        run(rank)


def both_lanes(transport):
    """Rank 0 sends on a and then on b, rank 1 receives on b and then on a."""
    tensors = {kind: torch.ones(3) for kind in "ab"}
    if transport.rank == 0:
        pending = [send(transport, tensors[kind], 1, kind=kind) for kind in "ab"]
    else:
        pending = [recv(transport, tensors[kind], 0, kind=kind) for kind in "ba"]
    for post in pending:
        post.wait()


def test_lanes_are_independent_unless_there_is_one_queue():
    run(both_lanes, launches=Launches.BY_TAG)
    run(both_lanes, launches=Launches.BY_LANE)
    with pytest.raises(RuntimeError, match=r"no rank can go on: rank 0 .*; rank 1 could not"):
        run(both_lanes, launches=Launches.ONE_QUEUE)


def test_only_tags_allow_messages_in_another_order():
    def rank(transport):
        tensors = [torch.ones(3), torch.ones(4)]
        if transport.rank == 0:
            pending = [send(transport, tensors[n], 1, tag=n) for n in (0, 1)]
        else:
            pending = [recv(transport, tensors[n], 0, tag=n) for n in (1, 0)]
        for post in pending:
            post.wait()

    run(rank, launches=Launches.BY_TAG)
    with pytest.raises(RuntimeError, match="the order of messages differs"):
        run(rank, launches=Launches.BY_LANE)


def test_capabilities_say_whether_order_counts():
    for launches in Launches:
        by_rank = run(lambda transport: transport.capabilities, launches=launches)
        assert {found.ordered for found in by_rank} == {launches is not Launches.BY_TAG}


# ---- collectives


@pytest.mark.parametrize("launches", Launches)
def test_collectives_give_every_rank_its_part(launches):
    def rank(transport):
        group = transport.open_group([range(3)])
        summed = torch.full((2,), float(transport.rank))
        group.all_reduce(summed)
        first = torch.full((2,), transport.rank)
        group.broadcast(first)
        # rank r sends r + 1 elements to everyone
        sent = torch.full((3 * (transport.rank + 1),), transport.rank)
        received = torch.empty(6, dtype=torch.int64)
        group.all_to_all(received, sent, [1, 2, 3], [transport.rank + 1] * 3).wait()
        return summed.tolist(), first.tolist(), received.tolist()

    found = run(rank, 3, launches=launches, seed=1)
    assert found == [([3.0, 3.0], [0, 0], [0, 1, 1, 2, 2, 2])] * 3


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.ones(3), r"all_reduce of torch.float32 \[3\]"),
        (torch.ones(2, dtype=torch.float64), r"all_reduce of torch.float64 \[2\]"),
    ],
)
def test_collectives_that_differ_are_named(tensor, what):
    def rank(transport):
        group = transport.open_group([range(2)])
        group.all_reduce(torch.ones(2) if transport.rank == 0 else tensor)

    with pytest.raises(RuntimeError, match=what):
        run(rank)


def test_another_collective_is_named():
    def rank(transport):
        group = transport.open_group([range(2)])
        if transport.rank == 0:
            group.all_reduce(torch.ones(2))
        else:
            group.broadcast(torch.ones(2))

    with pytest.raises(
        RuntimeError, match="comes to (all_reduce|broadcast).* comes to (broadcast|all_reduce)"
    ):
        run(rank)


def test_a_collective_that_a_rank_leaves_out_is_named():
    def rank(transport):
        if transport.rank == 0:
            transport.open_group([range(2)]).all_reduce(torch.ones(2))

    with pytest.raises(RuntimeError, match=r"rank 0 is in all_reduce of .* of ranks \[0, 1\]"):
        run(rank)


# ---- the host


def test_the_host_exchanges_values():
    def rank(transport):
        cpu_group = transport.cpu_group
        mine = transport.rank
        cpu_group.barrier()
        # [rows, width]: one row for rank 0, two for rank 1
        rows = torch.arange(6).view(3, 2) + 10 * mine
        received = cpu_group.exchange_rows(rows, [1, 2], [mine + 1] * 2)
        total = torch.tensor([mine + 1])
        cpu_group.all_reduce(total)
        return (
            cpu_group.gather_ints([mine] * mine),
            cpu_group.gather_values({"rank": mine}),
            cpu_group.broadcast_value(f"of rank {mine}"),
            received.tolist(),
            total.tolist(),
        )

    first, second = run(rank, seed=3)
    shared = ([[], [1]], [{"rank": 0}, {"rank": 1}], "of rank 0")
    assert first == (*shared, [[0, 1], [10, 11]], [3])
    assert second == (*shared, [[2, 3], [4, 5], [12, 13], [14, 15]], [3])


def test_ranks_that_expect_other_numbers_of_rows_are_refused():
    def rank(transport):
        transport.cpu_group.exchange_rows(torch.zeros(3, 1), [1, 2], [transport.rank + 1, 1])

    with pytest.raises(AssertionError, match=r"rank 1 expects \[2, 1\] rows and is sent \[2, 2\]"):
        run(rank)


def test_a_rank_that_does_not_come_to_the_host_is_missed():
    def rank(transport):
        if transport.rank == 0:
            transport.cpu_group.barrier()

    with pytest.raises(RuntimeError, match="rank 0 is in exchange 0 of the CPU group"):
        run(rank)


# ---- the course of events


def course(seed):
    """The order in which ranks come to their posts."""
    events = []

    def rank(transport):
        for step in range(4):
            events.append((transport.rank, step))
            tensor = torch.ones(2)
            if transport.rank % 2 == 0:
                send(transport, tensor, transport.rank + 1, tag=step).wait()
            else:
                recv(transport, tensor, transport.rank - 1, tag=step).wait()

    run(rank, 4, seed=seed)
    return events


def test_a_seed_stands_for_a_course_of_events():
    courses = [course(seed) for seed in range(5)]
    assert [course(seed) for seed in range(5)] == courses
    assert len({tuple(events) for events in courses}) > 3
    assert course(None) == course(None)


def test_the_first_error_ends_all_ranks():
    def rank(transport):
        if transport.rank == 1:
            raise KeyError("mine")
        recv(transport, torch.empty(2), 1).wait()

    with pytest.raises(KeyError, match="mine"):
        run(rank, 3)


def test_a_rank_that_keeps_its_turn_is_found_and_shown():
    def sleeper(transport):
        if transport.rank == 1:
            time.sleep(1.0)

    with pytest.raises(RuntimeError, match="kept its turn for 0.2 s") as raised:
        ThreadHub(2).run(sleeper, seconds=0.2)
    assert "rank 1 is here" in str(raised.value)
    assert "sleeper" in str(raised.value)
    time.sleep(1.0)  # the thread ends


def test_many_short_turns_are_no_hang():
    def rank(transport):
        for _ in range(8):
            time.sleep(0.1)
            transport.cpu_group.barrier()

    ThreadHub(2).run(rank, seconds=0.5)


def test_a_rank_has_one_thread_of_torch_and_the_process_keeps_its_own():
    torch.set_num_threads(2)
    try:
        assert ThreadHub(3).run(lambda transport: torch.get_num_threads()) == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
