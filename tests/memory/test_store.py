"""Tensors come back from the host with the bits that left, under a budget, and leave nothing."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_flexseq.memory import machine
from hf_flexseq.memory.device import device_memory_bytes
from hf_flexseq.memory.pages import GIB, MIB, HostMemoryFull, page_bytes_of
from hf_flexseq.memory.store import HostStore, free_cached_pinned_memory
from tests.host_store import held_bytes, leaving, used_bytes

CPU = torch.device("cpu")
LAYERS = 6


def make_store(budget=MIB, device=CPU):
    return HostStore(device, budget)


def tensors_of(layer, device=CPU, tokens=300):
    """A layer's input, result of attention and log-sum-exps: the last are small and odd."""
    make = torch.Generator().manual_seed(layer)
    shapes = ((1, tokens, 16), (tokens, 4, 4), (4, 7 + layer))
    dtypes = (torch.bfloat16, torch.float64, torch.float32)
    for shape, dtype in zip(shapes, dtypes, strict=True):
        yield torch.randn(shape, generator=make).to(device, dtype)


def forward(store, layers=LAYERS, device=CPU, tokens=300):
    """Put some tensors of every layer; return their handles by layer."""
    handles = []
    for layer in range(layers):
        store.begin_layer()
        handles.append([store.put(x) for x in tensors_of(layer, device, tokens)])
    store.settle()
    return handles


def backward(handles, device=CPU, tokens=300):
    """Take all tensors, the last layer's first, and compare them."""
    for layer in reversed(range(len(handles))):
        for stored, wanted in zip(handles[layer], tensors_of(layer, device, tokens), strict=True):
            found = stored.take()
            assert found.dtype == wanted.dtype
            assert found.device == wanted.device
            assert found.is_contiguous()
            assert torch.equal(found, wanted)
        handles.pop()


def test_the_same_bits_come_back_over_many_steps_of_changing_lengths():
    store = make_store()
    drawn = random.Random(0)
    held = []
    for step in range(50):
        tokens = drawn.randrange(1, 300) if step else 300
        backward(forward(store, tokens=tokens), tokens=tokens)
        assert used_bytes(store) == 0
        held.append(held_bytes(store))
    assert set(held[1:]) == {held[0]}
    assert store.peak_bytes <= held[0] <= 1.5 * store.peak_bytes
    store.close()
    assert held_bytes(store) == 0


def test_a_layer_comes_back_while_the_one_after_it_is_used(monkeypatch):
    store = make_store()
    handles = forward(store)
    fetched = []
    original = HostStore._fetch_one

    def noted(self, stored):
        fetched.append(next(at for at, layer in enumerate(handles) if stored in layer))
        original(self, stored)

    monkeypatch.setattr(HostStore, "_fetch_one", noted)
    handles[5][1].take()
    assert fetched == [5] * 3 + [4] * 3
    handles[5][0].take()
    assert len(fetched) == 6
    handles[4][0].take()
    assert fetched[6:] == [3] * 3
    handles[4][0].take()  # for a second backward
    assert fetched[9:] == [4]


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).T,  # is stored the other way round
        torch.ones(1, 3).expand(4, 3),
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.tensor([True, False]),
        torch.tensor([[1 << 40]]),
    ],
)
def test_any_tensor_comes_back(x):
    store = make_store()
    stored = store.put(x)
    for _ in range(2):
        found = stored.take()
        assert found.dtype == x.dtype
        assert torch.equal(found, x)


def test_tensors_leave_the_device_one_layer_later():
    store = make_store()
    alive = []
    most = 0
    for layer in range(LAYERS):
        store.begin_layer()
        for x in tensors_of(layer):
            alive.append(StorageWeakRef(x.untyped_storage()))
            store.put(x)
            del x
            most = max(most, sum(not one.expired() for one in alive))
    assert most == 3
    assert [one.expired() for one in alive] == [True] * 15 + [False] * 3
    store.begin_layer()  # that puts nothing
    store.begin_layer()
    assert leaving(store) == 0
    assert all(one.expired() for one in alive)


def test_a_graph_that_is_dropped_gives_its_bytes_back():
    store = make_store()
    gc.disable()
    try:
        handles = forward(store)
        handles[5][0].take()  # and the layer before it is on its way
        assert used_bytes(store) == store.peak_bytes > 0
        del handles
        assert used_bytes(store) == 0
    finally:
        gc.enable()
    backward(forward(store))


def test_a_budget_is_named_when_it_is_exceeded():
    store = make_store(budget=GIB // 2**14)  # 64 KiB
    assert page_bytes_of(store._pages.budget) == 4096
    with pytest.raises(HostMemoryFull, match=r"host_memory_gib=6\.1e-05.*max_tokens_per_rank"):
        forward(store)
    assert held_bytes(store) <= GIB // 2**14
    assert page_bytes_of(100 * GIB) == 64 * MIB
    assert page_bytes_of(GIB // 2) == 32 * MIB


@pytest.mark.parametrize("settles", [False, True])
def test_a_tensor_that_is_written_to_while_it_leaves_is_noticed(settles):
    store = make_store()
    store.begin_layer()
    x = torch.zeros(3)
    stored = store.put(x)
    x += 1
    store.begin_layer()
    with pytest.raises(RuntimeError, match="writes to a layer's input"):
        store.settle() if settles else store.begin_layer()
    assert stored.take().tolist() == [0, 0, 0]


def test_nothing_is_left_once_a_store_is_closed():
    store = make_store()
    handles = forward(store)
    buffers = [weakref.ref(page.buffer) for page in store._pages._all]
    store.close()
    assert [buffer() for buffer in buffers] == [None] * len(buffers)
    del handles
    assert used_bytes(store) == held_bytes(store) == 0
    with pytest.raises(AssertionError, match="has been closed"):
        store.put(torch.ones(3))


# ---- how much there is


def test_a_budget_is_a_share_of_what_is_available(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "total_bytes", lambda: 100 * GIB)
    assert machine.budget_bytes(None, 8) == 4 * GIB
    assert machine.budget_bytes(12.5, 8) == 12.5 * GIB
    with pytest.raises(
        ValueError, match=r"host_memory_gib=13 for each of 8 ranks.*100.0 GiB.*12.5"
    ):
        machine.budget_bytes(13, 8)


def put_group(folder, limit, used, cached, names):
    """Write a control group. names: of the limit, the use, and the cache in memory.stat."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_or_a_job_has_less_than_its_machine(version, monkeypatch, tmp_path):
    groups = tmp_path / "cgroup"
    monkeypatch.setattr(machine, "_OWN_GROUPS", groups)
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    memory = SimpleNamespace(total=4_000_000, available=3_000_000)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    assert (machine.total_bytes(), machine.available_bytes()) == (4_000_000, 3_000_000)
    groups.write_text(("4:cpu:/\n9:memory:/job/step\n", "0::/job/step\n")[version - 1])
    names = (machine._VERSION_1, machine._VERSION_2)[version - 1]
    root = (tmp_path / "memory", tmp_path)[version - 1]
    put_group(root, "max", 5, 0, names)
    put_group(root / "job" / "step", "max", 5, 0, names)
    assert (machine.total_bytes(), machine.available_bytes()) == (4_000_000, 3_000_000)
    # of a job that has read a file
    put_group(root / "job", 1_000_000, 900_000, 500_000, names)
    assert (machine.total_bytes(), machine.available_bytes()) == (1_000_000, 600_000)
    assert device_memory_bytes(torch.device("cpu"), 2) == 500_000
    # in a container, which sees its own group as the root
    put_group(root, 800_000, 700_000, 0, names)
    assert (machine.total_bytes(), machine.available_bytes()) == (800_000, 100_000)


def test_pinned_memory_that_torch_keeps_is_given_back(monkeypatch):
    """By a function of CUDA builds."""
    calls = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(1), raising=False)
    free_cached_pinned_memory()
    assert calls == [1]
