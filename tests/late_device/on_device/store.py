"""Tensors that go to the host and come back on a stream of their own."""

import torch

from tests.late_device import scenarios
from tests.late_device.install import ops
from tests.memory.test_store import backward, forward, make_store

CUDA = torch.device("cuda")


def test_they_come_back_and_nobody_waits():
    torch.cuda.set_sync_debug_mode("error")
    scenarios.run_store()
    scenarios.run_store_with_other_work()


def test_they_are_the_same_bits_step_by_step():
    store = make_store(device=CUDA)
    for tokens in (300, 7, 120):
        handles = forward(store, device=CUDA, tokens=tokens)
        backward(handles, device=CUDA, tokens=tokens)
        ops.synchronize()
    assert store._pages._all[0].buffer.is_pinned()
    store.close()


def test_a_graph_that_is_dropped_while_tensors_come_back():
    store = make_store(device=CUDA)
    handles = forward(store, device=CUDA)
    handles[-1][0].take()
    del handles
    assert store.used_bytes == 0
    torch.zeros(300, 4, 4, dtype=torch.float64, device=CUDA)
    store.close()
