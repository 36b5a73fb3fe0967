"""Jobs of several ranks over what calls itself NCCL, each rank a process with the device: the
losses are those of the same job on CPUs over gloo, and nothing is found."""

import functools
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.late_device import build
from tests.programs import ROOT

REASON = build.reason_unavailable()
SECONDS = 400

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.timeout(SECONDS + 50),
    pytest.mark.skipif(REASON is not None, reason=f"no device to test on: {REASON}"),
]


def run_job(options, world_size=2):
    """Start the ranks of a job, each alone on its node, and return what rank 0 has found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(world_size):
        command = [sys.executable, "-m", "tests.late_device.rank", json.dumps(options)]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | shared | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return json.loads(said[0][0].strip().splitlines()[-1])


@functools.cache
def on_cpus(images):
    """The losses over gloo. images: see `rank.py`."""
    found = run_job({"use_cpu": True, "images": images})
    assert found["transport"] == "GlooTransport"
    return found


SHARED = {"planner": "static", "sp_degree": 2}
JOBS = {
    "DDP": {},
    "DDP in lockstep": {"sync": "lockstep"},
    "FSDP2": {"fsdp": True},
    "FSDP2, zigzag, checkpointed": {
        "fsdp": True,
        "strategy": "zigzag",
        "gradient_checkpointing": True,
        **SHARED,
    },
    "DDP, zigzag": {"strategy": "zigzag", **SHARED},
    "DDP, ulysses": {"strategy": "ulysses", **SHARED},
    "a pipeline": {"pipeline_parallel_size": 2},
    "images, DDP": {"images": True},
    "images, FSDP2": {"images": True, "fsdp": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_trainer_has_the_losses_of_cpus(name):
    wanted = on_cpus(JOBS[name].get("images", False))
    found = run_job(JOBS[name])
    assert found["transport"] == "NcclTransport"
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
