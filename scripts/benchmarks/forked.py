"""Ranks of a training job as forks of the benchmark that starts them, which has imported torch and
transformers already: on two cores a new interpreter takes ten seconds for that.

A rank ends as any program does, with its interpreter: it leaves the benchmark's functions by an
exception, which `main_or_rank` at the end of the program catches. Processes whose parent has died
become children of the benchmark (Linux alone does that), so that `children` finds all that is left
of a job.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class _IsRank(BaseException):
    """Raised in a fork, to leave all that the benchmark was in the middle of."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work


def main_or_rank(main: Callable[[], None]) -> None:
    """Run the benchmark, and in its forks the work of a rank; call this last."""
    torch.set_num_threads(1)  # forks of a process with more hang in their first parallel region
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    work = None
    try:
        main()
    except _IsRank as started:
        work = started.work
    if work is not None:
        work()


def start_ranks(
    world_size: int, work: Callable[[int], None], folder: Path, timeout_s: float
) -> list[int]:
    """Start the ranks of a job and return their process numbers.

    work: what a rank does when all are connected, with its number.
    folder: gets `rank0.log` and so on, with all that ranks print, and the meeting point.
    timeout_s: of the job's process group.
    """
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    pids = []
    for rank in range(world_size):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            raise _IsRank(partial(_run_rank, rank, world_size, work, folder, timeout_s))
        pids.append(pid)
    return pids


def _run_rank(
    rank: int, world_size: int, work: Callable[[int], None], folder: Path, timeout_s: float
) -> None:
    """Connect to the other ranks, and do the work of this one."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        OMP_NUM_THREADS="1",
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    work(rank)


# ---- processes


def children(pid: int | None = None) -> dict[int, str]:
    """Return the living children of a process and what they run, by process number.

    pid: None for this process.
    """
    pid = os.getpid() if pid is None else pid
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # "number (name) state parent ...", where the name may hold anything
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if int(parent) == pid and state != "Z":
            found[int(folder.name)] = command.strip()
    return found


def reap() -> None:
    """Let go of children that have ended, whoever started them."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
