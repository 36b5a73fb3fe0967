"""The rules of the device, one by one: what breaks one is found, and what keeps it is not."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hf_flexseq.kernels.upload import to_device
from tests.late_device.install import ops

CUDA = torch.device("cuda")


@contextmanager
def found(words):
    """Expect a finding."""
    with pytest.raises(RuntimeError, match=words):
        yield
    ops.forget_findings()


def ones(*shape):
    return torch.ones(shape, device=CUDA)


def on(stream):
    return torch.cuda.stream(stream)


# ---- where tensors are


def test_a_tensor_says_cuda_and_computes():
    x = torch.arange(12.0, device=CUDA, requires_grad=True)
    y = (x * 2 + 1).view(3, 4)[:, ::2].sum()
    y.backward()
    assert y.device == torch.device("cuda", 0)
    assert y.item() == 66
    assert x.grad.tolist() == [2, 0] * 6


def test_a_tensor_of_the_host_beside_one_of_the_device_is_refused():
    index = torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match="same device"):
        ones(3) + torch.ones(3)
    with found("wrong device: aten::index_select"):
        ones(3).index_select(0, index)
    assert (ones(3) * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number comes along


def test_a_copy_of_the_host_s_is_not_seen_on_the_device():
    host = torch.zeros(3)
    device = host.to(CUDA)
    host.fill_(7)
    assert device.tolist() == [0, 0, 0]


def test_memory_that_nobody_has_written_is_nan():
    assert torch.empty(5, device=CUDA).isnan().all()


def test_the_generator_of_the_device_makes_tensors_there():
    make = torch.Generator(CUDA).manual_seed(3)
    assert make.device.type == "cuda"
    x = torch.randn(4, generator=make, device=make.device)
    again = torch.randn(4, generator=make.manual_seed(3), device=CUDA)
    assert x.tolist() == again.tolist()


def test_random_numbers_have_a_state_of_their_own():
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state()
    x = torch.rand(3, device=CUDA)
    on_host = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device=CUDA).tolist() == x.tolist()
    assert torch.rand(3).tolist() != on_host.tolist()


# ---- streams


def test_a_read_on_another_stream_needs_a_wait():
    x = ones(8)
    side = torch.cuda.Stream()
    with on(side), found(r"missing wait: aten::add \[8\] on stream .* reads what aten::fill_"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x + 1
    with found(r"missing wait: aten::mul \[8\] on stream 0 reads what aten::add \[8\]"):
        y * 2
    torch.cuda.current_stream().wait_stream(side)
    assert (y * 2).tolist() == [4] * 8


def test_a_write_needs_a_wait_for_reads():
    x = ones(8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x + 1
    with found(r"missing wait: aten::zero_ .* writes what aten::add .* reads|aten::fill_"):
        x.zero_()
    torch.cuda.current_stream().wait_event(side.record_event())
    x.zero_()
    assert y.is_cuda


def test_an_event_orders_what_came_before_it():
    x = ones(4)
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record()
    x += 1
    side.wait_event(event)
    with on(side), found("missing wait"):
        x * 2
    event.record()
    side.wait_event(event)
    with on(side):
        x * 2
    torch.cuda.current_stream().wait_stream(side)


def test_a_host_that_has_waited_orders_all_streams():
    x = ones(4)
    torch.cuda.synchronize()
    with on(torch.cuda.Stream()):
        y = x + 1
        torch.cuda.current_stream().synchronize()
    assert y.tolist() == [2] * 4


def test_parts_of_a_tensor_are_told_apart():
    x = torch.zeros(6, 4, dtype=torch.bfloat16, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x[:, :2] += 1
    x.index_add_(0, torch.tensor([0, 3], device=CUDA), x.new_ones(2, 4))
    rows = torch.tensor([1, 2, 4, 5], device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    x[[0, 3]] += 0
    with on(side):
        x[:, 2:][1:3].add_(1)
        x.index_select(0, rows)
        with found("missing wait"):
            x[:, 3:] * 2
    torch.cuda.synchronize()


def test_autograd_waits_between_the_streams_of_the_forward():
    x = ones(4).requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    (y * 3).sum().backward()
    torch.cuda.synchronize()
    assert x.grad.tolist() == [6] * 4


# ---- memory that is used again


def freed_while_in_use(*, recorded=False, awaited=False):
    x = ones(8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        x * 2
    if recorded:
        x.record_stream(side)
    if awaited:
        torch.cuda.current_stream().wait_stream(side)
    del x
    return torch.empty(8, device=CUDA)


def test_memory_that_another_stream_uses_is_not_freed_early():
    with found(r"early reuse: 32 bytes that aten::mul \[8\] on stream"):
        freed_while_in_use()
    freed_while_in_use(recorded=True)
    freed_while_in_use(awaited=True)


def test_allocated_bytes_are_counted():
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1000, device=CUDA)
    assert torch.cuda.memory_allocated() - before == 4096
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4096


# ---- the host


def test_a_copy_to_the_host_arrives_when_it_is_awaited():
    x = ones(3)
    here = x.to("cpu", non_blocking=True)
    with found("host read before its copy was awaited: .* a copy to the host"):
        here.tolist()
        torch.cuda.synchronize()
    here = x.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert here.tolist() == [1, 1, 1]


def test_an_event_before_a_copy_does_not_bring_it():
    event = torch.cuda.Event()
    event.record()
    here = ones(3).to("cpu", non_blocking=True)
    event.synchronize()
    with found("host read before its copy was awaited"):
        here.tolist()
        torch.cuda.synchronize()


def test_a_pinned_source_stays_as_it_is_until_its_copy_is_done():
    host = torch.zeros(3).pin_memory()
    device = host.to(CUDA, non_blocking=True)
    assert host.tolist() == [0, 0, 0]  # it may be read
    with found("pinned source changed before its copy was awaited: .* a copy to the device"):
        host[0] = 7
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    host[1] = 7
    assert device.tolist() == [0, 0, 0]


def test_numpy_does_not_get_around_it():
    host = torch.zeros(3).pin_memory()
    host.to(CUDA, non_blocking=True)
    with found("pinned source changed"):
        host.numpy()[:] = np.ones(3)
        torch.cuda.synchronize()


def test_events_measure_when_the_host_has_waited():
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    ones(3)
    last.record()
    with found("host read before sync: elapsed_time"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def test_what_is_asked_for_is_late():
    event = torch.cuda.Event()
    ones(3)
    event.record()
    assert not event.query()
    assert event.query()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0])],
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=CUDA)),
        lambda x: torch.ones(3).to(CUDA),
        lambda x: torch.ones(3).to(CUDA, non_blocking=True),  # not pinned
        lambda x: torch.tensor([1.0], device=CUDA),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_host_waits(wait):
    x = ones(3)
    wait(x)
    assert ops.counts()["host waits"] >= 1
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="host wait"):
        wait(x)
    torch.cuda.set_sync_debug_mode("error")
    with found("host wait"):
        wait(x)


def test_the_host_does_not_wait():
    index = to_device(torch.tensor([0, 2]), CUDA)
    torch.cuda.set_sync_debug_mode("error")
    x = ones(3)
    x[index] = x[index] * 2
    x.masked_fill_(x > 3, 0.0)
    x[1:].copy_(x[:2].clone())
    x.repeat_interleave(2)
    assert "host waits" not in ops.counts()
