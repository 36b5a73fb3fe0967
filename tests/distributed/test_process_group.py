"""The process group between threads: its collectives against sums and slices written out, and it
holds torch to the rules of the transport."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.matching import Launches
from tests.process_group import needs_new_names, run_threads_with_groups

pytestmark = needs_new_names


def own(rank):
    return torch.arange(6.0, dtype=torch.float64).view(3, 2) * 10**rank


def empty(rows):
    return torch.empty(rows, 2, dtype=torch.float64)


def every_collective(rank, world_size):
    summed, average, copied = own(rank), own(rank), own(rank)
    dist.all_reduce(summed)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.broadcast(copied, 1)
    parts, whole = [empty(3) for _ in range(world_size)], empty(9)
    dist.all_gather(parts, own(rank))
    dist.all_gather_single(whole, own(rank))
    scattered, scattered_single, exchanged = empty(1), empty(1), empty(3)
    dist.reduce_scatter(scattered, list(own(rank).split(1)))
    dist.reduce_scatter_single(scattered_single, own(rank))
    dist.all_to_all_single(exchanged, own(rank))
    dist.barrier()
    return [summed, average, copied, *parts, whole, scattered, scattered_single, exchanged]


@pytest.mark.parametrize("launches", Launches)
def test_every_collective_does_what_its_name_says(launches):
    inputs = [own(rank) for rank in range(3)]
    total = sum(inputs)
    for seed in (None, 1, 2):
        results = run_threads_with_groups(every_collective, 3, launches=launches, seed=seed)
        for rank, found in enumerate(results):
            scattered = [total[rank : rank + 1]] * 2
            exchanged = torch.stack([of_rank[rank] for of_rank in inputs])
            wanted = [total, total / 3, own(1), *inputs, torch.cat(inputs), *scattered, exchanged]
            torch.testing.assert_close(found, wanted)


def asynchronous(rank, world_size):
    x = own(rank)
    work = dist.all_reduce(x, async_op=True)
    before = x.clone()
    work.wait()
    work.wait()  # as torch does in some places
    return before, x


def test_what_is_reduced_cannot_be_read_before_the_wait():
    for before, after in run_threads_with_groups(asynchronous, 2):
        assert before.isnan().all()
        torch.testing.assert_close(after, own(0) + own(1))


def two_orders(rank, world_size):
    for size in (4, 6) if rank == 0 else (6, 4):
        dist.all_reduce(torch.ones(size))


def test_collectives_in_another_order_are_named_on_both_sides():
    with pytest.raises(RuntimeError, match=r"rank \d comes to allreduce .* where rank \d comes"):
        run_threads_with_groups(two_orders, 2)


def ddp_gradients(rank, world_size):
    torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    for _ in range(2):  # buckets are made anew after the first one
        model.zero_grad()
        ddp(torch.full((1, 3), 1.0 + rank, dtype=torch.float64)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("seed", [None, 1])
def test_ddp_reduces_over_it(seed):
    results = run_threads_with_groups(ddp_gradients, 3, launches=Launches.ONE_QUEUE, seed=seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).double()
    inputs = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 3)
    (model(inputs).sum() / 3).backward()
    for gradients in results:
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])
