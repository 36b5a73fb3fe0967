"""Work on streams of its own: tensors that go to the host and come back, images ahead."""

import contextlib

import torch

from hf_flexseq.steps.early_encoding import EarlyEncoder
from tests.host_store import used_bytes
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
    assert used_bytes(store) == 0
    torch.zeros(300, 4, 4, dtype=torch.float64, device=CUDA)
    store.close()


def test_images_are_encoded_in_their_step_once_memory_has_run_out():
    encoder = EarlyEncoder(CUDA)
    calls = []

    def encode():
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for _ in range(2):
        assert encoder.encode(encode, (), contextlib.nullcontext()) is None
    assert len(calls) == 1
