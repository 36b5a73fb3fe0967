"""Which transport a job gets, by the backends that it has for a device."""

import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_flexseq.distributed import connect as connecting
from hf_flexseq.distributed import process_groups
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.gloo import GlooTransport
from hf_flexseq.distributed.lone_rank import LoneTransport
from hf_flexseq.distributed.nccl import NcclTransport
from tests.distributed.stub import StubDistributed, StubJob
from tests.ranks import run_ranks

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_was_connected(monkeypatch):
    monkeypatch.setattr(connecting, "_transports", {})
    monkeypatch.setattr(connecting, "_job", None)


def start(monkeypatch, **backends):
    job = StubJob(**backends)
    return StubDistributed(monkeypatch, rank=1, world_size=4, job=job)


NCCL, GLOO = {"cuda": "nccl", "cpu": "gloo"}, {"cpu": "gloo", "cuda": "gloo"}


@pytest.mark.parametrize(
    ("backends", "device", "kind"),
    [
        (NCCL, CUDA, NcclTransport),
        (NCCL, CPU, GlooTransport),
        ({"cuda": "nccl"}, CUDA, NcclTransport),  # nccl; or init_process_group() with a GPU
        ({"cpu": "gloo"}, CPU, GlooTransport),  # init_process_group() without one
        ({"cpu": "gloo"}, None, GlooTransport),
        (GLOO, CPU, GlooTransport),
    ],
)
def test_a_device_gets_the_transport_of_its_own_backend(monkeypatch, backends, device, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stub = start(monkeypatch, **backends)
    assert isinstance(connect(device), kind)
    # Exchanges on the CPU need gloo, whatever backends the job has.
    assert stub.by_backend("gloo")


@pytest.mark.parametrize(
    ("backends", "kind"), [(NCCL, NcclTransport), ({"cpu": "gloo"}, GlooTransport)]
)
def test_without_a_device_it_is_the_rank_s_gpu_where_the_job_has_a_backend_for_it(
    monkeypatch, backends, kind
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    start(monkeypatch, **backends)
    assert isinstance(connect(), kind)


@pytest.mark.parametrize(
    ("backends", "device", "message"),
    [
        ({"cpu": "gloo"}, CUDA, "no backend for tensors on cuda.*cuda:nccl,cpu:gloo"),
        ({"cuda": "nccl"}, CPU, "no backend for tensors on cpu.*cuda:nccl,cpu:gloo"),
        (GLOO, CUDA, "'gloo' cannot carry .* on cuda.*cuda:nccl"),
        ({"cpu": "mpi", "cuda": "mpi"}, CPU, "'mpi' cannot carry .* on cpu.*gloo"),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused_in_one_line(
    monkeypatch, backends, device, message
):
    stub = start(monkeypatch, **backends)
    with pytest.raises(ValueError, match=message) as raised:
        connect(device)
    assert "\n" not in str(raised.value)
    assert not stub.groups, "nothing may be made before it is refused"


@pytest.mark.parametrize("seconds", [0, -3])
def test_no_time_at_all_is_refused(monkeypatch, seconds):
    start(monkeypatch, cpu="gloo")
    with pytest.raises(ValueError, match=f"timeout of {seconds} s.*ddp_timeout"):
        connect(CPU, timeout=timedelta(seconds=seconds))


@pytest.mark.parametrize("given", [None, 77])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_group_has_the_timeout(monkeypatch, device, given):
    stub = start(monkeypatch, **NCCL)
    transport = connect(device, timeout=given and timedelta(seconds=given))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None: zeros(*sizes))
    transport.open_lane("inside nodes", [(0, 1), (2, 3)], peers=[0])
    transport.open_group([(0, 1, 2, 3)])
    assert {group.timeout for group in stub.groups} == {timedelta(seconds=given or 1800)}


def test_a_process_connects_once_for_a_job_a_device_and_a_timeout(monkeypatch):
    stub = start(monkeypatch, cuda="nccl", cpu="gloo")
    first = connect(CUDA)
    groups = len(stub.groups)
    assert connect(CUDA) is first
    assert connect(CUDA, timeout=timedelta(seconds=1800)) is first
    assert len(stub.groups) == groups
    assert connect(CUDA, timeout=timedelta(seconds=5)) is not first
    assert connect(CPU) is not first
    # a new job of the same process
    start(monkeypatch, cuda="nccl", cpu="gloo")
    assert connect(CUDA) is not first


def test_a_single_rank_needs_no_backend(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert isinstance(connect(CUDA), LoneTransport)


# ---- descriptors

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, [(1536, 4096)]),
        (1024, 1536, [(1536, 1536)]),
        (1024, UNLIMITED, [(1536, UNLIMITED)]),
        (1536, 4096, []),
        (UNLIMITED, UNLIMITED, []),
    ],
)
def test_descriptors_are_asked_for_where_they_would_run_out(monkeypatch, soft, hard, wanted):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    process_groups.reserve_descriptors(1024)
    assert asked == wanted


def sums_after_a_group_of_one(rank, world_size):
    communicator = Communicator()
    dist.new_group([0])  # all ranks call it, as torch wants, and rank 0 alone is in it
    group = communicator.transport.open_group([(0, 2), (1, 3)])
    again = communicator.transport.open_group([(0, 1)])
    sums = []
    for ranks in (group, again):
        if ranks is not None:
            x = torch.tensor([float(rank)])
            ranks.all_reduce(x)
            sums.append(float(x))
    return sums


@pytest.mark.processes
def test_groups_can_be_made_where_ranks_are_in_different_numbers_of_others():
    assert run_ranks(sums_after_a_group_of_one, 4) == [[2.0, 1.0], [4.0, 1.0], [2.0], [4.0]]


def connected_with_few_descriptors_on_one_rank(rank, world_size):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    with pytest.raises(ValueError) as raised:
        connect(CPU)
    return str(raised.value)


@pytest.mark.processes
def test_too_few_descriptors_on_one_machine_are_refused_on_all_ranks():
    first, second = run_ranks(connected_with_few_descriptors_on_one_rank, 2)
    assert first == second
    assert first.startswith("rank 1, connecting to the others: a process needs 516 descriptors")
